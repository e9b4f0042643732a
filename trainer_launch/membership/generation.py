"""How a generation forms, of whom, and how it ends; how the job ends, and who is told."""

from __future__ import annotations

import logging
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from trainer_launch.membership import protocol as msg
from trainer_launch.membership import timeouts
from trainer_launch.membership.election import choose, may_form
from trainer_launch.membership.notes import Joined, Judge, MemberView, Tell, ignore, opened
from trainer_launch.membership.protocol import Claim
from trainer_launch.membership.retry_policy import why_not_again, why_spent
from trainer_launch.membership.state import (
    JobPhase,
    JobState,
    Key,
    Loss,
    NodeRecord,
    Run,
    Suspicion,
    members_of,
    newcomers,
    room,
    runs,
)
from trainer_launch.model import Death
from trainer_launch.model.codec import MAX_TEXT
from trainer_launch.model.units import counted, in_ranges, listed, named_ranks

_UNEVEN = "ProgramError"  # the exit reason of a job whose ranks do not run the same number of steps
_LEFT = "PeerLost"  # the same, or the ranks that finished were asked to
_LATE = "Hung"  # and of a job for one of whose ranks the others waited in vain
_KILLS = (signal.SIGKILL, signal.SIGTERM)  # no worker dies of these because a peer has failed
_MOST_NAMED = 8
_MESSAGE_CHARS = 300  # of an exception


def settle(state: JobState, now_s: float) -> None:
    """After any change of who is there: what is due now, and when to look again."""
    if state.phase is JobPhase.OVER:
        return
    _reckon(state)
    if state.form_at_s is not None and now_s >= state.form_at_s:
        charge(state)
        if state.end is not None:
            return
        _form(state, now_s)
        _reckon(state)
    if state.say_at_s is None:
        state.say_at_s = now_s + max(timeouts.SAY_S, len(state.peers) / timeouts.MESSAGES_PER_S)


def _reckon(state: JobState) -> None:
    """Set when to form, or when to let newcomers in."""
    gathers = state.phase is JobPhase.GATHERING
    state.form_at_s = _form_at_s(state) if gathers else None
    state.admit_at_s = None if gathers else _admit_at_s(state)


def _form(state: JobState, now_s: float) -> None:
    """Form the next generation; its members are told who they are."""
    chosen, number = choose(state), state.generation + 1
    members = {node.key: i for i, node in enumerate(chosen)}
    _say_replaced(state, members)
    ranks, claim = in_ranges(node.node_rank for node in chosen), None
    if state.settings.candidate is not None and len(ranks) <= MAX_TEXT:
        claim = Claim(number, state.settings.candidate, ranks, sure=False)
        state.formed.add(claim)
    note_bodies = _notes_for(state, chosen, now_s)
    for node in chosen:
        state.set_joined(node, False)
        node.returning = True
    # Who is not connected is forgotten: names of pods that never return must not pile up.
    state.nodes = {key: node for key, node in state.nodes.items() if node.peer is not None}
    state.refused.clear()  # whoever was refused is not missed
    state.run = Run(number=number, members=members, formed_s=now_s, claim=claim)
    state.phase, state.generation, state.failure, state.announced = JobPhase.FORMED, number, None, None
    size, restarts = counted(len(chosen), "node"), counted(state.restarts, "restart")
    state.say(f"generation {number}: {size}, {restarts} so far", logging.DEBUG)
    _say_places(state, number, chosen)
    kept = sum(node.kept for node in chosen if node.last_generation == number - 1)  # others have trained since
    formed = msg.Formed(number, 0, len(chosen), state.restarts, False, claim, kept=kept)
    for i, (node, (first, world, first_role, role_world)) in enumerate(zip(chosen, _ranks(chosen), strict=True)):
        own = replace(formed, group_rank=i, is_store_host=i == 0, first_rank=first, world_size=world)
        own = replace(own, first_role_rank=first_role, role_world_size=role_world, notes=note_bodies.get(i, {}))
        if state.settings.by_arrival:
            own = replace(own, node_rank=node.node_rank)
        if node.peer is not None:
            state.send(node.peer, own)


def _say_replaced(state: JobState, members: Mapping[Key, int]) -> None:
    """Say which nodes take the places of which."""
    before = state.run.members
    lost = [state.nodes[key].name if key in state.nodes else f"node {key}" for key in before if key not in members]
    new = [state.nodes[key].name for key in members if key not in before]
    if state.settings.spares and lost and new:
        state.say(f"{listed(new, _MOST_NAMED)} replaces {listed(lost, _MOST_NAMED)}")


def _say_places(state: JobState, number: int, chosen: list[NodeRecord]) -> None:
    """Where the nodes are, and who has the last ranks because it did not say so."""
    places = [f"{node.name} at {node.hello.label}" for node in chosen if node.hello.label]
    if not places:
        return
    level = logging.WARNING if number > 1 else logging.INFO
    state.say(f"generation {number}: ranks by topology: {listed(places, _MOST_NAMED)}", level)
    names = [node.name for node in chosen if not node.hello.label]
    if names:
        who = f"{listed(names, _MOST_NAMED)} {'has' if len(names) == 1 else 'have'}"
        state.say(f"{who} no topology label, and the last ranks; set --topology-label there, too")


def _notes_for(state: JobState, chosen: list[NodeRecord], now_s: float) -> dict[int, dict[str, object]]:
    """The judges' notes for the members of a generation, by their numbers and topics."""
    bodies: dict[int, dict[str, object]] = {}
    for topic, judge in state.judges.items():
        joined = [
            Joined(number, not node.returning, node.notes.get(topic), node.joined_s)
            for number, node in enumerate(chosen)
        ]
        for number, body in judge.form(joined, now_s).items():
            bodies.setdefault(number, {})[topic] = body
    return bodies


def _ranks(chosen: list[NodeRecord]) -> Iterator[tuple[int, int, int, int]]:
    """Each node's first rank and the world size, then both within its role: numbered by node, as torchrun does."""
    if any(node.hello.workers == 0 for node in chosen):
        yield from [(0, 0, 0, 0)] * len(chosen)
        return
    of_role, before_of_role = Counter[str](), Counter[str]()
    for node in chosen:
        of_role[node.hello.role] += node.hello.workers
    before, all_workers = 0, of_role.total()
    for node in chosen:
        yield before, all_workers, before_of_role[node.hello.role], of_role[node.hello.role]
        before += node.hello.workers
        before_of_role[node.hello.role] += node.hello.workers


def _form_at_s(state: JobState) -> float | None:
    """At once when nobody can be missed; else after a moment for others, if fewer than max are allowed."""
    settings, begun_s, is_first = state.settings, state.gather_from_s, not state.run.members
    if state.n_joined < settings.min_nodes or begun_s is None or not may_form(state):
        return None
    if state.run.members and all(key in state.nodes and state.nodes[key].joined for key in state.run.members):
        return state.joined_s
    if state.n_joined >= settings.max_nodes:
        ready_s = state.joined_s
        if is_first and settings.spares and state.generation:  # more members are about to come back
            ready_s += timeouts.GATHER_S
        elif is_first and _has_spare(state):  # the job's own nodes are about to come
            ready_s = max(ready_s, begun_s + timeouts.WINDOW_S)
    elif settings.shrink_after_s is None:
        return None
    else:
        ready_s = max(state.joined_s + timeouts.GATHER_S, begun_s + settings.shrink_after_s)
        if is_first and (settings.candidate == 0 or settings.by_arrival):
            # More pods are about to start, or to come back.
            ready_s = max(ready_s, begun_s + timeouts.WINDOW_S)
    return max(ready_s, begun_s + timeouts.SETTLE_S) if _is_anyone_late(state) else ready_s


def _has_spare(state: JobState) -> bool:
    """Whether a spare would be in the first generation, in place of a node of the job's own."""
    most = state.settings.max_nodes
    return state.settings.spares > 0 and any(node.node_rank >= most for node in choose(state))


def _is_anyone_late(state: JobState) -> bool:
    """Whether a live member of the last generation still stops its workers; no spare takes its place meanwhile."""
    last = state.run.members
    return any(
        node.returning and not node.joined and node.peer is not None and (not last or key in last)
        for key, node in state.nodes.items()
    )


def _admit_at_s(state: JobState) -> float | None:
    """A moment after the latest newcomer, while there is room and nobody has finished; at once if no more fit."""
    if not runs(state) or state.run.done:
        return None
    if room(state) <= 0 or state.n_joined == 0:
        return None
    prepared = len(newcomers(state))
    if not prepared:
        return None
    return state.joined_s + (timeouts.GATHER_S if prepared < room(state) else 0.0)


def die(
    state: JobState,
    reason: str,
    now_s: float,
    but: Key | None = None,
    since_s: float | None = None,
    grows: bool = False,
) -> None:
    """The generation is over, unnoticed since `since_s`; its other members are told, once."""
    run = state.run
    if not runs(state):
        return
    begin_judging(state, (), now_s)
    state.phase, state.gather_from_s, state.admit_at_s = JobPhase.GATHERING, now_s, None
    state.say(f"generation {run.number} is over: {reason}", logging.DEBUG)
    unnoticed_s = 0.0 if since_s is None else round(max(0.0, now_s - since_s), 3)
    cause = None if state.suspicion is None else state.suspicion.failed
    is_unknown = cause is not None and cause.lost_peer and not cause.timed_out
    patience_s = timeouts.PATIENCE_S if is_unknown else 0.0
    send_members(state, msg.Restart(run.number, reason, unnoticed_s, grows, patience_s), but)
    settle(state, now_s)


def send_members(state: JobState, message: msg.FromServer, but: Key | None = None) -> None:
    """Send a message to all members of the present generation that are connected, but one."""
    for key in state.run.members:
        node = state.nodes.get(key)
        if node is not None and node.peer is not None and key != but:
            state.send(node.peer, message)


def fail(state: JobState, node: NodeRecord, failed: msg.Failed, now_s: float) -> None:
    """Only this costs the budget, once for each generation, unless a peer turns out to have been lost before."""
    place = _node_of(state, failed.rank) or node  # another one, where all nodes have told why one hangs
    first = msg.GiveUp("", None, failed.rank, failed.exit_code, failed.signal, failed.message)
    first = replace(first, exit_reason=failed.exit_reason, helps=failed.helps)
    first = _placed(replace(first, is_victim=failed.lost_peer or not failed.is_cause), place)
    if failed.cause is not None:
        state.failure = replace(first, cause=failed.cause, message=None)
        give_up(state, failed.message)
        return
    reason = _reason(place, failed)
    record = Death(
        attempt=failed.generation,
        rank=failed.rank,
        code=failed.exit_code,
        signal=failed.signal,
        error=failed.error,
        message=failed.message,
    )
    # With what its node saw of its other workers.
    suspicion = Suspicion(
        key=node.key,
        reason=reason,
        at_s=now_s,
        failed=failed,
        is_only_victim=failed.lost_peer,
        finished=set(failed.finished),
        may_be_asked=failed.may_be_asked,
        notes={node.key: carried(state, failed.notes)},
        before=state.early_failure,
    )
    is_early = _lasted_s(state, now_s) < timeouts.START_S
    why_not = why_not_again(record, state.early_failure, is_early=is_early)
    state.failure = replace(first, seen=_notes_on(state, first, suspicion))
    state.early_failure = record if is_early else None
    if why_not is not None:
        give_up(state, f"{reason}; not restarted, because {why_not}")
        return
    # The generation ends at once. This is charged when its members are back, or in a moment.
    state.suspicion = suspicion
    die(state, _with_words(reason, failed.message), now_s, node.key)
    if [*state.run.members] == [node.key]:  # who could have been lost?
        charge(state)


def correct(state: JobState, node: NodeRecord, failed: msg.Failed, now_s: float) -> None:
    """Charge a failure that came first, though the news of it comes later."""
    suspicion, run = state.suspicion, state.run
    if suspicion is None or failed.generation != run.number or node.key not in run.members:
        return
    before = suspicion.failed
    if node.key == suspicion.key or (failed.lost_peer and not failed.timed_out):
        return
    if _is_silent(failed) and _is_silent(before) and failed.exit_code == before.exit_code:
        if state.failure is not None and not state.failure.is_victim:
            state.failure = replace(state.failure, is_victim=True, exit_reason="")
            suspicion.reason += ", others in the same way: nothing tells which of them is the cause"
        return
    if _order(failed, now_s) >= _order(before, suspicion.at_s):
        return
    later = "had only lost its connection" if before.lost_peer else "failed after that"
    state.say(f"{_with_words(_reason(node, failed), failed.message)}; {_who(before)} {later}")
    state.early_failure = suspicion.before
    fail(state, node, failed, now_s)
    found = state.suspicion if failed.lost_peer else None
    if found is not None:  # what others have told of their ends stays true
        found.is_only_victim &= suspicion.is_only_victim
        found.finished |= suspicion.finished
        found.may_be_asked |= suspicion.may_be_asked
        found.notes = suspicion.notes | found.notes


def _order(failed: msg.Failed, heard_s: float) -> tuple[int, bool, float]:
    """The smaller, the nearer to the cause: a worker that was killed is nobody's victim, and a victim is no cause.

    Who waited until a time-out is nearer than who lost a connection: to a rank that had timed out.
    """
    rank = failed.lost_peer + (failed.lost_peer and not failed.timed_out)
    return rank, failed.signal not in _KILLS, heard_s - failed.ago_s if rank != 1 else 0.0


def _is_silent(failed: msg.Failed) -> bool:
    """Whether a rank has ended by itself, and said nothing."""
    return failed.rank is not None and failed.signal is None and not (failed.message or failed.lost_peer)


def _who(failed: msg.Failed) -> str:
    return "a worker" if failed.rank is None else f"rank {failed.rank}"


def _reason(node: NodeRecord, failed: msg.Failed) -> str:
    """The worker that failed, and how; other failures, such as the store's end, have their own sentences."""
    if failed.exit_reason == _LATE and failed.signal == signal.SIGKILL:
        if failed.rank is None:
            return f"the workers on {node.name} were ended by the launcher, because they hung"
        return f"{_who(failed)} on {node.name} was ended by the launcher, because it hung"
    if failed.rank is None and failed.message:
        return f"{failed.message} on {node.name}"
    how = "" if failed.exit_code is None else f" with exit code {failed.exit_code}"
    how = how if failed.signal is None else f" by signal {failed.signal}"
    return f"{_who(failed)} failed on {node.name}{how}"


def _with_words(reason: str, message: str | None) -> str:
    """A reason with what the worker said itself."""
    words = " ".join((message or "").split())[:_MESSAGE_CHARS]
    return reason if not words or words in reason else f"{reason}: {words}"


def _lasted_s(state: JobState, now_s: float) -> float:
    """How long the workers of the present generation have been there."""
    return 0.0 if state.run.go_s is None else now_s - state.run.go_s


def forgive(state: JobState, lost: NodeRecord) -> None:
    """Another member is lost: it was that what made the worker fail."""
    suspicion, run = state.suspicion, state.run
    if suspicion is None or lost.key == suspicion.key or lost.key not in run.members:
        return
    state.suspicion = state.failure = state.early_failure = None
    state.say(f"{suspicion.reason} because {lost.name} was lost, which costs no restart")


def charge(state: JobState) -> None:
    """The suspicion, if there is any, has turned out to be true."""
    suspicion, settings = state.suspicion, state.settings
    if suspicion is None:
        return
    reason = _name_cause(state, suspicion) if suspicion.is_only_victim else ""
    state.suspicion, failure = None, state.failure
    if failure is not None and failure.cause == _UNEVEN:
        give_up(state, reason)
        return
    if failure is not None:
        state.failure = replace(failure, seen=_notes_on(state, failure, suspicion))
    spent = why_spent(state.restarts, settings.max_restarts)
    if spent is not None:
        give_up(state, f"{reason or suspicion.reason}, and {spent}")
        return
    if reason:
        state.say(reason)
    state.restarts += 1


def note_loss(state: JobState, node: NodeRecord, now_s: float) -> None:
    """Charge a pod that dies at one stage again and again: with memory.oom.group, memory ends the launcher, too."""
    run = state.run
    if node.key not in run.members or not node.returning or state.end is not None:
        return
    losses = tuple(loss for loss in state.losses if loss.key == node.key)
    if losses and losses[-1].generation == run.number:
        return
    losses = (*losses, Loss(node.key, run.number, _lasted_s(state, now_s)))
    state.losses = losses
    latest = [loss.lasted_s for loss in losses[-timeouts.LOSSES :]]
    # At one stage: at the start, or after nearly the same time.
    is_same = max(latest) < timeouts.START_S or max(latest) <= timeouts.SAME_STAGE * min(latest)
    if len(latest) < timeouts.LOSSES or not is_same:
        return
    lasted_s = latest[-1]
    stage = f"{lasted_s:.0f} s after the workers started" if lasted_s else "before its workers started"
    reason = f"the pod of {node.name} died {len(losses)} times in a row, now {stage}; see whether it was OOMKilled"
    spent = why_spent(state.restarts, state.settings.max_restarts)
    if spent is not None:
        give_up(state, f"{reason}; {spent}")
        return
    state.restarts += 1
    state.say(f"{reason}; this costs a restart")


def _notes_on(state: JobState, failure: msg.GiveUp, suspicion: Suspicion) -> str:
    """The notes on a worker that was killed, and so cannot say why: what the workers were in says more."""
    return "" if failure.signal is None else _explained(state, suspicion)


def _explained(state: JobState, suspicion: Suspicion) -> str:
    """The judges' words about the notes of the nodes whose workers have ended."""
    texts = (judge.explain_end(_bodies(judge, suspicion)) for judge in state.judges.values())
    return "; ".join(filter(None, texts))


def _bodies(judge: Judge, suspicion: Suspicion) -> list[Any]:
    return [of_node[judge.topic] for of_node in suspicion.notes.values() if judge.topic in of_node]


def give_up(state: JobState, reason: str) -> None:
    """The job has failed, for the failure that is known or else for this reason."""
    end(state, replace(state.failure or msg.GiveUp(""), reason=reason))


def end(state: JobState, word: msg.GiveUp | msg.Finished) -> None:
    """The job is over; whoever calls later hears the same."""
    begin_judging(state, (), 0.0)
    state.phase, state.end = JobPhase.OVER, word
    # A failure that was only suspected is none any more.
    state.suspicion = state.form_at_s = state.admit_at_s = state.say_at_s = None
    if isinstance(word, msg.GiveUp):
        words = "" if word.cause else word.message  # else the reason has them
        state.say(_with_words(f"the job has failed: {word.reason}", words))
    else:
        state.say("all nodes are done", logging.INFO)
    for peer in state.peers:
        state.send(peer, word)


def note_ends(state: JobState, key: Key, join: msg.Join, notes: Mapping[str, Any]) -> None:
    """Take in what a member of the last generation says of its workers when it joins again."""
    suspicion, run = state.suspicion, state.run
    if suspicion is None or key == suspicion.key or key not in run.members:
        return
    suspicion.is_only_victim = suspicion.is_only_victim and not join.failed
    suspicion.finished.update(join.finished)
    suspicion.may_be_asked = suspicion.may_be_asked or join.may_be_asked
    suspicion.notes[key] = {**suspicion.notes.get(key, {}), **notes}


def _name_cause(state: JobState, suspicion: Suspicion) -> str:
    """The ranks for which the victim waited in vain, in a sentence; "": it is not proved.

    A rank that waited in vain says that a peer is gone or late, not which one or why. Ranks that finished are the
    cause only if every node has told how its workers ended; a late rank only if all members of its group reported.
    """
    run, failure, victim = state.run, state.failure, suspicion.failed.rank
    if failure is None or victim is None:
        return ""
    if suspicion.finished and run.members.keys() <= suspicion.notes.keys():
        who, it = named_ranks(suspicion.finished), "it" if len(suspicion.finished) == 1 else "them"
        text = f"{who} finished with exit code 0 while rank {victim} still waited for {it}"
        text = "; ".join(filter(None, (text, _explained(state, suspicion))))
        # A handler of SIGTERM may save and leave.
        state.failure = replace(failure, cause=_LEFT if suspicion.may_be_asked else _UNEVEN)
        return text if suspicion.may_be_asked else f"{text}: uneven data, a restart will not help"
    for judge in state.judges.values() if suspicion.failed.timed_out else ():
        text, ranks = judge.explain_timeout(_bodies(judge, suspicion), victim)
        if text:
            named = msg.GiveUp("", rank=next(iter(ranks), None), message=failure.message, cause=_LATE)
            state.failure = _placed(named, _node_of(state, named.rank))
            return text
    return ""


def _placed(end: msg.GiveUp, node: NodeRecord | None) -> msg.GiveUp:
    return end if node is None else replace(end, node=node.name, node_rank=node.node_rank, host=node.hello.host)


def _node_of(state: JobState, rank: int | None) -> NodeRecord | None:
    """The node whose worker has a rank; None: it is not known."""
    if rank is None:
        return None
    for key in state.run.members:
        node = state.nodes.get(key)
        if node is None or rank < node.hello.workers:
            return node
        rank -= node.hello.workers
    return None


def carried(state: JobState, notes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The notes in a Join or a Failed, as far as judges want them."""
    wanted = {topic: judge.carried for topic, judge in state.judges.items() if topic in notes}
    bodies = {topic: opened(kind, notes[topic], topic) for topic, kind in wanted.items()}
    return {topic: body for topic, body in bodies.items() if body is not None}


def hear_note(state: JobState, node: NodeRecord, note: msg.Note, now_s: float) -> None:
    """A member's note goes to the judge of its topic."""
    judge, run = state.judges.get(note.topic), state.run
    if judge is None:
        ignore(note.topic, "this coordinator has no use for it")
        return
    body = opened(judge.hears, note.body, note.topic)
    if body is not None:
        judge, news = judge.hear(run.members[node.key], body, partial(members_of, state), now_s)
        _judged(state, judge, news)


def begin_judging(state: JobState, members: Sequence[MemberView], now_s: float) -> None:
    """Tell the judges that these members' workers are started; or, without members, that the generation is over."""
    state.judges = {topic: judge.begin(members, now_s) for topic, judge in state.judges.items()}


def tick_judges(state: JobState, now_s: float) -> None:
    """Time has passed, for some of them perhaps enough."""
    for judge in [*state.judges.values()]:
        if judge.due_s is not None and now_s >= judge.due_s:
            _judged(state, *judge.tick(partial(members_of, state), now_s))


def _judged(state: JobState, judge: Judge, news: Sequence[Tell | str]) -> None:
    """Keep the judge as it is now, and send its notes on their way."""
    state.judges[judge.topic] = judge
    keys = [*state.run.members]
    for item in news:
        if isinstance(item, str):
            state.say(item)
        elif keys:
            note = msg.Note(state.run.number, judge.topic, item.body)
            nodes = [state.nodes.get(keys[number]) for number in item.numbers]
            for node in nodes:
                if node is not None and node.peer is not None:
                    state.send(node.peer, note)
