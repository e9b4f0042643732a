"""What the coordinator knows of a job. Values and questions about them; `machine` decides what follows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from enum import Enum
from heapq import nsmallest
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeAlias

from trainer_launch.membership import protocol as msg
from trainer_launch.membership.field_checks import Claim
from trainer_launch.model.frozen import dataclass

Key: TypeAlias = "int | str"  # a node's rank, or its host when it has none
MAX_NAMED = 16  # names in a Waiting
_ALONE_S = 86_400.0  # the lease of a node that is the whole job


def _empty() -> Mapping[Any, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What kind of job it is and how patient the coordinator is with it."""

    job: str
    min_nodes: int
    max_nodes: int
    max_restarts: int  # failures that the job may have, or may have within `window_s`
    window_s: float | None = None
    lease_s: float = 3.0  # a node that says nothing for so long is lost
    gather_s: float = 0.5  # between the latest join and forming with fewer than max
    shrink_after_s: float | None = 0.0  # between the end of a generation and forming with fewer; None: never
    settle_s: float = 35.0  # how long fewer wait for a live node that still stops its workers (torch takes 30)
    rejoin_timeout_s: float = 600.0
    store_timeout_s: float = 60.0  # from Formed to Store
    seat: int | None = None  # the rank of the node whose launcher this is; None: there are no other seats
    window_of_seat_0_s: float = 5.0  # how long a job begins to gather before fewer than max go on
    yield_s: float = 3.0  # how long a seat refuses nodes after it has sent them to a lower one
    crash_loop: int = 5  # generations in a row that fail within `crash_loop_s`
    crash_loop_s: float = 10.0
    start_s: float = 30.0  # from Go; what fails within it fails at its start

    @property
    def told_lease_s(self) -> float:
        """The lease that nodes have. One that is the whole job shares the coordinator's process."""
        return self.lease_s if self.max_nodes > 1 else max(self.lease_s, _ALONE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node that has called."""

    node_rank: int | None
    host: str
    incarnation: str
    peer: int | None  # its connection, None: lost
    joined: bool = False  # waits for a generation
    returning: bool = False  # has been in a generation; if it is alive it will join again
    lost_s: float | None = None  # when its connection ended
    claims: tuple[Claim, ...] = ()  # the generations that it has taken
    workers: int = 0  # 0: it has not said
    role: str = ""

    @property
    def key(self) -> Key:
        """What stays the same when its pod comes back."""
        return self.host if self.node_rank is None else self.node_rank

    @property
    def name(self) -> str:
        """How messages name it."""
        return self.host if self.node_rank is None else f"node {self.node_rank} ({self.host})"

    @property
    def order(self) -> tuple[Any, ...]:
        """Its place among the nodes: by rank, else by host name with numbers counted as numbers."""
        if self.node_rank is not None:
            return (False, self.node_rank)
        natural = tuple(int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", self.host)))
        return (True, natural, self.host)


class Members(tuple[Key, ...]):  # noqa: SLOT001 - a tuple's subclass cannot have slots with values
    """The members of a generation by group rank, with a set: every line asks whether its node is one of them."""

    _keys: frozenset[Key]

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> Members:
        """These nodes, in this order."""
        members = cls(node.key for node in nodes)
        members._keys = frozenset(members)
        return members

    def __contains__(self, key: object) -> bool:
        return key in self._keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A generation: the one that runs or, while nodes gather, the last one."""

    number: int
    members: Members
    formed_s: float
    go_s: float | None = None
    store: msg.Store | None = None
    took: frozenset[Key] = frozenset()
    done: frozenset[Key] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """A failure that is not charged yet: the news of a peer's loss may be slower than what it does to workers."""

    key: Key  # whose worker failed
    reason: str
    at_s: float
    waited: int | None = None  # its rank, if nothing is known but that its connection to a peer was closed
    finished: frozenset[int] = frozenset()  # ranks that had ended with exit code 0 before
    reported: frozenset[Key] = frozenset()  # the other members that have said how their workers ended


class Phase(Enum):
    """Where the job is; see the drawing in machine.py."""

    GATHERING = "gathering"
    FORMED = "formed"
    RUNNING = "running"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything the coordinator knows; times are its own monotonic seconds, None: not set."""

    settings: Settings
    phase: Phase = Phase.GATHERING
    nodes: Mapping[Key, Node] = field(default_factory=_empty)
    n_joined: int = 0  # of them wait for a generation
    peers: Mapping[int, Key] = field(default_factory=_empty)
    heard: Mapping[int, float] = field(default_factory=_empty)  # when each peer said its last line
    run: Run | None = None
    claims: tuple[Claim, ...] = ()  # the generations that were formed here and may still matter
    formed: frozenset[int] = frozenset()  # their numbers, and those of all before them
    ended: Mapping[Key, int] = field(default_factory=_empty)  # whose process has certainly ended, and in which run
    absent: frozenset[int] = frozenset()  # ranks whose launcher is certainly not there
    yielding_until_s: float | None = None  # nodes are refused: a lower seat is there
    generation: int = 0  # the highest that anyone has seen
    restarts: int = 0  # failures, likewise
    failures_s: tuple[float, ...] = ()  # when the ones within the window were
    crashes: int = 0  # generations in a row that failed early
    suspicion: Suspicion | None = None
    failure: msg.GiveUp | None = None  # the first failure of the last generation, as it would be told
    early_failure: msg.Failed | None = None  # the latest one at the start of a generation
    end: msg.GiveUp | msg.Finished | None = None
    gather_from_s: float | None = None  # when the wait for a generation began
    joined_s: float = 0.0  # the latest join
    form_at_s: float | None = None
    admit_at_s: float | None = None  # newcomers are let in
    lease_check_s: float | None = None  # no lease ends earlier
    say_at_s: float | None = None
    said: tuple[msg.Waiting, frozenset[int]] | None = None  # the last Waiting, and to whom


# -- what can happen --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """A peer is there; it has not said anything yet."""

    peer: int


@dataclass(frozen=True, slots=True)
class Said:
    """A peer's line."""

    peer: int
    message: msg.Message


@dataclass(frozen=True, slots=True)
class Gone:
    """A peer's connection has ended."""

    peer: int
    ended: bool = False  # by its own kernel, so that its process has ended


@dataclass(frozen=True, slots=True)
class Looked:
    """Other seats were looked for: which launchers are there, and which certainly are not."""

    there: frozenset[int]
    absent: frozenset[int]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Close:
    """Our side ends the job."""

    reason: str


Event: TypeAlias = Connected | Said | Gone | Looked | Tick | Close


# -- what has to be done ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message."""

    peer: int
    message: msg.FromServer


@dataclass(frozen=True, slots=True)
class Disconnect:
    """End a connection, after what was sent on it; a Gone follows."""

    peer: int


@dataclass(frozen=True, slots=True)
class Say:
    """Tell people."""

    text: str
    warns: bool = True  # False: the job goes its ordinary way


Reply: TypeAlias = Send | Disconnect | Say


# -- questions --------------------------------------------------------------------------------


def deadline_s(state: State) -> float | None:
    """When `step` wants a Tick, None: never."""
    times = [state.lease_check_s, state.say_at_s, state.form_at_s, state.admit_at_s, give_up_at_s(state)]
    times.append(charge_at_s(state))
    return min((time for time in times if time is not None), default=None)


def give_up_at_s(state: State) -> float | None:
    """When the present phase has lasted too long."""
    if state.phase is Phase.FORMED and state.run is not None:
        return state.run.formed_s + state.settings.store_timeout_s
    if state.phase is Phase.GATHERING and state.gather_from_s is not None:
        return state.gather_from_s + state.settings.rejoin_timeout_s
    return None


def charge_at_s(state: State) -> float | None:
    """When a suspicion is one no longer: by then every lease that had ended at the failure was noticed."""
    return None if state.suspicion is None else state.suspicion.at_s + state.settings.lease_s


def runs(state: State) -> bool:
    """Whether a generation is alive."""
    return state.phase in (Phase.FORMED, Phase.RUNNING)


def is_working(state: State, key: Key) -> bool:
    """Whether a node is a member of the generation that runs, and has not finished."""
    return runs(state) and state.run is not None and key in state.run.members and key not in state.run.done


def has_finished(state: State, key: Key) -> bool:
    """Whether a node is done in the generation that runs."""
    return runs(state) and state.run is not None and key in state.run.done


def waiting(state: State) -> msg.Waiting:
    """What those that wait are told."""
    low, high = state.settings.min_nodes, state.settings.max_nodes
    if runs(state) and state.run is not None:
        return msg.Waiting(len(state.run.members), len(state.run.members), ())
    present = state.n_joined
    return msg.Waiting(present, low if present < low else high, missing(state))


def missing(state: State) -> tuple[str, ...]:
    """The first few that are not there, by name where it is known."""
    high = state.settings.max_nodes
    ranked = any(node.node_rank is not None for node in state.nodes.values())
    if ranked and (state.settings.min_nodes == high or state.settings.seat is not None):
        absentees = (rank for rank in range(high) if rank not in state.nodes or not state.nodes[rank].joined)
        names = (state.nodes[rank].name if rank in state.nodes else f"node {rank}" for rank in absentees)
        return tuple(islice(names, MAX_NAMED))
    absent = (node for node in state.nodes.values() if not node.joined)
    return tuple(node.name for node in nsmallest(MAX_NAMED, absent, key=lambda node: node.order))
