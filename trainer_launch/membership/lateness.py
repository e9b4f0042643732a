"""Stragglers: the coordinator asks all members when their ranks enter collectives, and names who is late. Pure.

what happens                              | what follows
------------------------------------------|--------------------------------------------------------------------
a generation runs for one interval        | all members are asked for their clocks, several times
a member has told its clock often enough  | it is asked for its ranks' last entries
the last of them tells these, or time is  | a sample: `model/stragglers.py` judges it; the next one is due
over                                      | an interval after the last one began
a sample speaks against a rank, and the   | it is a straggler: people are told once, its node each time that
two before it did so, too                 | its stragglers change
a sample does not speak against it        | it is none any longer; nobody is told but its node and who asks

A sample in which nothing can be told of a rank changes nothing for it. A clock's offset is that of the shortest
round trip; half of the trip is its error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from trainer_launch.membership import protocol as msg
from trainer_launch.membership import timeouts
from trainer_launch.membership.generation import peers_of
from trainer_launch.membership.stall import each_member, who_can_answer
from trainer_launch.membership.state import Clock, Key, Node, Phase, Reply, Sampling, Say, Send, State
from trainer_launch.model.collectives import MAX_ENTRIES
from trainer_launch.model.stragglers import Lateness, Timeline, judge, timeline
from trainer_launch.model.units import printable

Step = tuple[State, tuple[Reply, ...]]
SAMPLES = 3  # in a row that speak against a straggler
ROUNDS = 5  # questions about a clock
MOST_ENTRIES = 1 << 18  # of all ranks in one sample: judging them must not keep nodes waiting
_LOOK_STEPS = 2.5  # for so many the suspects' main threads are looked at
_TEXT_CHARS = 200  # of a place, of what is said of a GPU
_DRIFT = 0.001  # a clock that drifts more was set


def begin(state: State, now_s: float) -> State:
    """A generation runs: the first sample is due after an interval. Who is alone waits for nobody."""
    run, every_s = state.run, state.settings.straggler_interval_s
    if run is None or not every_s:
        return replace(state, sampling=None)
    workers = [len(ranks) for _, _, ranks in each_member(state)]
    if not all(workers) or sum(workers) < 2:  # torch's own agents, whose workers are not asked
        return replace(state, sampling=None)
    clocks = {} if state.sampling is None else state.sampling.clocks
    return replace(state, sampling=Sampling(generation=run.number, due_s=now_s + every_s, clocks=clocks))


def tick(state: State, now_s: float) -> Step:
    """Begin a sample, or end one whose time is over."""
    sampling = state.sampling
    if sampling is None or state.phase is not Phase.RUNNING:
        return state, ()
    if sampling.asked_s is not None:
        return _close(state, sampling, now_s) if now_s >= sampling.until_s else (state, ())
    return _ask(state, sampling, now_s) if now_s >= sampling.due_s else (state, ())


def _ask(state: State, sampling: Sampling, now_s: float) -> Step:
    asked = who_can_answer(state)
    first = ROUNDS if state.run is not None and len(state.run.members) == 1 else 1  # its ranks share a clock
    sampling = replace(
        sampling,
        due_s=now_s + state.settings.straggler_interval_s,
        asked_s=now_s,
        until_s=now_s + timeouts.SHOW_ENTRIES_S + _looks_s(state, sampling),
        waiting=frozenset(asked),
        rounds=dict.fromkeys(asked, (first, now_s)),
        fresh={},
        told={},
    )
    questions = tuple(Send(peer, msg.ClockQuestion(first)) for peer in peers_of(state, asked))
    return replace(state, sampling=sampling), questions


def note_clock(state: State, node: Node, said: msg.ClockAnswer, now_s: float) -> Step:
    """One more round trip to a member; after the last one it is asked for its entries."""
    sampling = state.sampling
    if sampling is None or sampling.asked_s is None or node.key not in sampling.waiting or node.peer is None:
        return state, ()
    number, sent_s = sampling.rounds.get(node.key, (0, 0.0))
    if said.number != number:
        return state, ()
    measured = Clock(
        offset_ns=said.at_ns - int((sent_s + now_s) / 2 * 1e9),
        error_ns=int((now_s - sent_s) / 2 * 1e9),
        at_s=now_s,
        since_ns=said.at_ns,
    )
    best = min(sampling.fresh.get(node.key, measured), measured, key=lambda clock: clock.error_ns)
    sampling = replace(
        sampling,
        fresh={**sampling.fresh, node.key: best},
        rounds={**sampling.rounds, node.key: (number + 1, now_s)},
    )
    state = replace(state, sampling=sampling)
    if number < ROUNDS:
        return state, (Send(node.peer, msg.ClockQuestion(number + 1)),)
    return state, (Send(node.peer, _question(state, sampling)),)


def _question(state: State, sampling: Sampling) -> msg.ShowEntries:
    workers = sum(len(ranks) for _, _, ranks in each_member(state))
    most = max(1, min(MAX_ENTRIES, MOST_ENTRIES // max(1, workers)))
    suspects = sorted(sampling.strikes, key=lambda rank: -sampling.strikes[rank])[: msg.MAX_SUSPECTS]
    looks_us = int(_looks_s(state, sampling) * 1e6) if suspects else 0
    return msg.ShowEntries(sampling.generation, most, tuple(suspects), looks_us)


def _looks_s(state: State, sampling: Sampling) -> float:
    return min(_LOOK_STEPS * sampling.step_s, state.settings.straggler_interval_s / 2) if sampling.strikes else 0.0


def note_entries(state: State, node: Node, said: msg.Entered, now_s: float) -> Step:
    """A member tells when its ranks entered collectives."""
    sampling = state.sampling
    if sampling is None or sampling.asked_s is None or node.key not in sampling.waiting:
        return state, ()
    sampling = replace(sampling, told={**sampling.told, node.key: said}, waiting=sampling.waiting - {node.key})
    state = replace(state, sampling=sampling)
    return (state, ()) if sampling.waiting else _close(state, sampling, now_s)


# -- what a sample tells ----------------------------------------------------------------------


def _close(state: State, sampling: Sampling, now_s: float) -> Step:
    clocks = {key: _compared(sampling.clocks.get(key), clock) for key, clock in sampling.fresh.items()}
    found = {one.rank: one for one in judge(_timelines(state, sampling, clocks))}
    strikes = {rank: count for rank, count in sampling.strikes.items() if rank not in found}
    strikes |= {rank: sampling.strikes.get(rank, 0) + 1 for rank, one in found.items() if one.is_straggler}
    devices = dict(pair for said in sampling.told.values() for pair in said.devices)
    found = {rank: replace(one, place=_short(one.place)) for rank, one in found.items()}
    known = {one.rank: one for one in sampling.named}
    named = []
    for rank in sorted(rank for rank, count in strikes.items() if count >= SAMPLES):
        one = found.get(rank, known.get(rank))
        if one is not None:
            named.append(replace(one, device=_short(devices.get(rank, ""))))
    after = replace(
        sampling,
        asked_s=None,
        due_s=max(sampling.due_s, now_s),
        clocks={**sampling.clocks, **clocks},
        told={},
        strikes=strikes,
        step_s=next((one.step_s for one in found.values()), sampling.step_s),
        named=tuple(named),
        latest=tuple(found.values())[: msg.MAX_SUSPECTS],
        latest_s=now_s if found else sampling.latest_s,
    )
    return replace(state, sampling=after), tuple(_news(state, sampling.named, after))


def _short(text: str) -> str:
    """As a part of one line, so that what is told of all stragglers fits into a message."""
    return printable(text, " ")[:_TEXT_CHARS]


def _compared(before: Clock | None, now: Clock) -> Clock:
    """What the clock showed before still counts, unless it was set meanwhile."""
    if before is None:
        return replace(now, since_ns=0)
    most_ns = before.error_ns + now.error_ns + (now.at_s - before.at_s) * _DRIFT * 1e9
    is_steady = abs(now.offset_ns - before.offset_ns) <= most_ns
    return replace(now, since_ns=before.since_ns) if is_steady else now


def _timelines(state: State, sampling: Sampling, clocks: Mapping[Key, Clock]) -> Iterator[Timeline]:
    """All ranks' entries by our clock; a rank counts once, and on the node whose it is."""
    for number, key, ranks in each_member(state):
        clock, said = clocks.get(key), sampling.told.get(key)
        if clock is None or said is None:
            continue
        for one in {one.rank: one for one in said.ranks if one.rank in ranks}.values():
            yield timeline(one, number, clock.offset_ns, clock.error_ns, clock.since_ns)


def _news(state: State, before: tuple[Lateness, ...], after: Sampling) -> Iterator[Reply]:
    """People are told of who is new; each node which of its ranks are stragglers, where that has changed."""
    known, now = {one.rank for one in before}, {one.rank for one in after.named}
    if known == now:
        return
    run = state.run
    assert run is not None
    for number in sorted({one.node or 0 for one in (*before, *after.named) if one.rank in known ^ now}):
        own = tuple(one for one in after.named if one.node == number)
        key = run.members[number]
        told = msg.Stragglers(after.generation, own[: msg.MAX_SUSPECTS])
        yield from (Send(peer, told) for peer in peers_of(state, (key,)))
        if key != (state.settings.candidate or 0):  # our own node says it itself
            yield from (Say(str(one)) for one in own if one.rank not in known)
