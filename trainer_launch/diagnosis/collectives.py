"""What each rank's flight recorder knows, and which rank a job waits for. Pure.

A rank waits while it has entered a collective that has not ended. It waits for the members of the group that have
not entered it. Who is waited for and waits for nobody is where a hang begins; whether that is its fault, its own
state and stack tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from trainer_launch.model.codec import Amount, Count, Tagged, Text
from trainer_launch.model.units import listed, numbers_in, spans

MAX_BYTES = 1 << 20  # of one rank's answer
MAX_ENTRIES, MAX_GROUPS, MAX_LOOKS = 512, 64, 64  # of one rank
MAX_ENTERED = 16  # collectives that the ranks of one node entered last
_NAMED = 4  # ranks, places
_MOST_ACCUSED = 1024  # ranks, in a message
_NAME_CHARS = 100
_SECOND_NS = 1_000_000_000
# Their tensors have the same sizes on all ranks.
_EVEN = frozenset({"all_reduce", "broadcast", "reduce", "all_reduce_coalesced", "reduce_scatter"})
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})  # which rank is the root, is not recorded
Rank: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Ns: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # since the epoch
_Us: TypeAlias = Annotated[int, Meta(ge=0, le=2**40)]  # twelve days


class Collective(NamedTuple):
    """One collective of a process group, as one rank entered it."""

    number: Count  # in its group, from 1 on
    operation: Text
    sizes: Text  # and types
    at_ns: Ns  # when it was entered, since the epoch

    def __str__(self) -> str:
        return self.operation if self.sizes in ("", "[]", "[[]]") else f"{self.operation} ({self.sizes})"


class Group(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far one rank is in one process group."""

    title: Text = ""
    ranks: Text = ""  # its members, as 0-3,7,16-62:2; empty: not known
    entered: Count = 0  # the last collective that it entered
    done: Count = 0  # the last one that has ended
    last: tuple[Collective, ...] = ()

    def at(self, number: int) -> Collective | None:
        """That collective, if it is one of the last."""
        return next((one for one in self.last if one.number == number), None)


class EnteredGroup(NamedTuple):
    """A process group of which a rank tells its last entries, whose numbers follow each other."""

    name: Text
    ranks: Text  # its members, likewise
    first: Count  # the number of the first entry that is told


class Look(NamedTuple):
    """Where a rank's main thread was at one time."""

    at_ns: Ns
    waits: bool  # for another rank, or does what may take long, such as a checkpoint
    place: Text


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
    looks: Annotated[tuple[Look, ...], Meta(max_length=MAX_LOOKS)] = ()  # where it was meanwhile, if it was asked

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

    def last(self, most: int) -> Entries:
        """Only so many."""
        dropped = max(0, len(self.which) - most)
        seen = Counter(self.which[:dropped])
        return replace(
            self,
            is_cut=self.is_cut or dropped > 0,
            groups=tuple(one._replace(first=one.first + seen[i]) for i, one in enumerate(self.groups)),
            start_ns=self.start_ns + 1000 * sum(self.gaps_us[: dropped + 1]),
            which=self.which[dropped:],
            gaps_us=(0, *self.gaps_us[dropped + 1 :])[: len(self.which) - dropped],
        )


class Recorded(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's answer to PID 1."""

    number: Count = 0  # of the question
    why: Text = ""  # nothing can be told
    saved: Count = 0  # bytes of its dump
    far: Count = 0  # collectives that it has entered and ended, of all groups
    groups: Mapping[str, Group] = field(default_factory=dict)  # by name, the same on all ranks
    entries: Entries | None = None  # where these were asked for
    looks: tuple[tuple[Ns, tuple[Text, ...]], ...] = ()  # where it was: FILE:LINE:FUNCTION, innermost first


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
    TRANSFER = "a transfer of files"

    @property
    def takes_long(self) -> bool:
        """Whether a healthy worker may be in it for minutes."""
        return self not in (Doing.UNKNOWN, Doing.COLLECTIVE, Doing.DATA)


class RankState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that is known of one rank."""

    rank: Rank
    node: Count | None = None
    life: Life = Life.ALIVE
    how: Text = ""  # it died
    place: Text = ""  # where its main thread is
    doing: Doing = Doing.UNKNOWN
    groups: Mapping[str, Group] = field(default_factory=dict)
    why: Text = ""  # its flight recorder tells nothing
    stack: Text = ""  # of its main thread, a call on each line, innermost first
    quiet_s: Amount | None = None  # since its last output, report(), files, collectives or work, or its end

    @property
    def waits(self) -> bool:
        """Whether a collective that it entered has not ended."""
        return any(group.entered > group.done for group in self.groups.values())

    @property
    def is_starting(self) -> bool:
        """Whether it is still before its first collective: it may download, or read its first batch."""
        known = self.life is Life.ALIVE and not self.why
        return known and all(group.entered == 0 for group in self.groups.values())

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
        """Whether it may wait for a collective in a line of the user's, such as `work.wait()`, or not at all."""
        return self.doing is Doing.UNKNOWN and self.place != ""

    def is_active(self, limit_s: float) -> bool:
        """Whether it has shown progress within this time."""
        return self.life is Life.ALIVE and self.quiet_s is not None and self.quiet_s < limit_s

    def __str__(self) -> str:
        return f"rank {self.rank}" if self.node is None else f"rank {self.rank} (node {self.node})"


def brief(state: RankState, most: int) -> RankState:
    """With so many collectives of each group, around the first that has not ended; 0: only the groups that wait."""
    groups = {
        name: replace(group, last=_around(group, most))
        for name, group in state.groups.items()
        if most or group.entered > group.done
    }
    return replace(state, groups=groups)


def _around(group: Group, most: int) -> tuple[Collective, ...]:
    until = min(group.entered, group.done + max(1, most // 2))
    return tuple(one for one in group.last if one.number <= until)[-most:] if most else ()


def last_entered(states: Sequence[RankState]) -> dict[str, tuple[int, ...]]:
    """By collective, the ranks for which it is the last that they entered."""
    found: dict[str, tuple[int, ...]] = {}
    for state in {state.rank: state for state in states}.values():
        known = [(one, name, group) for name, group in state.groups.items() if (one := group.at(group.entered))]
        if known:
            one, name, group = max(known, key=lambda each: each[0].at_ns)
            words = f"{one.operation} #{one.number} of {group.title or f'group {name}'}"
            words = "".join(letter for letter in words if " " <= letter <= "~")[:_NAME_CHARS]
            found[words] = (*found.get(words, ()), state.rank)
    return dict([*found.items()][:MAX_ENTERED])


def entered_in_words(entered: Mapping[str, Collection[int]]) -> str:
    """`last entered: ranks 0,2 all_reduce #6 of default_pg, rank 1 all_reduce #5 of default_pg`."""
    by_rank = sorted((min(ranks), what) for what, ranks in entered.items() if ranks)
    words = [f"{_named({*entered[what]})} {what}" for _, what in by_rank]
    return f"last entered: {listed(words, _NAMED)}" if words else ""


class Explanation(Tagged, frozen=True, kw_only=True):
    """Why a job does not go on: one sentence, and what follows from it. The coordinator tells it to all nodes."""

    text: Text
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=_MOST_ACCUSED)] = ()  # who is waited for, or who disagrees
    reason: Text = ""  # the exit reason that it proves, "": none
    helps: bool | None = None  # whether a restart can help, None: unknown
    accuses: bool = True  # False: this may take as long as it does
    active: bool = False  # the cause still shows progress: nobody hangs


class _Wait(Struct, frozen=True, kw_only=True):
    """One collective that has not ended on those who wait in it."""

    group: str
    spanned: str  # its members as told, "" where they are not known: groups of other members may have the same name
    title: str
    number: int
    inside: Mapping[int, Collective | None]
    missing: tuple[int, ...]  # members that have not entered it
    members: tuple[int, ...]

    @property
    def known(self) -> Collective | None:
        return next((one for one in self.inside.values() if one is not None), None)

    @property
    def where(self) -> str:
        return f"#{self.number} of {self.title or f'group {self.group} ({_named(self.members)})'}"

    @property
    def name(self) -> str:
        known = self.known
        sizes = f", {known.sizes}" if known is not None and known.sizes not in ("", "[]", "[[]]") else ""
        return f"{known.operation if known is not None else 'collective'} {self.where}{sizes}"

    def seconds(self, now_ns: int) -> str:
        """Since the first one entered it."""
        times = [one.at_ns for one in self.inside.values() if one is not None]
        return f" for {max(0, now_ns - min(times)) / _SECOND_NS:.0f} s" if times else ""


def explain(states: Sequence[RankState], now_ns: int, limit_s: float = 0.0) -> Explanation | None:
    """Why these ranks do not go on; None where their flight recorders show nothing that waits.

    `now_ns` is in ns since the epoch, as the recorders' times are. Who has shown progress within `limit_s` is no
    suspect.
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
    if first is None:  # a circle is proven only if each of them waits where it is in a collective
        blocked = {rank for rank in blocked if not (known[rank].is_unproven or known[rank].is_active(limit_s))}
        first = _first(waits, blocked)
    if first is None:
        return _circle(waits, known)
    if not first.missing:
        return _nobody_missing(first, known, now_ns, limit_s)
    roots = tuple(rank for rank in first.missing if rank not in blocked)
    found = _missing(first, known, roots, now_ns, limit_s)
    behind = blocked - {*first.inside}
    more = f"; {_with_verb(behind, 'waits')} behind {_named(first.inside)}" if behind else ""
    return found if found.reason else replace(found, text=found.text + more)


def unexplained(states: Sequence[RankState], of: int, limit_s: float = 0.0) -> Explanation:
    """Where the ranks are that make no progress, though their flight recorders show nothing that waits.

    `of` is how many the job has: one of which nothing is known may be at work, or still be about to start.
    """
    alive = [state for state in states if state.life in (Life.ALIVE, Life.STOPPED)]
    active = any(state.is_active(limit_s) for state in states)
    where = listed(_phrases([state for state in alive if state.place], limit_s), _NAMED, "; ")
    if alive and all(state.doing is Doing.COLLECTIVE for state in alive):
        is_all = len(states) >= of
        text = f"all ranks {'' if is_all else 'known '}wait for each other outside recorded collectives: {where}"
        return Explanation(text=text, accuses=is_all and not active, active=active)
    text = f"no progress, but none of {len(states)} known ranks waits in a recorded collective"
    return Explanation(text=f"{text}: {where}" if where else text, accuses=False, active=active)


def _waits(known: Mapping[int, RankState]) -> list[_Wait]:
    """The collectives that somebody waits in, of each group the first."""
    waits = []
    named = sorted({(name, group.ranks) for state in known.values() for name, group in state.groups.items()})
    for name, spanned in named:
        groups = _same(known, name, spanned)
        stuck = {rank: group for rank, group in groups.items() if group.entered > group.done}
        stuck = {rank: group for rank, group in stuck.items() if known[rank].life in (Life.ALIVE, Life.STOPPED)}
        stuck = {rank: group for rank, group in stuck.items() if not known[rank].is_elsewhere}
        if not stuck:
            continue
        number = min(group.done for group in stuck.values()) + 1
        inside = {rank: group.at(number) for rank, group in stuck.items() if group.done < number}
        members = sorted({*numbers_in(spanned)} | set(groups))
        missing = tuple(rank for rank in members if rank not in groups or groups[rank].entered < number)
        title = next((group.title for group in groups.values() if group.title), "")
        wait = _Wait(
            group=name,
            spanned=spanned,
            title=title,
            number=number,
            inside=inside,
            missing=missing,
            members=tuple(members),
        )
        waits.append(wait)
    return waits


def _same(known: Mapping[int, RankState], name: str, spanned: str) -> dict[int, Group]:
    found = {rank: state.groups[name] for rank, state in known.items() if name in state.groups}
    return {rank: group for rank, group in found.items() if group.ranks == spanned}


def _first(waits: Sequence[_Wait], blocked: set[int]) -> _Wait | None:
    """Where the hang begins: who is missing there does not wait elsewhere, or nobody at all is missing."""
    outside = [wait for wait in waits if not blocked.issuperset(wait.missing)]
    direct = [wait for wait in outside if blocked.isdisjoint(wait.missing)]
    return next(iter(direct or outside or [wait for wait in waits if not wait.missing]), None)


def _mismatch(wait: _Wait, known: Mapping[int, RankState]) -> Explanation | None:
    entered: dict[tuple[str, str], list[int]] = {}
    for rank, group in _same(known, wait.group, wait.spanned).items():
        one = group.at(wait.number)
        if one is not None:
            sizes = one.sizes if one.operation in _EVEN else ""
            entered.setdefault((one.operation, sizes), []).append(rank)
    if len(entered) < 2:
        return None
    few_first = sorted(entered.items(), key=lambda item: (len(item[1]), item[1]))
    words = [f"{_named(ranks)} entered {_op(*what)}" for what, ranks in few_first]
    text = f"the ranks disagree about collective {wait.where}: {listed(words, _NAMED)}; a restart will not help"
    return Explanation(text=text, ranks=tuple(few_first[0][1]), reason="ProgramError", helps=False)


def _op(operation: str, sizes: str) -> str:
    return f"{operation} with {sizes}" if sizes else operation


def _circle(waits: Sequence[_Wait], known: Mapping[int, RankState]) -> Explanation:
    words = [f"{_named([*wait.inside])} in {wait.name}" for wait in waits]
    where = listed(words, _NAMED, "; ")
    text = f"the ranks wait for each other in different collectives: {where}; a restart will not help"
    return Explanation(text=text, ranks=tuple(sorted(known)), reason="ProgramError", helps=False)


def _nobody_missing(wait: _Wait, known: Mapping[int, RankState], now_ns: int, limit_s: float) -> Explanation:
    if not wait.spanned:
        text = f"{_with_verb(wait.inside, 'has')} waited in {wait.name}{wait.seconds(now_ns)}"
        return Explanation(text=f"{text}; which other ranks are in its group, is not known", accuses=False)
    rooted = wait.known is not None and wait.known.operation in _ROOTED
    text = (
        f"all ranks known entered {wait.name}, and {_with_verb(wait.inside, 'has')} waited in it"
        f"{wait.seconds(now_ns)}: the network or a device does not deliver it"
    )
    text += ", or the ranks name different roots" if rooted else ""
    active = any(known[rank].is_active(limit_s) for rank in wait.members if rank in known)
    return Explanation(text=text, helps=None if rooted else True, accuses=not active, active=active)


def _missing(
    wait: _Wait, known: Mapping[int, RankState], ranks: Sequence[int], now_ns: int, limit_s: float
) -> Explanation:
    """Somebody never entered; what is known of them tells why."""
    roots = [known[rank] for rank in ranks if rank in known]
    waiting = f"{_with_verb(wait.inside, 'has')} waited in {wait.name}{wait.seconds(now_ns)}"
    finished = [state for state in roots if state.life is Life.FINISHED]
    if finished:
        chosen = tuple(state.rank for state in finished)
        who = f"{_named(chosen)} finished with exit code 0, and {waiting}"
        inside = [known[rank] for rank in wait.inside]
        if any(state.quiet_s is not None and state.quiet_s < limit_s for state in finished):
            text = f"{who}, which may be over by now"  # the others were seen before
            return Explanation(text=text, ranks=chosen, accuses=False, active=True)
        return _uneven(who, chosen, inside, limit_s)
    if not roots:
        text = f"{waiting}; nothing is known of {_named(ranks)} here"
        return Explanation(text=text, ranks=tuple(ranks))
    # Who waits for somebody in an operation that is not recorded, such as recv, is not the cause where others are;
    # nor is who shows progress.
    named = [state for state in roots if state.doing is not Doing.COLLECTIVE] or roots
    named = [state for state in named if not state.is_active(limit_s)] or named
    others = [state for state in roots if state not in named]
    unknown = sorted({*ranks} - {state.rank for state in roots})
    phrases = [*_phrases(named, limit_s), *_phrases(others, limit_s)]
    phrases += [f"nothing is known of {_named(unknown)}"] * bool(unknown)
    text = f"{_who(named)} never entered {wait.name}; {_with_verb(wait.inside, 'has')} waited in it"
    text += f"{wait.seconds(now_ns)}; {listed(phrases, _NAMED, '; ')}"
    chosen, active = tuple(state.rank for state in named), all(state.is_active(limit_s) for state in named)
    if active or all(state.may_take_long for state in named):
        return Explanation(text=text, ranks=chosen, accuses=False, active=active)
    return Explanation(text=text, ranks=chosen, helps=_helps(named))


def _uneven(who: str, chosen: tuple[int, ...], inside: Sequence[RankState], limit_s: float) -> Explanation:
    """Some have finished, and others wait for them; that is proven by one who waits and does nothing else."""
    if any(not state.is_unproven and not state.is_active(limit_s) for state in inside):
        text = f"{who}: the ranks' data is uneven; a restart will not help"
        return Explanation(text=text, ranks=chosen, reason="ProgramError", helps=False)
    active = any(state.is_active(limit_s) for state in inside)
    text = f"{who}; {listed(_phrases(inside, limit_s), _NAMED, '; ')}"
    return Explanation(text=text, ranks=chosen, accuses=not active, active=active)


def _helps(roots: Sequence[RankState]) -> bool | None:
    return True if any(state.life in (Life.STOPPED, Life.DEAD) for state in roots) else None


def _phrases(states: Sequence[RankState], limit_s: float) -> list[str]:
    """Where each rank is, alike ranks together."""
    groups: dict[tuple[str, str], list[int]] = {}
    for state in states:
        verb, rest = _state(state)
        if state.is_active(limit_s):
            verb, rest = (verb, f"{rest}, still making progress") if verb else ("is", "making progress")
        groups.setdefault((verb, rest), []).append(state.rank)
    return [
        f"{_with_verb(ranks, verb)} {rest}".rstrip() if verb else f"where {_with_verb(ranks, 'is')}, is unknown"
        for (verb, rest), ranks in groups.items()
    ]


def _state(state: RankState) -> tuple[str, str]:
    """A verb and the rest of the sentence; none where nothing is known."""
    starting = "still before its first collective" if state.is_starting else ""
    if state.life is Life.STOPPED:
        return "is", "stopped (SIGSTOP)"
    if state.life is Life.DEAD:
        return "died", f"({state.how})" if state.how else ""
    if state.doing is Doing.COLLECTIVE and state.place.startswith("waits "):
        return "waits", state.place.partition(" ")[2]
    what = "" if state.doing is Doing.UNKNOWN else f"in {state.doing.value}"
    first, *rest = [part for part in (starting, what, state.place) if part] or [""]
    return ("is", f"{first}: {', '.join(rest)}" if rest else first) if first else ("", "")


def _who(states: Sequence[RankState]) -> str:
    return str(states[0]) if len(states) == 1 else _named([state.rank for state in states])


def _with_verb(ranks: Iterable[int], verb: str) -> str:
    """`rank 3 waits`, `ranks 0-2,5 wait`."""
    ranks = [*ranks]
    plural = {"is": "are", "has": "have", "waits": "wait"}.get(verb, verb)
    return f"{_named(ranks)} {verb if len(ranks) == 1 else plural}"


def _named(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2,5`."""
    numbers = sorted(ranks)
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {spans(numbers)}"
