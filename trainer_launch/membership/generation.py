"""How a generation forms, of whom, and how it ends; how the job ends, and who is told. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from msgspec.structs import replace

from trainer_launch.membership import protocol as msg
from trainer_launch.membership import timeouts
from trainer_launch.membership.election import binding, may_form, remember
from trainer_launch.membership.notes import Joined, Judge, Judgement, MemberView, ignore, opened
from trainer_launch.membership.protocol import Claim
from trainer_launch.membership.retry_policy import why_not_again, why_spent
from trainer_launch.membership.state import (
    Key,
    Loss,
    Node,
    Phase,
    Reply,
    Run,
    Say,
    Send,
    State,
    Suspicion,
    members_of,
    newcomers,
    room,
    runs,
)
from trainer_launch.model import Death
from trainer_launch.model.codec import MAX_TEXT
from trainer_launch.model.units import counted, in_ranges, listed

Step: TypeAlias = tuple[State, tuple[Reply, ...]]
_UNEVEN = "ProgramError"  # the exit reason of a job whose ranks do not run the same number of steps
_MOST_NAMED = 8
_MESSAGE_CHARS = 300  # of an exception


# -- forming one ----------------------------------------------------------------------------------


def reckon(state: State) -> State:
    """Set when to form, or when to let newcomers in."""
    if state.phase is Phase.GATHERING:
        return replace(state, form_at_s=_form_at_s(state), admit_at_s=None)
    return replace(state, form_at_s=None, admit_at_s=_admit_at_s(state))


def form_when_due(state: State, now_s: float) -> tuple[State, tuple[Reply, ...]]:
    """Form the next generation when its time has come; its members are told who they are."""
    if state.form_at_s is None or now_s < state.form_at_s:
        return state, ()
    chosen = _choose(state)
    run = Run(
        number=state.generation + 1,
        members={node.key: number for number, node in enumerate(chosen)},
        formed_s=now_s,
    )
    replaced = _replaced(state, run.members)
    members = {node.key: replace(node, joined=False, returning=True) for node in chosen}
    # Who is neither here nor in it is forgotten: names of pods that never return must not pile up.
    kept = {key: node for key, node in state.nodes.items() if node.peer is not None}
    claim = _claim(state, chosen, run.number)
    state = replace(
        state,
        phase=Phase.FORMED,
        run=run,
        claims=state.claims if claim is None else remember(binding(state), claim),
        formed=state.formed | {run.number},
        generation=run.number,
        nodes={**kept, **members},
        n_joined=state.n_joined - len(chosen),
        failure=None,
        form_at_s=None,
        said=None,
    )
    size, restarts = counted(len(chosen), "node"), counted(state.restarts, "restart")
    say = Say(f"generation {run.number}: {size}, {restarts} so far", is_said=True)
    formed = msg.Formed(run.number, 0, len(chosen), state.restarts, False, claim)
    return reckon(state), (
        *replaced,
        say,
        *_placed(run.number, chosen),
        *_unlabelled(chosen),
        *_tell(state, chosen, formed, now_s),
    )


def _replaced(state: State, members: Mapping[Key, int]) -> tuple[Say, ...]:
    """Which nodes take the places of which."""
    before = () if state.run is None else state.run.members
    lost = [state.nodes[key].name if key in state.nodes else f"node {key}" for key in before if key not in members]
    new = [state.nodes[key].name for key in members if key not in before]
    if not (state.settings.spares and lost and new):
        return ()
    return (Say(f"{listed(new, _MOST_NAMED)} replaces {listed(lost, _MOST_NAMED)}"),)


def _placed(number: int, chosen: list[Node]) -> tuple[Say, ...]:
    labels = [f"{node.name} at {node.label}" for node in chosen if node.label]
    text = f"generation {number}: ranks by topology: {listed(labels, _MOST_NAMED)}"
    return (Say(text, warns=number > 1),) if labels else ()


def _unlabelled(chosen: list[Node]) -> tuple[Say, ...]:
    """Who has the last ranks because it did not say where it is."""
    names = [node.name for node in chosen if not node.label]
    if not names or len(names) == len(chosen):
        return ()
    who = (
        f"{listed(names, _MOST_NAMED)} {'has' if len(names) == 1 else 'have'} no topology label, and the last ranks"
    )
    return (Say(f"{who}; set --topology-label there, too"),)


def _claim(state: State, chosen: list[Node], number: int) -> Claim | None:
    if state.settings.candidate is None:
        return None
    ranks = in_ranges(node.node_rank or 0 for node in chosen)
    return Claim(number, state.settings.candidate, ranks, sure=False) if len(ranks) <= MAX_TEXT else None


def _tell(state: State, chosen: list[Node], formed: msg.Formed, now_s: float) -> list[Reply]:
    notes: dict[int, dict[str, object]] = {}
    for judge in state.judges:
        joined = [
            Joined(number, not node.returning, node.notes.get(judge.topic), node.joined_s)
            for number, node in enumerate(chosen)
        ]
        for number, body in judge.form(joined, now_s).items():
            notes.setdefault(number, {})[judge.topic] = body
    told: list[Reply] = []
    for i, (node, (first, world, first_role, role_world)) in enumerate(zip(chosen, _ranks(chosen), strict=True)):
        own = replace(formed, group_rank=i, is_store_host=i == 0, first_rank=first, world_size=world)
        own = replace(own, first_role_rank=first_role, role_world_size=role_world, notes=notes.get(i, {}))
        if node.peer is not None:
            told.append(Send(node.peer, own))
    return told


def _ranks(chosen: list[Node]) -> Iterator[tuple[int, int, int, int]]:
    """Each node's first rank and the world size, then both within its role: numbered by node, as torchrun does."""
    if any(node.workers == 0 for node in chosen):
        yield from [(0, 0, 0, 0)] * len(chosen)
        return
    of_role, before_of_role = Counter[str](), Counter[str]()
    for node in chosen:
        of_role[node.role] += node.workers
    before, all_workers = 0, of_role.total()
    for node in chosen:
        yield before, all_workers, before_of_role[node.role], of_role[node.role]
        before += node.workers
        before_of_role[node.role] += node.workers


def _choose(state: State) -> list[Node]:
    """Who was in the last generation stays in; ranks follow the nodes' order, never the order of arrival."""
    run = state.run
    joined = [node for node in state.nodes.values() if node.joined]
    last = (
        {node.key for node in joined if node.returning} if run is None else run.members
    )  # a new coordinator is told
    fit = [node for node in joined if not node.is_faulty]
    joined = fit if len(fit) >= state.settings.min_nodes else joined  # a faulty one trains only where it is needed
    joined.sort(key=lambda node: (node.is_faulty, node.key not in last, node.order))
    return sorted(joined[: state.settings.max_nodes], key=lambda node: node.place)


def _form_at_s(state: State) -> float | None:
    """At once when nobody can be missed; else after a moment for others, if fewer than max are allowed."""
    settings, begun_s = state.settings, state.gather_from_s
    if state.n_joined < settings.min_nodes or begun_s is None or not may_form(state):
        return None
    if state.run is not None and all(key in state.nodes and state.nodes[key].joined for key in state.run.members):
        return state.joined_s
    if state.n_joined >= settings.max_nodes:
        ready_s = state.joined_s
        if state.run is None and settings.spares and state.generation:  # more members are about to come back
            ready_s += timeouts.GATHER_S
        elif state.run is None and _has_spare(state):  # the job's own nodes are about to come
            ready_s = max(ready_s, begun_s + timeouts.WINDOW_S)
    elif settings.shrink_after_s is None:
        return None
    else:
        ready_s = max(state.joined_s + timeouts.GATHER_S, begun_s + settings.shrink_after_s)
        if settings.candidate == 0 and state.run is None:  # more pods are about to start, or to come back
            ready_s = max(ready_s, begun_s + timeouts.WINDOW_S)
    return max(ready_s, begun_s + timeouts.SETTLE_S) if _is_one_late(state) else ready_s


def _has_spare(state: State) -> bool:
    """Whether a spare would be in the first generation, in place of a node of the job's own."""
    most = state.settings.max_nodes
    return state.settings.spares > 0 and any((node.node_rank or 0) >= most for node in _choose(state))


def _is_one_late(state: State) -> bool:
    """Whether a live member of the last generation still stops its workers; no spare takes its place meanwhile."""
    last = state.run.members if state.run else None
    return any(
        node.returning and not node.joined and node.peer is not None and (last is None or key in last)
        for key, node in state.nodes.items()
    )


def _admit_at_s(state: State) -> float | None:
    """A moment after the latest newcomer, while there is room and nobody has finished; at once if no more fit."""
    if not runs(state) or state.run is None or state.run.done:
        return None
    if room(state) <= 0 or state.n_joined == 0:
        return None
    prepared = len(newcomers(state))
    if not prepared:
        return None
    return state.joined_s + (timeouts.GATHER_S if prepared < room(state) else 0.0)


# -- ending one, and the job ----------------------------------------------------------------------


def die(
    state: State,
    reason: str,
    now_s: float,
    but: Key | None = None,
    since_s: float | None = None,
    grows: bool = False,
) -> Step:
    """The generation is over, unnoticed since `since_s`; its other members are told, once."""
    run = state.run
    if run is None or not runs(state):
        return state, ()
    if _lasted_s(state, now_s) >= timeouts.CRASH_LOOP_S:
        state = replace(state, crashes=0)  # whatever has ended it
    unnoticed_s = 0.0 if since_s is None else round(max(0.0, now_s - since_s), 3)
    restart = msg.Restart(run.number, reason, unnoticed_s, grows)
    others = peers_of(state, tuple(key for key in run.members if key != but))
    state = replace(begin_judging(state, (), now_s), phase=Phase.GATHERING, gather_from_s=now_s, admit_at_s=None)
    told: tuple[Reply, ...] = (
        Say(f"generation {run.number} is over: {reason}", is_said=True),
        *(Send(peer, restart) for peer in others),
    )
    return settle(state, told, now_s)


def fail(state: State, node: Node, failed: msg.Failed, now_s: float) -> Step:
    """Only this costs the budget, once for each generation, unless a peer turns out to have been lost before."""
    first = msg.GiveUp("", node.name, failed.rank, failed.exit_code, failed.signal, failed.message)
    reason = _reason(node, failed)
    record = Death(
        attempt=failed.generation,
        rank=failed.rank,
        code=failed.exit_code,
        signal=failed.signal,
        error=failed.error,
        message=failed.message,
    )
    if failed.cause is not None:
        proven = replace(first, cause=failed.cause, message=None)
        return give_up(replace(state, failure=proven), failed.message)
    suspicion = suspicion_of(state, failed, reason, node.key, now_s)
    first = replace(first, seen=_seen(state, first, suspicion))
    is_early = _lasted_s(state, now_s) < timeouts.START_S
    why_not = why_not_again(record, state.early_failure, is_early=is_early)
    state = replace(state, failure=first, early_failure=record if is_early else None)
    if why_not is not None:
        return give_up(state, f"{reason}; not restarted, because {why_not}")
    return suspect(state, suspicion, now_s)


def correct(state: State, node: Node, failed: msg.Failed, now_s: float) -> Step:
    """Charge a failure that came first, where all that is known so far is whose connection was lost."""
    found, run = state.suspicion, state.run
    if found is None or found.waited is None or run is None or failed.lost_peer:
        return state, ()
    if failed.generation != run.number or node.key not in run.members or node.key == found.key:
        return state, ()
    state, told = fail(replace(state, early_failure=found.before), node, failed, now_s)
    return state, (Say(f"{_reason(node, failed)}; rank {found.waited} had only lost its connection"), *told)


def _reason(node: Node, failed: msg.Failed) -> str:
    return f"{_what(failed)} on {node.name}{_how(failed)}"


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
    failure = state.failure
    message = "" if failure is None or failure.rank is None else " ".join((failure.message or "").split())
    reason = f"{suspicion.reason}: {message[:_MESSAGE_CHARS]}" if message else suspicion.reason
    state, told = die(replace(state, suspicion=suspicion), reason, now_s, suspicion.key)
    if state.run is not None and [*state.run.members] == [suspicion.key]:  # who could have been lost?
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
    reason, now_s = suspicion.reason, suspicion.at_s
    unevenly, failure = _uneven_data(state), state.failure
    state = replace(state, suspicion=None)
    if unevenly is not None and failure is not None:
        return give_up(replace(state, failure=replace(failure, cause=_UNEVEN)), unevenly)
    if failure is not None:
        state = replace(state, failure=replace(failure, seen=_seen(state, failure, suspicion)))
    spent = why_spent(state.restarts, settings.max_restarts)
    if spent is not None:
        return give_up(state, f"{reason}, and {spent}")
    return stumble(replace(state, restarts=state.restarts + 1), reason, now_s)


def stumble(state: State, reason: str, now_s: float) -> Step:
    """Count a generation that did not get far, but not for ever: further than any before it, it did get far."""
    settings, notes = state.settings, [node.notes for node in state.nodes.values()]
    progress = max((judge.progress(_bodies(judge, notes)) for judge in state.judges), default=0)
    early = state.run is not None and _lasted_s(state, now_s) < timeouts.CRASH_LOOP_S
    crashes = state.crashes + 1 if early and progress <= state.progress else 0
    state = replace(state, crashes=crashes, progress=max(progress, state.progress))
    if state.crashes >= settings.crash_loop:
        within = f"{state.crashes} times in a row within {timeouts.CRASH_LOOP_S:g} s of the start"
        return give_up(state, f"{reason}, and generations have failed {within}, with no new step")
    return state, ()


def note_loss(state: State, node: Node, now_s: float) -> Step:
    """Charge a pod that dies at one stage again and again: with memory.oom.group, memory ends the launcher, too."""
    run = state.run
    if run is None or node.key not in run.members or not node.returning or state.end is not None:
        return state, ()
    losses = tuple(loss for loss in state.losses if loss.key == node.key)
    if losses and losses[-1].generation == run.number:
        return state, ()
    losses = (*losses, Loss(node.key, run.number, _lasted_s(state, now_s)))
    state = replace(state, losses=losses)
    if not _is_one_stage(losses):
        return state, ()
    lasted_s = losses[-1].lasted_s
    stage = f"{lasted_s:.0f} s after the workers started" if lasted_s else "before its workers started"
    reason = f"the pod of {node.name} died {len(losses)} times in a row, now {stage}; see whether it was OOMKilled"
    spent = why_spent(state.restarts, state.settings.max_restarts)
    if spent is not None:
        return give_up(state, f"{reason}; {spent}")
    return replace(state, restarts=state.restarts + 1), (Say(f"{reason}; this costs a restart"),)


def _is_one_stage(losses: tuple[Loss, ...]) -> bool:
    """Whether the latest losses came at one stage: at the start, or after nearly the same time."""
    latest = [loss.lasted_s for loss in losses[-timeouts.LOSSES :]]
    is_early = max(latest) < timeouts.START_S
    return len(latest) == timeouts.LOSSES and (is_early or max(latest) <= timeouts.SAME_STAGE * min(latest))


def _seen(state: State, failure: msg.GiveUp, suspicion: Suspicion) -> str:
    """Who is killed cannot say why; what it and the others were in says more."""
    return "" if failure.signal is None else _noted(state, suspicion)


def _noted(state: State, suspicion: Suspicion) -> str:
    """What judges read in the notes of the nodes whose workers have ended."""
    texts = (judge.explain_end(_bodies(judge, suspicion.notes)) for judge in state.judges)
    return "; ".join(filter(None, texts))


def _bodies(judge: Judge, notes: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [of_node[judge.topic] for of_node in notes if judge.topic in of_node]


def give_up(state: State, reason: str) -> Step:
    """The job has failed, for the failure that is known or else for this reason."""
    return end(state, replace(state.failure or msg.GiveUp(""), reason=reason))


def end(state: State, word: msg.GiveUp | msg.Finished) -> Step:
    """The job is over; whoever calls later hears the same."""
    failed = isinstance(word, msg.GiveUp)
    text = f"the job has failed: {word.reason}" if isinstance(word, msg.GiveUp) else "all nodes are done"
    # A failure that was only suspected is none any more.
    over = replace(
        begin_judging(state, (), 0.0),
        phase=Phase.OVER,
        end=word,
        suspicion=None,
        form_at_s=None,
        admit_at_s=None,
        say_at_s=None,
    )
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
        state = replace(state, say_at_s=now_s + max(timeouts.SAY_S, len(state.peers) / timeouts.TOLD_PER_S))
    return state, (*replies, *formed)


def peers_of(state: State, keys: Iterable[Key]) -> list[int]:
    """The connections of these nodes."""
    peers = (state.nodes[key].peer for key in keys if key in state.nodes)
    return [peer for peer in peers if peer is not None]


# -- ranks that finished while others waited for them ---------------------------------------------


def suspicion_of(state: State, failed: msg.Failed, reason: str, key: Key, now_s: float) -> Suspicion:
    """What a failure makes the coordinator suspect, with what its node saw of its other workers."""
    return Suspicion(
        key=key,
        reason=reason,
        at_s=now_s,
        waited=failed.rank if failed.lost_peer else None,
        finished=frozenset(failed.finished),
        notes=(carried(state, failed.notes),),
        before=state.early_failure,
    )


def note_ends(state: State, key: Key, join: msg.Join, notes: Mapping[str, Any]) -> State:
    """Take in what a member of the last generation says of its workers when it joins again."""
    before, run = state.suspicion, state.run
    if before is None or run is None or key == before.key or key not in run.members:
        return state
    waited = None if join.failed else before.waited
    finished = before.finished | frozenset(join.finished)
    found = replace(before, waited=waited, finished=finished, reported=before.reported | {key})
    found = replace(found, notes=(*before.notes, notes))
    return replace(state, suspicion=found)


def _uneven_data(state: State) -> str | None:
    """The sentence that says that ranks finished while others still waited for them; None: it is not proved.

    A rank whose connection to a peer was closed says that a peer is gone, not which one or why. It is the program's
    fault only if every node has told how its workers ended, some had finished with exit code 0, and none had failed
    for a reason of its own.
    """
    found, run = state.suspicion, state.run
    if found is None or run is None or found.waited is None or not found.finished:
        return None
    if not {*run.members} <= {found.key, *found.reported}:
        return None
    who, it = _ranks_in_words(sorted(found.finished)), "it" if len(found.finished) == 1 else "them"
    text = f"{who} finished with exit code 0 while rank {found.waited} still waited for {it}"
    noted = _noted(state, found)
    return f"{text}{f'; {noted}' if noted else ''}: uneven data, a restart will not help"


def _ranks_in_words(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {listed(list(map(str, ranks)), _MOST_NAMED)}"


# -- notes, and their judges ------------------------------------------------------------------------


def carried(state: State, notes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The notes in a Join or a Failed, as far as judges want them."""
    wanted = [judge for judge in state.judges if judge.topic in notes]
    bodies = {judge.topic: opened(judge.carried, notes[judge.topic], judge.topic) for judge in wanted}
    return {topic: body for topic, body in bodies.items() if body is not None}


def hear_note(state: State, node: Node, note: msg.Note, now_s: float) -> Step:
    """A member's note goes to the judge of its topic."""
    judge = next((judge for judge in state.judges if judge.topic == note.topic), None)
    if judge is None:
        ignore(note.topic, "this coordinator has no use for it")
        return state, ()
    body, run = opened(judge.hears, note.body, note.topic), state.run
    if body is None or run is None:
        return state, ()
    number = run.members[node.key]
    return _judged(state, judge, judge.hear(number, body, partial(members_of, state), now_s))


def begin_judging(state: State, members: Sequence[MemberView], now_s: float) -> State:
    """These members' workers are started; or, without members, the generation is over."""
    return replace(state, judges=tuple(judge.begin(members, now_s) for judge in state.judges))


def tick_judges(state: State, now_s: float) -> Step:
    """Time has passed, for some of them perhaps enough."""
    replies: tuple[Reply, ...] = ()
    for judge in state.judges:
        if judge.due_s is not None and now_s >= judge.due_s:
            state, more = _judged(state, judge, judge.tick(partial(members_of, state), now_s))
            replies += more
    return state, replies


def _judged(state: State, before: Judge, judgement: Judgement) -> Step:
    """The state with the judge as it is now, and its notes on their way."""
    after, told = judgement
    state = replace(state, judges=tuple(after if judge is before else judge for judge in state.judges))
    replies: list[Reply] = []
    for tell in told:
        if isinstance(tell, str):
            replies.append(Say(tell))
        elif state.run is not None:
            note, keys = msg.Note(state.run.number, after.topic, tell.body), [*state.run.members]
            replies += (Send(peer, note) for peer in peers_of(state, [keys[number] for number in tell.numbers]))
    return state, tuple(replies)
