"""Stragglers: the coordinator asks all members when their ranks enter collectives, and names who is late. Pure.

what happens                              | what follows
------------------------------------------|--------------------------------------------------------------------
a generation runs for one interval        | all members are asked for their clocks, several times
a member has told its clock often enough  | it is asked for its ranks' last entries
the last of them tells these, or time is  | a sample: `stragglers.py` judges it; the next one is due an interval
over                                      | after the last one began
a sample speaks against a rank, and the   | it is a straggler: people are told once, its node each time that
two before it did so, too                 | its stragglers change
a sample does not speak against it        | it is none any longer; nobody is told but its node and who asks

A sample in which nothing can be told of a rank changes nothing for it. A clock's offset is that of the shortest
round trip; half of the trip is its error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.diagnosis.collectives import MAX_ENTRIES
from trainer_launch.diagnosis.stragglers import Lateness, Timeline, judge, timeline
from trainer_launch.diagnosis.topics import (
    MAX_SUSPECTS,
    STRAGGLERS,
    ClockAnswer,
    ClockQuestion,
    Entered,
    ShowEntries,
    Stragglers,
    StragglerStatus,
)
from trainer_launch.membership.notes import Judge, Judgement, Members, MemberView, Tell
from trainer_launch.model.units import printable

EVERY_S = 60.0  # between two samples
SHOW_ENTRIES_S = 6.0  # for all members to tell when their ranks entered collectives, besides looks at suspects
SAMPLES = 3  # in a row that speak against a straggler
ROUNDS = 5  # questions about a clock
MOST_ENTRIES = 1 << 18  # of all ranks in one sample: judging them must not keep nodes waiting
_LOOK_STEPS = 2.5  # for so many the suspects' main threads are looked at
_TEXT_CHARS = 200  # of a place, of what is said of a GPU
_DRIFT = 0.001  # a clock that drifts more was set


class _Clock(Struct, frozen=True, kw_only=True):
    """A node's clock against ours, which is monotonic."""

    offset_ns: int
    error_ns: int
    at_s: float  # when it was measured
    since_ns: int  # by that clock: it was set then


class _Answer(Struct, frozen=True, kw_only=True):
    """How far one member is in the present sample."""

    question: int  # the number of the one about its clock
    sent_s: float
    clock: _Clock | None = None  # of the shortest round trip
    entered: Entered | None = None


class _Sample(Struct, frozen=True, kw_only=True):
    """The present one."""

    begun_s: float
    question: ShowEntries
    answers: dict[int, _Answer]  # by member
    n_waiting: int  # of them have not told their entries


class StragglerJudge(Judge, frozen=True, kw_only=True):
    """The samples of one generation."""

    topic: ClassVar[str] = STRAGGLERS
    hears = ClockAnswer | Entered
    every_s: float  # between two samples
    sample: _Sample | None = None
    clocks: Mapping[int, _Clock] = field(default_factory=dict)  # by member, in the sample before
    strikes: Mapping[int, int] = field(default_factory=dict)  # samples in a row that speak against a rank
    step_s: float = 0.0  # in the sample before
    named: tuple[Lateness, ...] = ()
    latest: tuple[Lateness, ...] = ()
    latest_s: float | None = None

    def begin(self, members: Sequence[MemberView], now_s: float) -> Judge:
        """The first sample is due after an interval. Who is alone waits for nobody."""
        workers = [len(member.ranks) for member in members]
        is_asked = all(workers) and sum(workers) > 1  # workers of torch's own agents are not
        return StragglerJudge(every_s=self.every_s, due_s=now_s + self.every_s if is_asked else None)

    def tick(self, members: Members, now_s: float) -> Judgement:
        """Begin a sample, or end the one whose time is over."""
        if self.sample is not None:
            return self._judged(self.sample, members(), now_s)
        everybody = members()
        asked = [member.number for member in everybody if member.answers]
        first = ROUNDS if len(everybody) == 1 else 1  # its ranks share a clock
        question = self._question(sum(len(member.ranks) for member in everybody))
        sample = _Sample(
            begun_s=now_s,
            question=question,
            answers=dict.fromkeys(asked, _Answer(question=first, sent_s=now_s)),
            n_waiting=len(asked),
        )
        until_s = now_s + SHOW_ENTRIES_S + question.looks_us / 1e6
        return replace(self, sample=sample, due_s=until_s), (Tell(asked, ClockQuestion(first)),)

    def _question(self, n_workers: int) -> ShowEntries:
        most = max(1, min(MAX_ENTRIES, MOST_ENTRIES // max(1, n_workers)))
        suspects = sorted(self.strikes, key=lambda rank: -self.strikes[rank])[:MAX_SUSPECTS]
        looks_s = min(_LOOK_STEPS * self.step_s, self.every_s / 2) if suspects else 0.0
        return ShowEntries(most, tuple(suspects), int(looks_s * 1e6))

    def hear(self, number: int, body: ClockAnswer | Entered, members: Members, now_s: float) -> Judgement:
        """A member answers a question of the present sample."""
        sample = self.sample
        answer = None if sample is None else sample.answers.get(number)
        if sample is None or answer is None or answer.entered is not None:
            return self, ()
        if isinstance(body, ClockAnswer):
            if body.number != answer.question:
                return self, ()
            question = sample.question if body.number >= ROUNDS else ClockQuestion(body.number + 1)
            answer = _measured(answer, body.at_ns, now_s)
            return self._with(sample, number, answer), (Tell((number,), question),)
        sample = replace(sample, n_waiting=sample.n_waiting - 1)
        after = self._with(sample, number, replace(answer, entered=body))
        return (after, ()) if sample.n_waiting else after.tick(members, now_s)

    def _with(self, sample: _Sample, number: int, answer: _Answer) -> StragglerJudge:
        return replace(self, sample=replace(sample, answers=sample.answers | {number: answer}))

    # -- what a sample tells ----------------------------------------------------------------------

    def _judged(self, sample: _Sample, members: Sequence[MemberView], now_s: float) -> Judgement:
        measured = {number: answer.clock for number, answer in sample.answers.items() if answer.clock is not None}
        clocks = {number: _compared(self.clocks.get(number), clock) for number, clock in measured.items()}
        late = {one.rank: one for one in judge(_timelines(members, sample, clocks))}
        strikes = {rank: count for rank, count in self.strikes.items() if rank not in late}
        strikes |= {rank: self.strikes.get(rank, 0) + 1 for rank, one in late.items() if one.is_straggler}
        devices = dict(
            pair for answer in sample.answers.values() if answer.entered for pair in answer.entered.devices
        )
        late = {rank: replace(one, place=_short(one.place)) for rank, one in late.items()}
        known = {one.rank: one for one in self.named} | late
        named = sorted(rank for rank, count in strikes.items() if count >= SAMPLES and rank in known)
        after = replace(
            self,
            sample=None,
            due_s=max(sample.begun_s + self.every_s, now_s),
            clocks={**self.clocks, **clocks},
            strikes=strikes,
            step_s=next((one.step_s for one in late.values()), self.step_s),
            named=tuple(replace(known[rank], device=_short(devices.get(rank, ""))) for rank in named),
            latest=tuple(late.values())[:MAX_SUSPECTS],
            latest_s=now_s if late else self.latest_s,
        )
        return after, tuple(_news(members, self.named, after.named))

    def status(self, now_s: float) -> StragglerStatus:
        """Who is late."""
        age_s = None if self.latest_s is None else round(now_s - self.latest_s, 1)
        return StragglerStatus(self.named[:MAX_SUSPECTS], self.latest, age_s)


def _short(text: str) -> str:
    """As a part of one line, so that what is told of all stragglers fits into a message."""
    return printable(text, " ")[:_TEXT_CHARS]


def _measured(answer: _Answer, at_ns: int, now_s: float) -> _Answer:
    """With one more round trip."""
    clock = _Clock(
        offset_ns=at_ns - int((answer.sent_s + now_s) / 2 * 1e9),
        error_ns=int((now_s - answer.sent_s) / 2 * 1e9),
        at_s=now_s,
        since_ns=at_ns,
    )
    best = min(answer.clock or clock, clock, key=lambda clock: clock.error_ns)
    return _Answer(question=answer.question + 1, sent_s=now_s, clock=best)


def _compared(before: _Clock | None, now: _Clock) -> _Clock:
    """What the clock showed before still counts, unless it was set meanwhile."""
    if before is None:
        return replace(now, since_ns=0)
    most_ns = before.error_ns + now.error_ns + (now.at_s - before.at_s) * _DRIFT * 1e9
    is_steady = abs(now.offset_ns - before.offset_ns) <= most_ns
    return replace(now, since_ns=before.since_ns) if is_steady else now


def _timelines(members: Sequence[MemberView], sample: _Sample, clocks: Mapping[int, _Clock]) -> Iterator[Timeline]:
    """All ranks' entries by our clock; a rank counts once, and on the node whose it is."""
    for member in members:
        number, answer = member.number, sample.answers.get(member.number)
        if answer is None or answer.entered is None or number not in clocks:
            continue
        clock = clocks[number]
        for one in {one.rank: one for one in answer.entered.ranks if one.rank in member.ranks}.values():
            yield timeline(one, number, clock.offset_ns, clock.error_ns, clock.since_ns)


def _news(
    members: Sequence[MemberView], before: Sequence[Lateness], now: Sequence[Lateness]
) -> Iterator[Tell | str]:
    """People are told of who is new; each node which of its ranks are stragglers, where that has changed."""
    known, named = {one.rank for one in before}, {one.rank for one in now}
    changed = {one.node or 0 for one in (*before, *now) if one.rank in known ^ named}
    for member in members:
        if member.number in changed:
            own = tuple(one for one in now if one.node == member.number)
            yield Tell((member.number,), Stragglers(own[:MAX_SUSPECTS]))
            if not member.is_own:  # our own node says it itself
                yield from (str(one) for one in own if one.rank not in known)
