"""The records of each rank's flight recorder, and which rank a job waits for. Pure.

A rank waits while it has entered a collective that has not ended. It waits for the members of the group that have
not entered it. Who is waited for and waits for nobody is where a hang begins; whether that is its fault, its own
state and stack tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from trainer_launch.model.codec import Amount, Count, Rank, Tagged, Text
from trainer_launch.model.units import grouped, listed, named_ranks, numbers_in, printable

MAX_BYTES = 1 << 20  # of one rank's answer
AFTER_ERROR = "exit code 0 after "
ANSWERS = "trainer-launch"  # the name of the thread that answers
MAX_ENTRIES, MAX_GROUPS = 512, 64  # of one rank
MAX_MESSAGES = 16  # of one rank in one group
_NAMED = 4  # ranks, places
_MOST_ACCUSED = 1024  # ranks, in a message
_NAME_CHARS = 100
_SECOND_NS = 1_000_000_000
_PLURAL = {"is": "are", "was": "were", "has": "have", "waits": "wait"}
_PAST = {"is": "was", "has": "had", "waits": "waited"}
# Their tensors have the same sizes on all ranks.
_EVEN = frozenset({"all_reduce", "broadcast", "reduce", "all_reduce_coalesced", "reduce_scatter"})
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})  # which rank is the root, is not recorded
Ns: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # since the epoch
_Us: TypeAlias = Annotated[int, Meta(ge=0, le=2**40)]  # twelve days


class Collective(NamedTuple):
    """A collective of a process group, as a rank entered it."""

    number: Count  # in its group, from 1 on
    operation: Text
    sizes: Text  # and types
    at_ns: Ns  # when it was entered, since the epoch

    def __str__(self) -> str:
        return self.operation if self.sizes in ("", "[]", "[[]]") else f"{self.operation} ({self.sizes})"


class Message(NamedTuple):
    """A message between two ranks that has not ended on this one."""

    operation: Text  # send or recv
    peer: Rank
    at_ns: Ns


class Group(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far one rank is in one process group."""

    title: Text = ""
    ranks: Text = ""  # its members, as 0-3,7,16-62:2; empty: not known
    entered: Count = 0  # the last collective that it entered
    done: Count = 0  # the last one that has ended
    begun: Count = 0  # operations of all kinds, also those that torch does not record
    last: tuple[Collective, ...] = ()
    messages: Annotated[tuple[Message, ...], Meta(max_length=MAX_MESSAGES)] = ()  # the oldest first; gloo has none

    def at(self, number: int) -> Collective | None:
        """The collective of this number, if it is among the last."""
        return next((collective for collective in self.last if collective.number == number), None)


class EnteredGroup(NamedTuple):
    """A process group of which a rank tells its last entries, whose numbers follow each other."""

    name: Text
    ranks: Text  # its members, likewise
    first: Count  # the number of the first entry that is told


class Entries(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When one rank entered its last collectives, in their order; ns since the epoch, by its node's clock."""

    rank: Rank
    step_us: Count = 0  # its collectives repeat themselves after so long; 0: they do not
    repeats: Count = 0  # and after so many
    is_cut: bool = False  # whether there were more before
    groups: Annotated[tuple[EnteredGroup, ...], Meta(max_length=MAX_GROUPS)] = ()
    start_ns: Ns = 0  # the first of the entries
    which: Annotated[
        tuple[Count, ...], Meta(max_length=MAX_ENTRIES)
    ] = ()  # their groups; a higher number: point-to-point
    gaps_us: Annotated[tuple[_Us, ...], Meta(max_length=MAX_ENTRIES)] = ()  # since the one before
    hides_messages: bool = False  # it sends or receives what is not recorded, so that its waits are not known

    def each(self) -> Iterator[tuple[EnteredGroup | None, int, int]]:
        """Group, number and time of each; None: a point-to-point operation."""
        at_ns, numbers = self.start_ns, [group.first for group in self.groups]
        for index, gap_us in zip(self.which, self.gaps_us, strict=False):
            at_ns += gap_us * 1000
            if index < len(numbers):
                yield self.groups[index], numbers[index], at_ns
                numbers[index] += 1
            else:
                yield None, 0, at_ns


class Stage(str, Enum):
    """How far a program is, where its recorder shows nothing."""

    JOINED = ""
    OUTSIDE = "not joined a process group yet"
    LEFT = "left its process group"
    ENDED = "ended its program, but not its process"


class Recorded(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's answer to PID 1."""

    number: Count = 0  # of the question
    why: Text = ""  # nothing can be told
    stage: Stage = Stage.JOINED
    stacks: str = ""  # of all threads, where these were asked for, as faulthandler writes them
    calls: Text = ""  # the method that the main thread is in, if it is not one of Python's
    handles: bool = True  # at its end: whether it has a handler of a signal that asks a program to stop
    saved: Count = 0  # bytes of its dump
    far: Count = 0  # collectives that it has entered and ended, of all groups
    groups: Mapping[str, Group] = field(default_factory=dict)  # by name, the same on all ranks
    entries: Entries | None = None  # where these were asked for


class Life(str, Enum):
    """Whether a worker's process is there."""

    ALIVE = "alive"
    STOPPED = "stopped"
    FINISHED = "finished"  # with exit code 0
    DEAD = "dead"


class Doing(str, Enum):
    """The activity of a worker, as its stack shows it."""

    UNKNOWN = ""
    COLLECTIVE = "a collective"
    DATA = "the data loader"
    CHECKPOINT = "a checkpoint"
    COMPILING = "compilation"
    DEBUGGER = "a debugger"
    TRANSFER = "a transfer of files"
    INPUT = "a read of standard input"

    @property
    def takes_long(self) -> bool:
        """Whether a healthy worker may be in it for minutes."""
        return self not in (Doing.UNKNOWN, Doing.COLLECTIVE, Doing.DATA)

    @property
    def waits_for_person(self) -> bool:
        """Whether a person decides how long it takes."""
        return self in (Doing.DEBUGGER, Doing.INPUT)


class RankState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that is known of one rank."""

    rank: Rank
    node: Count | None = None
    life: Life = Life.ALIVE
    how: Text = ""  # it died; where it has finished, after which error
    place: Text = ""  # where its main thread is
    doing: Doing = Doing.UNKNOWN
    stage: Stage = Stage.JOINED
    groups: Mapping[str, Group] = field(default_factory=dict)
    why: Text = ""  # its flight recorder tells nothing
    is_late: bool = False  # it has entered a collective after others' time-out: its groups are as they were then
    stack: Text = ""  # of its main thread, a call on each line, innermost first
    quiet_s: Amount | None = None  # since its last output, report(), files, collectives or work, or its end

    @property
    def waits(self) -> bool:
        """Whether a collective that it entered, or a message, has not ended."""
        return any(group.entered > group.done or group.messages for group in self.groups.values())

    @property
    def is_there(self) -> bool:
        """Whether its process may still wait for somebody."""
        return self.life in (Life.ALIVE, Life.STOPPED)

    @property
    def is_starting(self) -> bool:
        """Whether the rank is still before its first collective: it may download, or read its first batch."""
        if self.life is not Life.ALIVE or self.why or self.stage in (Stage.LEFT, Stage.ENDED):
            return False
        return all(group.entered == group.begun == 0 for group in self.groups.values())

    @property
    def error(self) -> str:
        """The error that it had printed when it finished with exit code 0."""
        return self.how.partition(AFTER_ERROR)[2]

    @property
    def may_take_long(self) -> bool:
        """Whether a healthy rank may be there for minutes."""
        return self.life is Life.ALIVE and (self.doing.takes_long or self.is_starting)

    @property
    def is_elsewhere(self) -> bool:
        """Whether its main thread waits for no collective: what it has entered goes on beside it."""
        is_beside = self.doing.takes_long or self.doing is Doing.DATA
        return is_beside and not self.place.startswith("waits ")

    @property
    def is_unproven(self) -> bool:
        """Whether the rank may wait for a collective in a line of the user's, such as `work.wait()`, or not."""
        return self.doing is Doing.UNKNOWN and self.place != ""

    def is_active(self, limit_s: float) -> bool:
        """Whether the rank has shown progress within this time, or waits for a person."""
        has_progress = self.quiet_s is not None and self.quiet_s < limit_s
        return self.life is Life.ALIVE and (has_progress or self.doing.waits_for_person)

    def is_idle(self, limit_s: float) -> bool:
        """Whether the place of the rank is known, and it has shown no progress within this time."""
        return self.place != "" and self.quiet_s is not None and self.quiet_s >= limit_s > 0

    def __str__(self) -> str:
        return f"rank {self.rank}" if self.node is None else f"rank {self.rank} (node {self.node})"


def brief(state: RankState, most: int) -> RankState:
    """With so many collectives of each group, around the first that has not ended; 0: only the groups that wait."""
    groups = {}
    for name, group in state.groups.items():
        if most or group.entered > group.done:
            until = min(group.entered, group.done + max(1, most // 2))
            last = tuple(each for each in group.last if each.number <= until)[-most:] if most else ()
            groups[name] = replace(group, last=last)
    return replace(state, groups=groups)


def errors_in_words(states: Iterable[RankState]) -> str:
    """`rank 1 had printed ValueError: bad record`, of ranks that finished with exit code 0 nevertheless."""
    return listed([f"rank {state.rank} had printed {state.error}" for state in states if state.error], _NAMED, "; ")


def entered_in_words(states: Sequence[RankState]) -> str:
    """`last entered: ranks 0,2 all_reduce #6 of default_pg, rank 1 all_reduce #5 of default_pg`."""
    last = {state.rank: _last_of(state) for state in states}
    entered = grouped(
        (f"{collective.operation} #{collective.number} of {group.title or f'group {name}'}", rank)
        for rank in sorted(last)
        for collective, name, group in filter(None, [last[rank]])
    )
    words = [f"{named_ranks(ranks)} {printable(what)[:_NAME_CHARS]}" for what, ranks in entered.items()]
    return f"last entered: {listed(words, _NAMED)}" if words else ""


def _last_of(state: RankState) -> tuple[Collective, str, Group] | None:
    """The collective that a rank entered last, with its group's name and its group."""
    last = [(group.last[-1], name, group) for name, group in state.groups.items() if group.last]
    return max(last, key=lambda each: each[0].at_ns, default=None)


class Explanation(Tagged, frozen=True, kw_only=True):
    """Why a job does not go on: one sentence, and what follows from it. The coordinator tells it to all nodes."""

    text: Text
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=_MOST_ACCUSED)] = ()  # who is waited for, or who disagrees
    reason: Text = ""  # the exit reason that it proves, "": none
    helps: bool | None = None  # whether a restart can help, None: unknown
    accuses: bool = True  # False: this may take as long as it does
    active: bool = False  # the cause still shows progress: nobody hangs


def at_timeout(states: Sequence[RankState], rank: int, timeout_s: float) -> tuple[RankState, ...]:
    """The ranks as they were when the collective timed out in which `rank` was last.

    `timeout_s` is its group's, and runs from the moment at which the first rank entered it. A rank that entered
    anything later may have waited then in what it had entered before; where else it was, nobody knows any more.
    The states have to be of one node: their times are of its clock.
    """
    last = next((_last_of(state) for state in states if state.rank == rank), None)
    if last is None:
        return (*states,)
    (number, *_), name, spanned = *last[:2], last[2].ranks
    groups = [group for group in (state.groups.get(name) for state in states) if group and group.ranks == spanned]
    entered = [collective.at_ns for group in groups if (collective := group.at(number)) is not None]
    until_ns = min(entered) + int(timeout_s * _SECOND_NS)
    return tuple(_as_of(state, until_ns) if max(entered) > until_ns else state for state in states)


def _as_of(state: RankState, until_ns: int) -> RankState:
    """A rank without what it has entered since."""
    groups = {}
    for name, group in state.groups.items():
        last = tuple(collective for collective in group.last if collective.at_ns <= until_ns)
        entered = group.entered - (len(group.last) - len(last))
        groups[name] = replace(group, last=last, entered=entered, done=min(group.done, entered))
    if groups == state.groups:
        return state
    has_messages = any(group.begun > group.entered for group in state.groups.values())  # it may have waited for one
    doing = Doing.COLLECTIVE if has_messages else Doing.UNKNOWN
    return replace(state, groups=groups, is_late=True, doing=doing, place="", stack="")


def never_entered(states: Sequence[RankState], rank: int) -> Explanation | None:
    """The ranks that had not entered the collective in which `rank` timed out; None: nothing proves any.

    `states` are what all nodes know at the end. A rank that had not entered it may have waited for others itself,
    in another group: then it is for them that all waited. Only groups of which each member reported prove anything,
    but for ranks that were aborted, as NCCL's watchdog does to all that wait.
    """
    by_rank = {state.rank: state for state in states}
    silent = {state.rank for state in by_rank.values() if state.life is Life.DEAD and not state.groups}
    waits = dict[int, list[_Wait]]()  # what each rank waited in
    unproven = set[int]()
    for (name, spanned), groups in _by_group(by_rank).items():
        number = min(group.entered for group in groups.values()) + 1
        inside = [member for member, group in groups.items() if group.entered >= number]
        inside = [member for member in inside if _timed_out(by_rank[member], name)]
        if not {*numbers_in(spanned)} <= groups.keys() | silent:
            unproven.update(inside)
        elif inside:
            wait = _wait(name, spanned, number, groups, inside)
            wait = replace(wait, missing=tuple(member for member in wait.missing if member in groups))
            for member in {*inside} | (silent & {*wait.members}):
                waits.setdefault(member, []).append(wait)
    causes, todo = dict[int, _Wait](), [rank]
    if rank in by_rank and by_rank[rank].is_late:  # and timed out in its turn
        causes.update((rank, wait) for each in waits.values() for wait in each if rank in wait.missing)
    while todo:
        for wait in waits.get(todo.pop(), ()):
            new = [missing for missing in wait.missing if missing not in causes]
            causes.update(dict.fromkeys(new, wait))
            todo += new
    if unproven & {rank, *causes}:
        return None
    if not causes and (rank not in by_rank or not by_rank[rank].groups):
        return _never_joined(by_rank.values(), rank)
    roots = [by_rank[root] for root in sorted(causes.keys() - waits.keys())]
    # A rank that waited for a message may be a victim, too: that is not recorded.
    roots = [state for state in roots if state.doing is not Doing.COLLECTIVE] or roots
    if not roots:
        return None
    wait = causes[roots[0].rank]
    text = f"{_who(roots)} had not entered {wait.name}; {named_ranks(wait.inside)} waited in it"
    text += "".join(f"; {phrase}" for phrase in _phrases(roots, 0.0, past=True))
    is_proven = all(state.doing is not Doing.COLLECTIVE for state in roots)
    return Explanation(text=text, ranks=tuple(state.rank for state in roots) if is_proven else ())


def _never_joined(states: Iterable[RankState], rank: int) -> Explanation | None:
    """The ranks that did something else while `rank` waited for all to join; None: none is known to."""
    late = [state for state in states if state.stage is Stage.OUTSIDE and state.life is Life.ALIVE and state.place]
    late = [state for state in late if state.doing is not Doing.COLLECTIVE]
    text = listed(_phrases(late, 0.0, past=True), _NAMED, "; ")
    text += f"; rank {rank} waited for {'them' if late[1:] else 'it'}"
    return Explanation(text=text, ranks=tuple(state.rank for state in late)) if late else None


def _timed_out(state: RankState, name: str) -> bool:
    """Whether a rank may have waited in the last collective of this group.

    Of a rank that has ended, only the last one of all may be one: torch counts it as ended, like all others. What a
    late rank had entered before has ended since.
    """
    if state.life is not Life.DEAD and state.stage is not Stage.ENDED and not state.is_late:
        return state.groups[name].entered > state.groups[name].done
    last = _last_of(state)
    return last is not None and last[1] == name


def _by_group(states: Mapping[int, RankState]) -> dict[tuple[str, str], dict[int, Group]]:
    """The ranks of each group, as far as they report; groups of other members may have the same name."""
    groups: dict[tuple[str, str], dict[int, Group]] = {}
    for rank, state in sorted(states.items()):
        for name, group in state.groups.items():
            groups.setdefault((name, group.ranks), {})[rank] = group
    return dict(sorted(groups.items()))


class _Wait(Struct, frozen=True, kw_only=True):
    """Ranks that wait for others: in a collective that these have not entered, or for a message."""

    group: str
    spanned: str  # its members as told, "" where they are not known: groups of other members may have the same name
    title: str
    number: int  # of the collective; 0: a message
    inside: Mapping[int, Collective | None]
    missing: tuple[int, ...]  # whom they wait for
    members: tuple[int, ...]

    @property
    def operation(self) -> str:
        return next((each.operation for each in self.inside.values() if each is not None), "collective")

    @property
    def where(self) -> str:
        return f"#{self.number} of {self._place}"

    @property
    def name(self) -> str:
        if not self.number:
            peers = named_ranks({*self.members} - self.inside.keys())
            return f"{self.operation} {'to' if self.operation == 'send' else 'from'} {peers} in {self._place}"
        sizes = next((each.sizes for each in self.inside.values() if each is not None), "")
        return f"{self.operation} {self.where}{f', {sizes}' if sizes not in ('', '[]', '[[]]') else ''}"

    @property
    def _place(self) -> str:
        return self.title or f"group {self.group} ({named_ranks(self.members)})"

    @property
    def since_ns(self) -> int:
        """When the first of them entered it; 0: unknown."""
        return min((each.at_ns for each in self.inside.values() if each is not None), default=0)

    def waited(self, what: str, now_ns: int) -> str:
        """`ranks 0-2 have waited in it for 40 s`, by the first of them."""
        seconds = f" for {max(0, now_ns - self.since_ns) / _SECOND_NS:.0f} s" if self.since_ns else ""
        return f"{_with_verb(self.inside, 'has')} waited in {what}{seconds}"


def explain(
    states: Sequence[RankState], now_ns: int, limit_s: float = 0.0, of: int | None = None
) -> Explanation | None:
    """Why these ranks do not go on; None where nothing shows who waits for whom.

    `now_ns` is in ns since the epoch, as the recorders' times are. Who has shown progress within `limit_s` is no
    suspect. `of` is how many ranks the job has; None: unknown.
    """
    return _Graph(states, now_ns, limit_s, of).explanation()


class _Graph:
    """The waits of ranks for others: whom for, by recorders; whether they wait at all, by their stacks."""

    def __init__(self, states: Sequence[RankState], now_ns: int, limit_s: float, of: int | None) -> None:
        self._states = {state.rank: state for state in states}
        self._now_ns, self._limit_s = now_ns, limit_s
        self._groups = _by_group(self._states)
        self._waits = _in_collectives(self._states, self._groups)
        self._waits += _for_messages(self._states, {rank for wait in self._waits for rank in wait.inside})
        self._inside = {rank for wait in self._waits for rank in wait.inside}
        self._missing = {rank for wait in self._waits for rank in wait.missing}
        alive = [state for state in self._states.values() if state.is_there]
        self._finished = [state for state in self._states.values() if state.life is Life.FINISHED]
        # Who waits for a message of gloo's, or to join a group: whom for, is not recorded.
        self._outside = {state.rank for state in alive if state.doing is Doing.COLLECTIVE} - self._inside
        self._alive = {state.rank for state in alive} if of is not None and len(self._states) >= of else set[int]()
        self._others = self._alive - self._inside - self._outside

    def explanation(self) -> Explanation | None:
        """Of the first rule that fits."""
        for wait in self._waits:
            if (mismatch := _mismatch(wait, self._groups[wait.group, wait.spanned])) is not None:
                return mismatch
        complete = next((wait for wait in self._waits if not wait.missing), None)
        if roots := self._missing - self._inside - self._outside:
            return self._never_entered(roots)
        if complete is not None:
            return self._undelivered(complete)
        # A circle is proven only if each of them waits where it is in a collective.
        proven = {rank for rank in self._inside if not self._states[rank].is_unproven} - self._active(self._inside)
        if roots := self._missing - proven - self._outside:
            return self._never_entered(roots)
        if self._waits and not self._missing & self._outside:
            return self._circle()
        if self._others and self._outside:
            return self._alone("all other ranks wait for {ranks}, or behind {them}")
        if self._finished and self._others:
            return self._alone("all ranks but {ranks} have finished with exit code 0")
        if self._finished and len(self._alive) == 1:
            (last,) = (self._states[rank] for rank in self._alive)
            return self._uneven(self._finished, [last], *_phrases([last], self._limit_s))
        if not self._missing:
            return None
        why = self._never_entered(self._missing)  # each waits for others itself
        return replace(why, ranks=()) if why.accuses and why.ranks[1:] else why

    def _active(self, ranks: Iterable[int]) -> set[int]:
        return {rank for rank in ranks if rank in self._states and self._states[rank].is_active(self._limit_s)}

    def _where(self, ranks: Iterable[int]) -> list[str]:
        """Where each of these ranks is, in words."""
        return _phrases([self._states[rank] for rank in ranks], self._limit_s)

    def _never_entered(self, roots: set[int]) -> Explanation:
        """Told from where the hang begins: first the waits for ranks of which none waits, the oldest first."""
        waits = [wait for wait in self._waits if roots & {*wait.missing}]
        waits.sort(key=lambda wait: (not roots.issuperset(wait.missing), wait.since_ns))
        parts, shown, behind, beside = list[Explanation](), set[int](), {*self._inside}, {*self._outside}
        for alike in grouped((wait.name, wait) for wait in waits).values():
            wait = replace(
                alike[0],
                inside={rank: collective for each in alike for rank, collective in each.inside.items()},
                missing=tuple(sorted({rank for each in alike for rank in each.missing})),
            )
            if chosen := sorted(roots.intersection(wait.missing) - shown):
                parts.append(self._root(wait, chosen))
                shown.update(chosen)
                behind -= wait.inside.keys()
                beside -= {*wait.missing}
        if any(part.reason for part in parts):
            return next(part for part in parts if part.reason)
        parts.sort(key=lambda part: not part.accuses)
        at_work = any(part.active for part in parts)  # an idle rank may wait for that one, outside torch
        named = [part for part in parts if part.accuses and (part.helps or not at_work)]
        accuses, named = bool(named), named or parts
        behind -= shown
        awaited = {rank for wait in self._waits if behind & wait.inside.keys() for rank in wait.missing}
        texts = [part.text for part in parts]
        texts += [f"{_with_verb(behind, 'waits')} behind {named_ranks(awaited)}"] * bool(behind)
        texts += self._where(sorted(awaited & beside))
        return Explanation(
            text=listed(texts, _NAMED, "; "),
            ranks=tuple(sorted({rank for part in named for rank in part.ranks})),
            helps=True if any(part.helps for part in named) else None,
            accuses=accuses,
            active=at_work and not accuses,
        )

    def _root(self, wait: _Wait, ranks: Sequence[int]) -> Explanation:
        """The verdict on ranks that never entered; their states tell why they did not."""
        roots = [self._states[rank] for rank in ranks if rank in self._states]
        waiting = wait.waited(wait.name, self._now_ns)
        if finished := [state for state in roots if state.life is Life.FINISHED]:
            return self._uneven(finished, [self._states[rank] for rank in wait.inside], waiting)
        if not roots:
            return Explanation(text=f"{waiting}; nothing is known of {named_ranks(ranks)} here", ranks=tuple(ranks))
        named = [state for state in roots if not state.is_active(self._limit_s)] or roots
        beside = {*ranks} | (self._outside & {*wait.missing})
        others = sorted(beside - {state.rank for state in named} & self._states.keys())
        unknown = sorted({*ranks} - {state.rank for state in roots})
        phrases = [*_phrases(named, self._limit_s), *self._where(others)]
        phrases += [f"nothing is known of {named_ranks(unknown)}"] * bool(unknown)
        # What a rank has entered of a group that it has left is not known.
        is_proven = wait.number and not any(state.stage is Stage.LEFT for state in named)
        lead = (
            f"{_who(named)} never entered {wait.name}; {wait.waited('it', self._now_ns)}" if is_proven else waiting
        )
        return self._verdict(f"{lead}; {listed(phrases, _NAMED, '; ')}", named, roots)

    def _verdict(self, text: str, named: Sequence[RankState], roots: Sequence[RankState]) -> Explanation:
        """Accuse the idle ranks of those that are waited for, unless one of these is at work, or may take long.

        An idle one may wait for that one, outside torch: for its lock on a file, what it downloads or compiles.
        """
        if any(state.life in (Life.STOPPED, Life.DEAD) for state in named):
            return Explanation(text=text, ranks=tuple(state.rank for state in named), helps=True)
        active = any(state.is_active(self._limit_s) for state in roots)
        slow = [state for state in roots if state.may_take_long]
        if active or len(slow) == len(roots) or any(state.doing is not Doing.CHECKPOINT for state in slow):
            ranks = tuple(state.rank for state in roots)
            return Explanation(text=text, ranks=ranks, accuses=False, active=active)
        return Explanation(text=text, ranks=tuple(state.rank for state in named))

    def _alone(self, sentence: str) -> Explanation:
        """The ranks that do not wait, while nothing records whom the others wait for: idle ones are the cause."""
        ranks = sorted(self._others - self._active(self._others)) or sorted(self._others)
        named, others = [self._states[rank] for rank in ranks], sorted(self._inside | self._outside)
        lead = sentence.format(ranks=named_ranks(ranks), them="it" if len(ranks) == 1 else "them")
        phrases = [*self._where(ranks), *self._where(others)]
        roots = [self._states[rank] for rank in sorted(self._others)]
        verdict = self._verdict(f"{lead}: {listed(phrases, _NAMED, '; ')}", named, roots)
        is_idle = all(state.life is Life.STOPPED or state.is_idle(self._limit_s) for state in named)
        return verdict if is_idle else replace(verdict, accuses=False)

    def _undelivered(self, wait: _Wait) -> Explanation:
        """All that are known have entered it."""
        if not wait.spanned:
            text = wait.waited(wait.name, self._now_ns)
            return Explanation(text=f"{text}; the other ranks of its group are unknown", accuses=False)
        is_rooted = wait.operation in _ROOTED
        text = f"all known ranks entered {wait.name}, and {wait.waited('it', self._now_ns)}"
        text += ": the network or a device does not deliver it"
        text += ", or the ranks name different roots" if is_rooted else ""
        active = bool(self._active(wait.members))
        return Explanation(text=text, helps=None if is_rooted else True, accuses=not active, active=active)

    def _uneven(self, finished: Sequence[RankState], inside: Sequence[RankState], waiting: str) -> Explanation:
        """Some have finished, and others wait for them; that is proven by one who waits and does nothing else."""
        ranks, limit_s = tuple(state.rank for state in finished), self._limit_s
        lead = f"{named_ranks(ranks)} finished with exit code 0, and {waiting}"
        if any(state.quiet_s is not None and state.quiet_s < limit_s for state in finished):
            text = f"{lead}, which may be over by now"  # the others were seen before
            return Explanation(text=text, ranks=ranks, accuses=False, active=True)
        if any(not state.is_unproven and not state.is_active(limit_s) for state in inside):
            return _left_early(lead, finished, ": the ranks' data is uneven")
        active = any(state.is_active(limit_s) for state in inside)
        text = f"{lead}; {listed(_phrases(inside, limit_s), _NAMED, '; ')}"
        return Explanation(text=text, ranks=ranks, accuses=not active, active=active)

    def _circle(self) -> Explanation:
        words = [f"{named_ranks(wait.inside)} in {wait.name}" for wait in self._waits]
        where = listed(words, _NAMED, "; ")
        text = f"the ranks wait for each other in different collectives: {where}; a restart will not help"
        return Explanation(text=text, reason="ProgramError", helps=False)


def _left_early(text: str, finished: Sequence[RankState], why: str = "") -> Explanation:
    """Others wait for ranks that have finished: the cause is who of them had failed, or else the program."""
    if errors := errors_in_words(finished):
        ranks = tuple(state.rank for state in finished if state.error)
        return Explanation(text=f"{text}; {errors}", ranks=ranks, reason="Hung")
    ranks, text = tuple(state.rank for state in finished), f"{text}{why}; a restart will not help"
    return Explanation(text=text, ranks=ranks, reason="ProgramError", helps=False)


def unexplained(states: Sequence[RankState], of: int, limit_s: float = 0.0) -> Explanation:
    """Where the ranks are that make no progress, though nothing shows who waits for whom.

    `of` is how many the job has: one of which nothing is known may be at work, or still be about to start.
    """
    alive = [state for state in states if state.is_there]
    active = any(state.is_active(limit_s) for state in states)
    where = listed(_phrases([state for state in alive if state.place], limit_s), _NAMED, "; ")
    is_all, finished = len(states) >= of, [state for state in states if state.life is Life.FINISHED]
    joining = [state for state in alive if state.stage is Stage.OUTSIDE and state.doing is Doing.COLLECTIVE]
    if finished and alive and is_all and joining == alive:
        ranks, they = tuple(state.rank for state in finished), "they" if finished[1:] else "it"
        text = f"{named_ranks(ranks)} finished with exit code 0 before {they} joined a process group; {where}"
        if active or any((state.quiet_s or 0.0) < limit_s for state in finished):
            return Explanation(text=text, ranks=ranks, accuses=False, active=True)
        return _left_early(text, finished)
    if alive and all(state.doing is Doing.COLLECTIVE for state in alive):
        text = f"all {'' if is_all else 'known '}ranks wait for each other outside recorded collectives: {where}"
        return Explanation(text=text, accuses=is_all and not active, active=active)
    text = f"no progress, but none of {len(states)} known ranks waits in a recorded collective"
    return Explanation(text=f"{text}: {where}" if where else text, accuses=False, active=active)


def _in_collectives(
    states: Mapping[int, RankState], by_group: Mapping[tuple[str, str], Mapping[int, Group]]
) -> list[_Wait]:
    """The collectives that somebody waits in, of each group the first."""
    waits = []
    for (name, spanned), groups in by_group.items():
        stuck = {
            rank: group
            for rank, group in groups.items()
            if group.entered > group.done and states[rank].is_there and not states[rank].is_elsewhere
        }
        if stuck:
            number = min(group.done for group in stuck.values()) + 1
            inside = [rank for rank, group in stuck.items() if group.done < number]
            waits.append(_wait(name, spanned, number, groups, inside))
    return waits


def _wait(name: str, spanned: str, number: int, groups: Mapping[int, Group], inside: Iterable[int]) -> _Wait:
    """The collective of this number; `inside` are the ranks that wait in it."""
    members = sorted({*numbers_in(spanned)} | groups.keys())
    missing = tuple(rank for rank in members if rank not in groups or groups[rank].entered < number)
    return _Wait(
        group=name,
        spanned=spanned,
        title=next((group.title for group in groups.values() if group.title), ""),
        number=number,
        inside={rank: groups[rank].at(number) for rank in inside},
        missing=missing,
        members=tuple(members),
    )


def _for_messages(states: Mapping[int, RankState], in_collectives: set[int]) -> list[_Wait]:
    """The messages that somebody waits for.

    One that both sides wait for goes on once the peer does: it may come after what the peer waits in elsewhere.
    """
    messages = {
        (rank, message.peer, message.operation): (name, group, message)
        for rank, state in states.items()
        if state.is_there and not state.is_elsewhere
        for name, group in state.groups.items()
        for message in reversed(group.messages)
    }
    other = {"send": "recv", "recv": "send"}
    both = {key for key in messages if (key[1], key[0], other.get(key[2], "")) in messages}
    elsewhere = in_collectives | {rank for rank, *_ in messages.keys() - both}
    return [
        _Wait(
            group=name,
            spanned=group.ranks,
            title=group.title,
            number=0,
            inside={rank: Collective(0, operation, "", message.at_ns)},
            missing=() if (rank, peer, operation) in both and peer not in elsewhere else (peer,),
            members=(rank, peer),
        )
        for (rank, peer, operation), (name, group, message) in messages.items()
    ]


def _mismatch(wait: _Wait, groups: Mapping[int, Group]) -> Explanation | None:
    """The ranks disagree about it; accused are the few, if they are fewer than any others."""
    entered: dict[tuple[str, str], list[int]] = {}
    for rank, group in groups.items():
        if (collective := group.at(wait.number)) is not None:
            sizes = collective.sizes if collective.operation in _EVEN else ""
            entered.setdefault((collective.operation, sizes), []).append(rank)
    if len(entered) < 2:
        return None
    few_first = sorted(entered.items(), key=lambda entry: (len(entry[1]), entry[1]))
    (_, few), (_, more), *_ = few_first
    words = [
        f"{named_ranks(ranks)} entered {operation}{f' with {sizes}' if sizes else ''}"
        for (operation, sizes), ranks in few_first
    ]
    text = f"the ranks disagree about collective {wait.where}: {listed(words, _NAMED)}; a restart will not help"
    ranks = tuple(few) if len(few) < len(more) else ()
    return Explanation(text=text, ranks=ranks, reason="ProgramError", helps=False)


def _phrases(states: Sequence[RankState], limit_s: float, *, past: bool = False) -> list[str]:
    """Where each rank is, or was, alike ranks together."""
    unknown = "was unknown" if past else "is unknown"
    groups: dict[tuple[str, str], list[int]] = {}
    for state in states:
        verb, rest = _state(state)
        verb = _PAST.get(verb, verb) if past else verb
        if state.is_active(limit_s) and not state.doing.waits_for_person:
            verb, rest = (verb, f"{rest}, still making progress") if verb else ("is", "making progress")
        groups.setdefault((verb, rest), []).append(state.rank)
    return [
        f"{_with_verb(ranks, verb)} {rest.replace(' its ', ' their ') if ranks[1:] else rest}".rstrip()
        if verb
        else f"where {_with_verb(ranks, 'was' if past else 'is')}, {unknown}"
        for (verb, rest), ranks in groups.items()
    ]


def _state(state: RankState) -> tuple[str, str]:
    """A verb and the rest of the sentence; none where nothing is known."""
    if state.is_late:
        return "entered", "it too late"
    if state.life is Life.STOPPED:
        return "is", "stopped (SIGSTOP)"
    if state.life is Life.DEAD:
        return "died", f"({state.how})" if state.how else ""
    if state.doing is Doing.COLLECTIVE and state.place.startswith("waits "):
        return "waits", state.place.partition(" ")[2]
    what = "" if state.doing is Doing.UNKNOWN else f"in {state.doing.value}"
    starting = "still before its first collective" if state.is_starting else ""
    verb, stage = ("is", starting) if state.stage is Stage.JOINED else ("has", state.stage.value)
    first, *rest = [part for part in (stage, what, state.place) if part] or [""]
    return (verb, f"{first}: {', '.join(rest)}" if rest else first) if first else ("", "")


def _who(states: Sequence[RankState]) -> str:
    return str(states[0]) if len(states) == 1 else named_ranks([state.rank for state in states])


def _with_verb(ranks: Iterable[int], verb: str) -> str:
    """`rank 3 waits`, `ranks 0-2,5 wait`."""
    ranks = [*ranks]
    return f"{named_ranks(ranks)} {verb if len(ranks) == 1 else _PLURAL.get(verb, verb)}"
