"""What each rank's flight recorder knows, and which rank a job waits for. Pure.

A rank waits while it has entered a collective that has not ended. It waits for the members of the group that have
not entered it. Who is waited for and waits for nobody is where a hang begins; whether that is its fault, its own
state and stack tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from enum import Enum
from typing import Annotated, NamedTuple, TypeAlias

from trainer_launch.model.frozen import dataclass, replace
from trainer_launch.model.json_lines import Bound, Count, FreeText, Text
from trainer_launch.model.units import listed

MAX_BYTES = 1 << 20  # of one rank's answer
_NAMED = 4  # ranks, places
_MOST = 1 << 20  # no rank is higher
_SECOND_NS = 1_000_000_000
# Their tensors have the same sizes on all ranks.
_EVEN = frozenset({"all_reduce", "broadcast", "reduce", "all_reduce_coalesced", "reduce_scatter"})


_Ns: TypeAlias = Annotated[int, Bound(0, 2**63 - 1)]


class Collective(NamedTuple):
    """One collective of a process group, as one rank entered it."""

    number: Count  # in its group, from 1 on
    operation: Text
    sizes: Text  # and types
    at_ns: _Ns  # when it was entered, since the epoch

    def __str__(self) -> str:
        return self.operation if self.sizes in ("", "[]", "[[]]") else f"{self.operation} ({self.sizes})"


_Rank: TypeAlias = Annotated[int, Bound(0, 2**31 - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """How far one rank is in one process group."""

    title: Text = ""
    ranks: Text = ""  # its members, as 0-3,7
    entered: Count = 0  # the last collective that it entered
    done: Count = 0  # the last one that has ended
    last: tuple[Collective, ...] = ()

    def at(self, number: int) -> Collective | None:
        """That collective, if it is one of the last."""
        return next((one for one in self.last if one.number == number), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A worker's answer to PID 1."""

    number: Count = 0  # of the question
    why: FreeText = ""  # nothing can be told
    saved: Count = 0  # bytes of its dump
    groups: Mapping[str, Group] = field(default_factory=dict)  # by name, the same on all ranks


class Life(str, Enum):
    """Whether a worker's process is there."""

    ALIVE = "alive"
    STOPPED = "stopped"
    FINISHED = "finished"  # with exit code 0
    DEAD = "dead"


class Doing(str, Enum):
    """What a stack shows a worker to be in."""

    UNKNOWN = ""
    COLLECTIVE = "a collective"
    DATA = "the data loader"
    CHECKPOINT = "a checkpoint"
    COMPILING = "compilation"
    DEBUGGER = "a debugger"

    @property
    def takes_long(self) -> bool:
        """Whether a healthy worker may be in it for minutes."""
        return self in (Doing.CHECKPOINT, Doing.COMPILING, Doing.DEBUGGER)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """All that is known of one rank."""

    rank: _Rank
    node: Count | None = None
    life: Life = Life.ALIVE
    how: Text = ""  # it died
    place: FreeText = ""  # where its main thread is
    doing: Doing = Doing.UNKNOWN
    groups: Mapping[str, Group] = field(default_factory=dict)
    why: FreeText = ""  # its flight recorder tells nothing

    @property
    def waits(self) -> bool:
        """Whether a collective that it entered has not ended."""
        return any(group.entered > group.done for group in self.groups.values())

    def __str__(self) -> str:
        return f"rank {self.rank}" if self.node is None else f"rank {self.rank} (node {self.node})"


def brief(state: RankState, most: int) -> RankState:
    """With so many of the last collectives of each group; with none, only the groups that wait."""
    groups = {
        name: replace(group, last=group.last[-most:] if most else ())
        for name, group in state.groups.items()
        if most or group.entered > group.done
    }
    return replace(state, groups=groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a job does not go on: one sentence, and what follows from it."""

    text: str
    ranks: tuple[int, ...] = ()  # who is waited for, or who disagrees
    reason: str = ""  # the exit reason that it proves, "": none
    helps: bool | None = None  # whether a restart can help, None: unknown
    accuses: bool = True  # False: this may take as long as it does


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    """One collective that has not ended on those who are in it."""

    group: str
    title: str
    number: int
    inside: Mapping[int, Collective | None]
    missing: tuple[int, ...]  # members that have not entered it

    @property
    def name(self) -> str:
        known = next((one for one in self.inside.values() if one is not None), None)
        what = f"{known.operation} #{self.number}" if known is not None else f"collective #{self.number}"
        sizes = f", {known.sizes}" if known is not None and known.sizes not in ("", "[]", "[[]]") else ""
        return f"{what} of {self.title or f'group {self.group}'}{sizes}"

    def seconds(self, now_ns: int) -> str:
        """Since the first one entered it."""
        times = [one.at_ns for one in self.inside.values() if one is not None]
        return f" for {max(0, now_ns - min(times)) / _SECOND_NS:.0f} s" if times else ""


def explain(states: Sequence[RankState], now_ns: int) -> Explanation | None:
    """Why these ranks do not go on; None where their flight recorders show nothing that waits.

    `now_ns` is in ns since the epoch, as the recorders' times are.
    """
    known = {state.rank: state for state in states}
    waits = _waits(known)
    if not waits:
        return None
    for wait in waits:
        if (found := _mismatch(wait, known)) is not None:
            return found
    blocked = {rank for wait in waits for rank in wait.inside}
    first = _first(waits, blocked)
    if first is None:
        return _circle(waits, known)
    roots = tuple(rank for rank in first.missing if rank not in blocked)
    if not first.missing:
        return _nobody_missing(first, now_ns)
    return _missing(first, [known[rank] for rank in roots if rank in known], roots, now_ns)


def _waits(known: Mapping[int, RankState]) -> list[_Wait]:
    """The collectives that somebody waits in, of each group the first."""
    waits = []
    for name in sorted({name for state in known.values() for name in state.groups}):
        groups = {rank: state.groups[name] for rank, state in known.items() if name in state.groups}
        stuck = {rank: group for rank, group in groups.items() if group.entered > group.done}
        stuck = {rank: group for rank, group in stuck.items() if known[rank].life in (Life.ALIVE, Life.STOPPED)}
        if not stuck:
            continue
        number = min(group.done for group in stuck.values()) + 1
        inside = {rank: group.at(number) for rank, group in stuck.items() if group.done < number}
        members = sorted({rank for group in groups.values() for rank in numbers_in(group.ranks)} | set(groups))
        missing = tuple(rank for rank in members if rank not in groups or groups[rank].entered < number)
        title = next((group.title for group in groups.values() if group.title), "")
        waits.append(_Wait(group=name, title=title, number=number, inside=inside, missing=missing))
    return waits


def _first(waits: Sequence[_Wait], blocked: set[int]) -> _Wait | None:
    """Where the hang begins: somebody is missing there who does not wait elsewhere, or nobody at all is missing."""
    for wait in waits:
        if any(rank not in blocked for rank in wait.missing):
            return wait
    return next((wait for wait in waits if not wait.missing), None)


def _mismatch(wait: _Wait, known: Mapping[int, RankState]) -> Explanation | None:
    entered: dict[tuple[str, str], list[int]] = {}
    for rank, state in known.items():
        group = state.groups.get(wait.group)
        one = group.at(wait.number) if group is not None else None
        if one is not None:
            sizes = one.sizes if one.operation in _EVEN else ""
            entered.setdefault((one.operation, sizes), []).append(rank)
    if len(entered) < 2:
        return None
    few_first = sorted(entered.items(), key=lambda item: (len(item[1]), item[1]))
    words = [f"{_named(ranks)} entered {_op(*what)}" for what, ranks in few_first]
    place = f"#{wait.number} of {wait.title or f'group {wait.group}'}"
    text = f"the ranks disagree about collective {place}: {listed(words, _NAMED)}; a restart will not help"
    return Explanation(text=text, ranks=tuple(few_first[0][1]), reason="ProgramError", helps=False)


def _op(operation: str, sizes: str) -> str:
    return f"{operation} with {sizes}" if sizes else operation


def _circle(waits: Sequence[_Wait], known: Mapping[int, RankState]) -> Explanation:
    words = [f"{_named([*wait.inside])} in {wait.name}" for wait in waits]
    where = listed(words, _NAMED, "; ")
    text = f"the ranks wait for each other in different collectives: {where}; a restart will not help"
    return Explanation(text=text, ranks=tuple(sorted(known)), reason="ProgramError", helps=False)


def _nobody_missing(wait: _Wait, now_ns: int) -> Explanation:
    text = (
        f"all ranks known entered {wait.name}, and {_named([*wait.inside])} {_have(wait.inside)} waited in it"
        f"{wait.seconds(now_ns)}: the network or a device does not deliver it"
    )
    return Explanation(text=text, helps=True)


def _missing(wait: _Wait, roots: Sequence[RankState], ranks: Sequence[int], now_ns: int) -> Explanation:
    """Somebody never entered; what is known of them tells why."""
    waiting = f"{_named([*wait.inside])} {_have(wait.inside)} waited in {wait.name}{wait.seconds(now_ns)}"
    finished = [state for state in roots if state.life is Life.FINISHED]
    if finished:
        who = _named([state.rank for state in finished])
        text = f"{who} finished with exit code 0, and {waiting}: the ranks' data is uneven; a restart will not help"
        chosen = tuple(state.rank for state in finished)
        return Explanation(text=text, ranks=chosen, reason="ProgramError", helps=False)
    if not roots:
        text = f"{waiting}, which {_named(ranks)} did not enter; nothing is known of {_them(ranks)} here"
        return Explanation(text=text, ranks=tuple(ranks))
    phrases = listed([_why(state) for state in roots], _NAMED, "; ")
    chosen = tuple(state.rank for state in roots)
    unknown = [rank for rank in ranks if rank not in chosen]
    more = f"; nothing is known of {_named(unknown)}" if unknown else ""
    text = f"{_who(roots)} never entered {wait.name}; {_named([*wait.inside])} {_have(wait.inside)} waited in it"
    text += f"{wait.seconds(now_ns)}; {phrases}{more}"
    accuses = not all(state.doing.takes_long for state in roots)
    return Explanation(text=text, ranks=chosen, helps=None if not accuses else _helps(roots), accuses=accuses)


def _helps(roots: Sequence[RankState]) -> bool | None:
    return True if any(state.life in (Life.STOPPED, Life.DEAD) for state in roots) else None


def _why(state: RankState) -> str:
    if state.life is Life.STOPPED:
        return f"rank {state.rank} is stopped (SIGSTOP)"
    if state.life is Life.DEAD:
        return f"rank {state.rank} died{f' ({state.how})' if state.how else ''}"
    if state.doing is not Doing.UNKNOWN:
        return f"rank {state.rank} is in {state.doing.value}" + (f": {state.place}" if state.place else "")
    return f"rank {state.rank} is {state.place}" if state.place else f"where rank {state.rank} is, is unknown"


def _who(states: Sequence[RankState]) -> str:
    return str(states[0]) if len(states) == 1 else _named([state.rank for state in states])


def _have(inside: Mapping[int, object]) -> str:
    return "has" if len(inside) == 1 else "have"


def _them(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


def _named(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2,5`."""
    numbers = sorted(ranks)
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {spans(numbers)}"


def spans(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 as `0-2,5`."""
    groups: list[list[int]] = []
    for number in sorted(numbers):
        if groups and groups[-1][-1] + 1 == number:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ",".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)


def numbers_in(text: str) -> list[int]:
    """The numbers of such a text; none in one that is no such text."""
    parts = [part.partition("-") for part in text.split(",")] if text else []
    if not all(low.isdecimal() and (high.isdecimal() or not dash) for low, dash, high in parts):
        return []
    return [number for low, _, high in parts for number in range(int(low), min(int(high or low), _MOST) + 1)]
