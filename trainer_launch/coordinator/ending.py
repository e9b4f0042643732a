"""How a generation ends and how the job does, and who is told. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from trainer_launch.coordinator import protocol as msg
from trainer_launch.coordinator.forming import form_when_due, reckon
from trainer_launch.coordinator.state import Key, Node, Phase, Reply, Say, Send, State, runs

SAY_S = 0.2  # between a change and the words about it: many changes, one message
Step: TypeAlias = tuple[State, tuple[Reply, ...]]


def die(state: State, reason: str, now_s: float, but: Key | None = None) -> Step:
    """The generation is over; its other members are told, once."""
    run = state.run
    if run is None or not runs(state):
        return state, ()
    restart = msg.Restart(run.number, reason)
    others = peers_of(state, tuple(key for key in run.members if key != but))
    state = replace(state, phase=Phase.GATHERING, gather_from_s=now_s, admit_at_s=None)
    told: tuple[Reply, ...] = (
        Say(f"generation {run.number} is over: {reason}"),
        *(Send(peer, restart) for peer in others),
    )
    return settle(state, told, now_s)


def fail(state: State, node: Node, failed: msg.Failed, now_s: float) -> Step:
    """Only this costs the budget, once for each generation."""
    first = msg.GiveUp("", node.name, failed.rank, failed.exit_code, failed.signal, failed.message)
    rank = "a worker" if failed.rank is None else f"rank {failed.rank}"
    return charge(replace(state, failure=first), f"{rank} failed on {node.name}", now_s, but=node.key)


def charge(state: State, reason: str, now_s: float, but: Key | None = None) -> Step:
    settings = state.settings
    window_s = settings.window_s
    recent = () if window_s is None else tuple(at_s for at_s in state.failures_s if at_s > now_s - window_s)
    used = state.restarts if window_s is None else len(recent)
    state = replace(state, failures_s=(*recent, now_s))
    if used >= settings.max_restarts:
        within = "" if window_s is None else f" within {window_s:g} s"
        return give_up(state, f"{reason}, and all {settings.max_restarts} restarts{within} are used up")
    return stumble(replace(state, restarts=state.restarts + 1), reason, now_s, but)


def stumble(state: State, reason: str, now_s: float, but: Key | None = None) -> Step:
    """End a generation that did not get far, but not for ever."""
    settings, run = state.settings, state.run
    early = run is not None and (run.go_s is None or now_s - run.go_s < settings.crash_loop_s)
    state = replace(state, crashes=state.crashes + 1 if early else 0)
    if state.crashes >= settings.crash_loop:
        within = f"{state.crashes} times in a row within {settings.crash_loop_s:g} s of the start"
        return give_up(state, f"{reason}, and generations have failed {within}")
    return die(state, reason, now_s, but)


def give_up(state: State, reason: str) -> Step:
    return end(state, replace(state.failure or msg.GiveUp(""), reason=reason))


def quit_job(state: State, node: Node, reason: str) -> Step:
    """A member of the last generation ends the job for all; a spare or a newcomer cannot."""
    if state.end is not None or state.run is None or node.key not in state.run.members:
        return state, ()
    return give_up(state, f"{node.name} {reason}")


def end(state: State, word: msg.GiveUp | msg.Finished) -> Step:
    """The job is over; whoever calls later hears the same."""
    text = f"the job has failed: {word.reason}" if isinstance(word, msg.GiveUp) else "all nodes are done"
    over = replace(state, phase=Phase.OVER, end=word, form_at_s=None, admit_at_s=None, say_at_s=None)
    return over, (Say(text), *(Send(peer, word) for peer in state.peers))


def settle(state: State, replies: tuple[Reply, ...], now_s: float) -> Step:
    """After any change of who is there: what is due now, and when to look again."""
    if state.phase is Phase.OVER:
        return state, replies
    state, formed = form_when_due(reckon(state), now_s)
    if state.say_at_s is None:
        state = replace(state, say_at_s=now_s + SAY_S)
    return state, (*replies, *formed)


def peers_of(state: State, keys: tuple[Key, ...]) -> list[int]:
    peers = (state.nodes[key].peer for key in keys if key in state.nodes)
    return [peer for peer in peers if peer is not None]
