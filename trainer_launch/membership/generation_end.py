"""How a generation ends and how the job does, and who is told. Pure."""

from __future__ import annotations

from typing import TypeAlias

from trainer_launch.membership import protocol as msg
from trainer_launch.membership import uneven_data
from trainer_launch.membership.formation import form_when_due, reckon
from trainer_launch.membership.state import Key, Node, Phase, Reply, Say, Send, State, Suspicion, runs
from trainer_launch.model.frozen_replace import replace
from trainer_launch.model.typos import is_slip
from trainer_launch.model.units import counted

SAY_S = 0.2  # between a change and the words about it: many changes, one message
_TOLD_PER_S = 1000  # of those that wait: words about it must not delay the job that they wait for
Step: TypeAlias = tuple[State, tuple[Reply, ...]]


def die(state: State, reason: str, now_s: float, but: Key | None = None) -> Step:
    """The generation is over; its other members are told, once."""
    run = state.run
    if run is None or not runs(state):
        return state, ()
    if _lasted_s(state, now_s) >= state.settings.crash_loop_s:
        state = replace(state, crashes=0)  # whatever has ended it
    restart = msg.Restart(run.number, reason)
    others = peers_of(state, tuple(key for key in run.members if key != but))
    state = replace(state, phase=Phase.GATHERING, gather_from_s=now_s, admit_at_s=None)
    told: tuple[Reply, ...] = (
        Say(f"generation {run.number} is over: {reason}"),
        *(Send(peer, restart) for peer in others),
    )
    return settle(state, told, now_s)


def fail(state: State, node: Node, failed: msg.Failed, now_s: float) -> Step:
    """Only this costs the budget, once for each generation, unless a peer turns out to have been lost before."""
    first = msg.GiveUp("", node.name, failed.rank, failed.exit_code, failed.signal, failed.message)
    reason = f"{_what(failed)} on {node.name}{_how(failed)}"
    is_early = _lasted_s(state, now_s) < state.settings.start_s
    in_vain = why(failed, state.early_failure if is_early else None)
    state = replace(state, failure=first, early_failure=failed if is_early else None)
    if in_vain is not None:
        return give_up(state, f"{reason}; not restarted, because {in_vain}")
    return suspect(state, uneven_data.suspicion(failed, reason, node.key, now_s), now_s)


def _what(failed: msg.Failed) -> str:
    """Which worker it was; what is no worker's, such as the store's end, has a sentence of its own."""
    if failed.rank is not None:
        return f"rank {failed.rank} failed"
    return failed.message or "a worker failed"


def _how(failed: msg.Failed) -> str:
    if failed.rank is None and failed.message:
        return ""
    if failed.signal is not None:
        return f" by signal {failed.signal}"
    return "" if failed.exit_code is None else f" with exit code {failed.exit_code}"


def _lasted_s(state: State, now_s: float) -> float:
    """How long the workers of the present generation have been there."""
    return 0.0 if state.run is None or state.run.go_s is None else now_s - state.run.go_s


def suspect(state: State, suspicion: Suspicion, now_s: float) -> Step:
    """End the generation at once, and charge it when its members are back or in a moment."""
    state, told = die(replace(state, suspicion=suspicion), suspicion.reason, now_s, suspicion.key)
    if state.run is not None and state.run.members == (suspicion.key,):  # who could have been lost?
        state, more = charge(state)
        told += more
    return state, told


def forgive(state: State, lost: Node) -> Step:
    """Another member is lost: it was that what made the worker fail."""
    suspicion, run = state.suspicion, state.run
    if suspicion is None or run is None or lost.key == suspicion.key or lost.key not in run.members:
        return state, ()
    say = Say(f"{suspicion.reason} because {lost.name} was lost, which costs no restart")
    return replace(state, suspicion=None, failure=None, early_failure=None), (say,)


def charge(state: State) -> Step:
    """The suspicion has turned out to be true."""
    suspicion, settings = state.suspicion, state.settings
    if suspicion is None:
        return state, ()
    reason, now_s, window_s = suspicion.reason, suspicion.at_s, settings.window_s
    unevenly = uneven_data.why(state)
    state = replace(state, suspicion=None)
    if unevenly is not None and state.failure is not None:
        return give_up(replace(state, failure=replace(state.failure, cause=uneven_data.CAUSE)), unevenly)
    recent = () if window_s is None else tuple(at_s for at_s in state.failures_s if at_s > now_s - window_s)
    used = state.restarts if window_s is None else len(recent)
    state = replace(state, failures_s=(*recent, now_s))
    if used >= settings.max_restarts:
        within = "" if window_s is None else f" within {window_s:g} s"
        if settings.max_restarts == 0:
            return give_up(state, f"{reason}, and --max-restarts 0 allows no restart")
        budget = f"({counted(settings.max_restarts, 'restart')}{within})"
        return give_up(state, f"{reason}, and the restart budget is used up {budget}")
    return stumble(replace(state, restarts=state.restarts + 1), reason, now_s)


def stumble(state: State, reason: str, now_s: float) -> Step:
    """Count a generation that did not get far, but not for ever."""
    settings = state.settings
    early = state.run is not None and _lasted_s(state, now_s) < settings.crash_loop_s
    state = replace(state, crashes=state.crashes + 1 if early else 0)
    if state.crashes >= settings.crash_loop:
        within = f"{state.crashes} times in a row within {settings.crash_loop_s:g} s of the start"
        return give_up(state, f"{reason}, and generations have failed {within}")
    return state, ()


def give_up(state: State, reason: str) -> Step:
    """The job has failed, for the failure that is known or else for this reason."""
    return end(state, replace(state.failure or msg.GiveUp(""), reason=reason))


def quit_job(state: State, node: Node, reason: str) -> Step:
    """A member of the last generation ends the job for all; a spare or a newcomer cannot."""
    if state.end is not None or state.run is None or node.key not in state.run.members:
        return state, ()
    return give_up(state, f"{node.name} {reason}")


def end(state: State, word: msg.GiveUp | msg.Finished) -> Step:
    """The job is over; whoever calls later hears the same."""
    failed = isinstance(word, msg.GiveUp)
    text = f"the job has failed: {word.reason}" if isinstance(word, msg.GiveUp) else "all nodes are done"
    over = replace(state, phase=Phase.OVER, end=word, form_at_s=None, admit_at_s=None, say_at_s=None)
    return over, (Say(text, warns=failed), *(Send(peer, word) for peer in state.peers))


def settle(state: State, replies: tuple[Reply, ...], now_s: float) -> Step:
    """After any change of who is there: what is due now, and when to look again."""
    if state.phase is Phase.OVER:
        return state, replies
    state = reckon(state)
    if state.form_at_s is not None and now_s >= state.form_at_s:
        state, told = charge(state)
        replies += told
        if state.phase is Phase.OVER:
            return state, replies
    state, formed = form_when_due(state, now_s)
    if state.say_at_s is None:
        state = replace(state, say_at_s=now_s + max(SAY_S, len(state.peers) / _TOLD_PER_S))
    return state, (*replies, *formed)


def peers_of(state: State, keys: tuple[Key, ...]) -> list[int]:
    """The connections of these nodes."""
    peers = (state.nodes[key].peer for key in keys if key in state.nodes)
    return [peer for peer in peers if peer is not None]


# -- retry policy ------------------------------------------------------------------------------


_UNPARSABLE = frozenset({"SyntaxError", "IndentationError", "TabError"})
_MISSING = frozenset({"ImportError", "ModuleNotFoundError"})  # once may be a volume that was not there yet
_REFUSALS = {
    2: "its arguments are refused (exit code 2)",
    126: "its program cannot be executed (exit code 126)",
    127: "its program cannot be found (exit code 127)",
}


def why(failed: msg.Failed, before: msg.Failed | None) -> str | None:
    """Why not to start again; None when it may help.

    `before` is how the generation before ended, if both failed soon after their start. Which rank was the first to
    tell is chance: at the start all fail alike.
    """
    if failed.error in _UNPARSABLE:
        return f"a {failed.error} is the same each time"
    if before is None or before.generation + 1 != failed.generation:
        return None
    is_of_code = failed.error in _MISSING or is_slip(failed.message)
    if is_of_code and (failed.error, failed.message) == (before.error, before.message):
        return f"the same {failed.error} has ended two starts in a row"
    if failed.error is None and failed.exit_code == before.exit_code and failed.exit_code in _REFUSALS:
        return f"{_REFUSALS[failed.exit_code]}, two starts in a row"
    return None
