"""Stragglers: who reaches collectives late, again and again, and how coordinator and nodes find out.

what happens                              | what follows
------------------------------------------|--------------------------------------------------------------------
a generation runs for one interval        | all members are asked for their clocks, several times
a member has told its clock often enough  | it is asked for its ranks' last entries
the last of them tells these, or time is  | a sample, which `lateness.py` judges; the next one is due an interval
over                                      | after the last one began
a sample speaks against a rank, and the   | it is a straggler: people are told once, its node each time that
two before it did so, too                 | its stragglers change
a sample does not speak against it        | it is none any longer; nobody is told but its node and who asks

A sample in which nothing can be told of a rank changes nothing for it. A clock's offset is that of the shortest
round trip; half of the trip is its error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, TypeAlias

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from trainer_launch.diagnosis.collectives import MAX_ENTRIES, Entries, Ns
from trainer_launch.diagnosis.lateness import Lateness, Timeline, judge
from trainer_launch.diagnosis.worker_samples import Recorders
from trainer_launch.host import runtime_directory
from trainer_launch.membership.notes import Judge, Judgement, Members, MemberView, Tell, opened
from trainer_launch.membership.protocol import Note
from trainer_launch.model.codec import MAX_RANKS, Count, Tagged, encode

STRAGGLERS = "stragglers"  # the topic
MAX_SUSPECTS = 16  # that are told at once
EVERY_S = 60.0  # between two samples
SHOW_ENTRIES_S = 6.0  # for all members to tell when their ranks entered collectives
SAMPLES = 3  # in a row that speak against a straggler
ROUNDS = 5  # questions about a clock
MOST_ENTRIES = 1 << 18  # of all ranks in one sample: judging them must not keep nodes waiting
_ANSWER_S = 0.5  # for the workers of a node to answer
_MESSAGE_BYTES, _ENTRY_BYTES = 56_000, 12  # leave room in a line; of one entry, at most as a rule
_Latenesses: TypeAlias = Annotated[tuple[Lateness, ...], Meta(max_length=MAX_SUSPECTS)]
_log = logging.getLogger(__name__)


class ClockQuestion(Tagged, frozen=True):
    """A question for the time of this node's clock, which is answered at once."""

    number: Count


class ClockAnswer(Tagged, frozen=True):
    """The time of this node's clock."""

    number: Count
    at_ns: Ns


class ShowEntries(Tagged, frozen=True):
    """Tell when your ranks have entered their last collectives."""

    most: Count  # of each rank


class Entered(Tagged, frozen=True):
    """When this node's ranks entered their last collectives."""

    ranks: Annotated[tuple[Entries, ...], Meta(max_length=MAX_RANKS)]


class Stragglers(Tagged, frozen=True):
    """The ranks of this node that are stragglers now; earlier ones that are missing have recovered."""

    ranks: _Latenesses


ToNode: TypeAlias = ClockQuestion | ShowEntries | Stragglers


class StragglerStatus(Struct, frozen=True):
    """The stragglers now."""

    stragglers: _Latenesses = ()


class _Answer(Struct, frozen=True, kw_only=True):
    """How far one member is in the present sample."""

    question: int  # the number of the one about its clock
    sent_s: float
    offset_ns: int = 0  # its clock against ours, which is monotonic, by the shortest round trip
    error_ns: int | None = None  # half of that; None: it has told no time
    entered: Entered | None = None

    def measured(self, at_ns: int, now_s: float) -> _Answer:
        """With the clock as one more round trip shows it."""
        error_ns = int((now_s - self.sent_s) / 2 * 1e9)
        after = replace(self, question=self.question + 1, sent_s=now_s)
        if self.error_ns is not None and self.error_ns <= error_ns:
            return after
        return replace(after, offset_ns=at_ns - int((self.sent_s + now_s) / 2 * 1e9), error_ns=error_ns)


class _StragglerSample(Struct, frozen=True, kw_only=True):
    """The present one."""

    begun_s: float
    question: ShowEntries
    answers: dict[int, _Answer]  # by member


class StragglerJudge(Judge, frozen=True, kw_only=True):
    """The coordinator's side: the samples of one generation. Pure."""

    topic: ClassVar[str] = STRAGGLERS
    hears = ClockAnswer | Entered
    every_s: float  # between two samples
    sample: _StragglerSample | None = None
    strikes: Mapping[int, int] = field(default_factory=dict)  # samples in a row that speak against a rank
    named: tuple[Lateness, ...] = ()

    def begin(self, members: Sequence[MemberView], now_s: float) -> Judge:
        """The first sample is due after an interval. Who is alone waits for nobody."""
        workers = [len(member.ranks) for member in members]
        is_asked = all(workers) and sum(workers) > 1  # workers of torch's own agents are not
        return StragglerJudge(every_s=self.every_s, due_s=now_s + self.every_s if is_asked else None)

    def tick(self, members: Members, now_s: float) -> Judgement:
        """Begin a sample, or end the one whose time is over."""
        everybody = members()
        if self.sample is not None:
            return self._judged(self.sample, everybody, now_s)
        asked = [member.number for member in everybody if member.answers]
        first = ROUNDS if len(everybody) == 1 else 1  # its ranks share a clock
        n_ranks = [len(member.ranks) for member in everybody]
        fits = _MESSAGE_BYTES // (_ENTRY_BYTES * max(1, *n_ranks))
        question = ShowEntries(max(1, min(MAX_ENTRIES, MOST_ENTRIES // max(1, sum(n_ranks)), fits)))
        answers = dict.fromkeys(asked, _Answer(question=first, sent_s=now_s))
        sample = _StragglerSample(begun_s=now_s, question=question, answers=answers)
        return replace(self, sample=sample, due_s=now_s + SHOW_ENTRIES_S), (Tell(asked, ClockQuestion(first)),)

    def hear(self, number: int, body: ClockAnswer | Entered, members: Members, now_s: float) -> Judgement:
        """A member answers a question of the present sample."""
        sample = self.sample
        answer = None if sample is None else sample.answers.get(number)
        if sample is None or answer is None or answer.entered is not None:
            return self, ()
        news: tuple[Tell, ...] = ()
        if isinstance(body, Entered):
            answer = replace(answer, entered=body)
        elif body.number == answer.question:
            question = sample.question if body.number >= ROUNDS else ClockQuestion(body.number + 1)
            answer, news = answer.measured(body.at_ns, now_s), (Tell((number,), question),)
        answers = sample.answers | {number: answer}
        after = replace(self, sample=replace(sample, answers=answers))
        is_over = all(answer.entered is not None for answer in answers.values())
        return after.tick(members, now_s) if is_over else (after, news)

    def _judged(self, sample: _StragglerSample, members: Sequence[MemberView], now_s: float) -> Judgement:
        ranks = judge(_timelines(members, sample))
        late = {rank.rank: rank for rank in ranks}
        strikes = {rank: count for rank, count in self.strikes.items() if rank not in late}
        strikes |= {rank: self.strikes.get(rank, 0) + 1 for rank in late if late[rank].is_straggler}
        latest = {rank.rank: rank for rank in self.named} | late
        named = sorted(rank for rank, count in strikes.items() if count >= SAMPLES and rank in latest)
        after = replace(
            self,
            sample=None,
            due_s=max(sample.begun_s + self.every_s, now_s),
            strikes=strikes,
            named=tuple(latest[rank] for rank in named),
        )
        return after, tuple(_news(members, self.named, after.named))

    def status(self, now_s: float) -> StragglerStatus:
        """The stragglers."""
        return StragglerStatus(self.named[:MAX_SUSPECTS])


def _timelines(members: Sequence[MemberView], sample: _StragglerSample) -> Iterator[Timeline]:
    """All ranks' entries by our clock; a rank counts once, and on the node whose it is."""
    for member in members:
        answer = sample.answers.get(member.number)
        if answer is not None and answer.entered is not None and answer.error_ns is not None:
            own = {rank.rank: rank for rank in answer.entered.ranks if rank.rank in member.ranks}
            for rank in own.values():
                yield Timeline(rank, member.number, answer.offset_ns, answer.error_ns)


def _news(
    members: Sequence[MemberView], before: Sequence[Lateness], now: Sequence[Lateness]
) -> Iterator[Tell | str]:
    """People are told of who is new; each node which of its ranks are stragglers, where that has changed."""
    earlier = {rank.rank for rank in before}
    changed = earlier ^ {rank.rank for rank in now}
    nodes = {rank.node or 0 for rank in (*before, *now) if rank.rank in changed}
    for member in members:
        if member.number in nodes:
            own = tuple(rank for rank in now if rank.node == member.number)
            yield Tell((member.number,), Stragglers(own[:MAX_SUSPECTS]))
            if not member.is_own:  # our own node says it itself
                yield from (str(rank) for rank in own if rank.rank not in earlier)


def answer(note: Note) -> Note | None:
    """The answer to a note that is given at once, in the thread that has received it: this clock's time."""
    question: ToNode | None = opened(ToNode, note.body, note.topic) if note.topic == STRAGGLERS else None
    if not isinstance(question, ClockQuestion):
        return None
    return Note(note.generation, STRAGGLERS, ClockAnswer(question.number, time.time_ns()))


class StragglerSamples:
    """A node's side: asks its workers, tells the coordinator, says who is late."""

    def __init__(
        self,
        recorders: Recorders,
        run_dir: str,
        send: Callable[[object], None],
        tell: Callable[[Sequence[Lateness]], None] = lambda ranks: None,
    ) -> None:
        """`send` sends the coordinator a note's body; `tell` lets observers know."""
        self._recorders, self._run_dir, self._send, self._tell = recorders, run_dir, send, tell
        self._named: tuple[Lateness, ...] = ()

    def hear(self, note: Note) -> None:
        """The coordinator asks, or tells what came of it."""
        match opened(ToNode, note.body, note.topic) if note.topic == STRAGGLERS else None:
            case ShowEntries(most):
                answers = self._recorders.entries(most, time.monotonic() + _ANSWER_S)
                self._send(Entered(_fitting([each.entries for each in answers.values() if each.entries])))
            case Stragglers() as stragglers:
                self._name(stragglers.ranks)

    def end(self) -> None:
        """The generation is over."""
        self._name(())

    def _name(self, ranks: Sequence[Lateness]) -> None:
        """Say who is new; who is gone has recovered, and nobody is told."""
        earlier = {rank.rank for rank in self._named}
        if not ranks and not earlier:
            return
        for rank in ranks:
            if rank.rank not in earlier:
                _log.warning("%s", rank)
                runtime_directory.tell(
                    self._run_dir,
                    "straggler",
                    rank=rank.rank,
                    steps=rank.steps,
                    late=rank.late,
                    median_s=rank.median_s,
                    p95_s=rank.p95_s,
                    step_s=rank.step_s,
                )
        self._named = tuple(ranks)
        self._tell(self._named)


def _fitting(ranks: Sequence[Entries]) -> tuple[Entries, ...]:
    """All of these; none where they do not fit into a message: without one rank its group tells nothing."""
    return tuple(ranks) if sum(len(encode(rank)) for rank in ranks) <= _MESSAGE_BYTES else ()
