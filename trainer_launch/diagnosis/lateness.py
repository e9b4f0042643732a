"""Ranks that reach collectives late, again and again, by when each rank entered its last collectives. Pure.

Lateness is counted once a step, and against the middle of a collective's members: a step has several collectives,
and a slow node has several slow ranks. Whoever waited for others just before is late because of them.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, NamedTuple, TypeAlias, TypeVar

from msgspec import Meta, Struct

from trainer_launch.diagnosis.collectives import Entries
from trainer_launch.model.codec import Amount, Count, Rank
from trainer_launch.model.units import ranges_in

LATE = 0.1  # of a step; what is less is no matter
_LATE_NS = 1_000_000  # nor is what is shorter: a scheduler's turn
LEAST_STEPS = 4  # in which a rank took part; fewer tell nothing
_OFTEN = 1 / 8  # of a group's collectives; what it is late for less often, such as a checkpoint, is not its pace
_WAITED = 0.5  # of its lateness, in the step before: then it is not the cause
_ROUNDED_NS = 2_000  # a difference of two times that are told in µs
_Key: TypeAlias = "tuple[str, str]"  # a group's name and its members
_N = TypeVar("_N", int, float)


class Entry(NamedTuple):
    """The moment a rank enters a collective; without a group, a point-to-point operation, whose end is unknown."""

    group: _Key | None
    number: int
    at_ns: int


class Lateness(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How late one rank was in one sample."""

    rank: Rank
    node: Count | None = None
    steps: Count = 0  # in which it entered collectives that are known of all members
    late: Count = 0  # of these, in which it was late, and not because it waited for others
    last: Annotated[float, Meta(ge=0, le=1)] = 0.0  # share of the collectives that it entered last
    median_s: Amount = 0.0  # how late it was, in the middle of the steps
    p95_s: Amount = 0.0
    step_s: Amount = 0.0

    @property
    def is_straggler(self) -> bool:
        """Whether this sample speaks against it: it was late in more than half of the steps, and not by chance."""
        return self.steps >= LEAST_STEPS and self.late - self.steps / 2 > 1

    def __str__(self) -> str:
        rank = f"rank {self.rank}" if self.node is None else f"rank {self.rank} (node {self.node})"
        text = f"{rank} is a straggler: late in {self.late} of {self.steps} steps, by {_time(self.median_s)}"
        return text + f" (p95 {_time(self.p95_s)}) of a step of {_time(self.step_s)}"


class Timeline:
    """The entries of a rank by the job's clock, and its lateness in each step of a sample."""

    def __init__(self, told: Entries, node: int | None, offset_ns: int = 0, error_ns: int = 0) -> None:
        """`offset_ns` is that of its node's clock, which may be off by `error_ns` against other nodes'."""
        self.told, self.rank, self.node, self.error_ns = told, told.rank, node, error_ns
        self.entries = [
            Entry(None if group is None else (group.name, group.ranks), number, at_ns - offset_ns)
            for group, number, at_ns in told.each()
            if group is None or not group.ranks.isdecimal()  # alone it waits for nobody
        ]
        self.waits: list[tuple[int, int]] = []  # until when it waited for others, and how long
        self.steps: dict[int, tuple[int, bool]] = {}  # by number: how late, and whether that is its own doing
        self._in, self._late, self._last = Counter[_Key](), Counter[_Key](), 0  # collectives, by group

    def note(self, group: _Key, step: int, entry_ns: int, late_ns: int, step_ns: int, worst_ns: int) -> None:
        """Take in when, and how late, the rank entered a collective; the last rank was late by `worst_ns`."""
        self._in[group] += 1
        is_late = late_ns > max(LATE * step_ns, _LATE_NS) and late_ns >= worst_ns / 2
        is_own = is_late and self._waited_ns(entry_ns, step_ns) < _WAITED * late_ns
        if is_own:
            self._late[group] += 1
        before_ns, was_own = self.steps.get(step, (0, False))
        self.steps[step] = max(before_ns, late_ns), was_own or is_own

    def note_last(self) -> None:
        """The rank was the last one to enter a collective."""
        self._last += 1

    def _waited_ns(self, at_ns: int, step_ns: int) -> int:
        """How long it may have waited for others in the step before."""
        first = bisect_right(self.waits, (at_ns - step_ns, 0))
        return sum(wait_ns for _, wait_ns in self.waits[first : bisect_right(self.waits, (at_ns, 1 << 63))])

    def lateness(self, step_ns: int) -> Lateness:
        """The rank's lateness; one whose waits are not known is not late by itself."""
        n_own = sum(is_own for _, is_own in self.steps.values())
        is_often = any(late >= _OFTEN * self._in[group] for group, late in self._late.items())
        times = sorted(late_ns / 1e9 for late_ns, _ in self.steps.values())
        return Lateness(
            rank=self.rank,
            node=self.node,
            steps=len(times),
            late=n_own if is_often and not self.told.hides_messages else 0,
            last=round(self._last / max(1, self._in.total()), 3),
            median_s=round(_middle(times), 6),
            p95_s=round(times[-1 - len(times) // 20], 6),
            step_s=round(step_ns / 1e9, 6),
        )


def judge(timelines: Iterable[Timeline]) -> tuple[Lateness, ...]:
    """How late each rank was, the latest first; nobody where nothing can be told."""
    lines = {line.rank: line for line in timelines if line.entries}
    steps = [1000 * line.told.step_us for line in lines.values() if line.told.step_us and line.told.repeats]
    if len(lines) < 2 or not steps:
        return ()
    step_ns = _middle(steps)
    start_ns = max((line.entries[0].at_ns for line in lines.values() if line.told.is_cut), default=0)
    entered = _entered(lines.values())
    begins = _begins(lines.values())
    ends = {key: max(times.values()) for key, times in entered.items()}
    for line in lines.values():
        others = (other.error_ns for other in lines.values() if other.node != line.node)
        line.waits = list(_waits(line.entries, ends, line.error_ns + max(others, default=0)))
    for (group, number), times in entered.items():
        end_ns = ends[group, number]
        if end_ns >= start_ns:
            _note(group, bisect_right(begins, end_ns), times, lines, step_ns)
    latenesses = [line.lateness(step_ns) for line in lines.values() if line.steps]
    return tuple(sorted(latenesses, key=lambda rank: (-rank.late, -rank.median_s, rank.rank)))


def _begins(lines: Iterable[Timeline]) -> list[int]:
    """When steps begin: each time that the rank which tells most has made one repetition more."""
    repeating = [line for line in lines if line.told.repeats]
    longest = max(repeating, key=lambda line: len(line.entries) // line.told.repeats)
    return [entry.at_ns for entry in longest.entries[:: longest.told.repeats]]


def _entered(lines: Iterable[Timeline]) -> dict[tuple[_Key, int], dict[int, int]]:
    """When each member entered each collective that all of them tell."""
    entered: dict[tuple[_Key, int], dict[int, int]] = defaultdict(dict)
    for line in lines:
        for group, number, at_ns in line.entries:
            if group is not None:
                entered[group, number][line.rank] = at_ns
    sizes = {group: sum(map(len, ranges_in(group[1]))) for group in {group for group, _ in entered}}
    return {key: times for key, times in entered.items() if len(times) == sizes[key[0]] > 1}


def _note(group: _Key, step: int, times: Mapping[int, int], lines: Mapping[int, Timeline], step_ns: int) -> None:
    """Tell each member of a collective how late it was against the middle, as far as the nodes' clocks agree."""
    ordered = sorted((at_ns, rank) for rank, at_ns in times.items())
    middle_ns, middle = ordered[(len(ordered) - 1) // 2]
    late = {}
    for at_ns, rank in ordered:
        is_near = lines[rank].node == lines[middle].node
        error_ns = 0 if is_near else lines[rank].error_ns + lines[middle].error_ns
        late[rank] = max(0, at_ns - middle_ns - error_ns)
    worst_ns = max(late.values())
    for at_ns, rank in ordered:
        lines[rank].note(group, step, at_ns, late[rank], step_ns, worst_ns)
    lines[ordered[-1][1]].note_last()


def _waits(
    entries: Sequence[Entry], ends: Mapping[tuple[_Key, int], int], error_ns: int
) -> Iterable[tuple[int, int]]:
    """Until when a rank may have waited for others, and how long.

    Between two entries it may wait until a collective that it is in is complete; all the time if that is unknown.
    """
    ahead: list[int] = []  # when collectives that it is in are complete
    for entry, following in pairwise(entries):
        end_ns = None if entry.group is None else ends.get((entry.group, entry.number))
        if end_ns is None:
            if following.at_ns > entry.at_ns:
                yield following.at_ns, following.at_ns - entry.at_ns
            continue
        insort(ahead, end_ns)
        del ahead[: bisect_right(ahead, entry.at_ns)]
        done = bisect_right(ahead, following.at_ns + error_ns + _ROUNDED_NS)
        if done:
            until_ns = min(ahead[done - 1], following.at_ns)
            if until_ns > entry.at_ns:
                yield until_ns, until_ns - entry.at_ns


def _middle(values: Iterable[_N]) -> _N:
    """The median; of an even number the lower one. `statistics` would load decimals and fractions into PID 1."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
