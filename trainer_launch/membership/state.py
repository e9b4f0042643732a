"""The coordinator's view of a job, and its answers to questions about it.

The functions of membership.py decide what follows, and change the JobState.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from enum import Enum
from heapq import nsmallest
from itertools import islice
from typing import Any, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.membership import protocol as msg
from trainer_launch.membership import timeouts
from trainer_launch.membership.notes import Judge, MemberView
from trainer_launch.membership.protocol import Claim
from trainer_launch.model import Death
from trainer_launch.model.codec import MAX_LINE_BYTES, encode

Key: TypeAlias = int  # a node's rank
MAX_NAMED = 16  # names in a Waiting


class CoordinatorSettings(Struct, frozen=True, kw_only=True):
    """The kind of the job, and the coordinator's patience with it."""

    job: str
    min_nodes: int
    max_nodes: int
    spares: int = 0  # nodes beyond them, which wait to replace another
    by_arrival: bool = False  # nodes have no ranks of their own; see membership.py
    failing: tuple[str, ...] = ()  # hosts that preflight found faulty
    max_restarts: int  # failures that the job may have
    lease_s: float = timeouts.LEASE_S
    shrink_after_s: float | None = 0.0  # between the end of a generation and forming with fewer; None: never
    rejoin_timeout_s: float = timeouts.REJOIN_S
    store_timeout_s: float = timeouts.STORE_S
    candidate: int | None = None  # the rank of the node whose launcher this is; None: only node 0's is a candidate
    unseen_s: float = timeouts.UNSEEN_S

    @property
    def all_nodes(self) -> int:
        """How many may be there, spares included."""
        return self.max_nodes + self.spares

    @property
    def granted_lease_s(self) -> float:
        """The lease that nodes have. One that is the whole job shares the coordinator's process."""
        return self.lease_s if self.all_nodes > 1 else max(self.lease_s, timeouts.ALONE_LEASE_S)


class NodeRecord(Struct, kw_only=True, eq=False):
    """A node that has called."""

    node_rank: int
    hello: msg.Hello  # its first words
    peer: int | None  # its connection, None: lost
    heard_s: float = 0.0  # when its last line came
    is_away: bool = False  # its connection was reset, and its lease is not over
    joined: bool = False  # waits for a generation; set by State.set_joined
    prepared: bool = True  # could start workers at once
    returning: bool = False  # has been in a generation; if it is alive it will join again
    is_faulty: bool = False  # it is quarantined, and here only because it serves the coordinator
    lost_s: float | None = None  # when its connection ended
    claims: tuple[Claim, ...] = ()  # the generations that it has taken
    kept: int = 0  # workers that have kept their state of the last generation that the node was in
    last_generation: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)  # of its last Join, by topic
    joined_s: float = 0.0  # when that came

    @property
    def key(self) -> Key:
        """The identity that stays the same when its pod comes back."""
        return self.node_rank

    @property
    def name(self) -> str:
        """How messages name it."""
        return f"node {self.node_rank} ({self.hello.host})"

    @property
    def has_lease(self) -> bool:
        """Whether the node is connected, or may be so again in time."""
        return self.peer is not None or self.is_away

    @property
    def place(self) -> tuple[Any, ...]:
        """Its place among the ranks: by label, part by part, so that who is near is next to it; the others last."""
        parts = [re.split(r"(\d+)", part) for part in self.hello.label.split("/")]  # rack-2 comes before rack-10
        natural = [[int(word) if i % 2 else word for i, word in enumerate(part)] for part in parts]
        return not self.hello.label, natural, self.node_rank


class Run(Struct, kw_only=True):
    """A generation: the one that runs or, while nodes gather, the last one; without members: none is known here."""

    number: int = 0
    members: Mapping[Key, int] = field(default_factory=dict)  # their numbers, in their order
    formed_s: float = 0.0
    late_s: float = 0.0  # how long it has waited for its store's node, which still starts
    claim: Claim | None = None  # None: only node 0 is a candidate, or it is too long
    go_s: float | None = None
    store: msg.Store | None = None
    took: set[Key] = field(default_factory=set)
    done: dict[Key, float] = field(default_factory=dict)  # since when


class Suspicion(Struct, kw_only=True):
    """A failure that is not charged yet: the news of a peer's loss may be slower than what it does to workers."""

    key: Key  # whose worker failed
    reason: str
    at_s: float
    failed: msg.Failed
    is_only_victim: bool  # all that is known is who waited for a peer in vain
    finished: set[int]  # ranks that had ended with exit code 0 before
    may_be_asked: bool  # and may have been asked to by a signal
    notes: dict[Key, Mapping[str, Any]]  # of the members that have said how their workers ended
    before: Death | None  # how the attempt before this one failed, if it did so soon after its start


class Loss(Struct, frozen=True):
    """A process of a node that ended without a word."""

    key: Key
    generation: int
    lasted_s: float  # since its workers started


class JobPhase(Enum):
    """Where the job is; see the drawing in membership.py."""

    GATHERING = "gathering"
    FORMED = "formed"
    RUNNING = "running"
    OVER = "over"


class Looked(Struct, frozen=True):
    """Other candidates were looked for."""

    there: frozenset[int]  # who answers as a coordinator
    absent: frozenset[int]  # no such name, or its address refuses: each may be wrong for a while
    took_s: float = 0.0
    ready: bool = True  # who is there takes nodes that train; see election.py


class JobState(Struct, kw_only=True, eq=False):
    """Everything the coordinator knows; times are its own monotonic seconds, None: not set."""

    settings: CoordinatorSettings
    send: Callable[[int, msg.FromServer], None]  # a message over this connection
    disconnect: Callable[[int], None]  # end a connection, after what was sent on it
    log: Callable[[str, int], None]  # tell people, at a level of `logging`
    phase: JobPhase = JobPhase.GATHERING
    nodes: dict[Key, NodeRecord] = field(default_factory=dict)
    n_joined: int = 0  # of them wait for a generation
    peers: dict[int, NodeRecord] = field(default_factory=dict)
    run: Run = field(default_factory=Run)
    hosts: dict[Key, str] = field(default_factory=dict)  # who had each rank last
    refused: dict[Key, str] = field(default_factory=dict)  # why who claims this rank is not of this job
    claims: tuple[Claim, ...] = ()  # the last sure generation that anyone has told, and the unsure ones after it
    formed: set[Claim] = field(default_factory=set)  # here since the last sure one, and never sure
    ended: dict[Key, tuple[Claim, ...]] = field(default_factory=dict)  # what a process that ended here had taken
    unseen: dict[int, float] = field(default_factory=dict)  # ranks that no look has found, and since when
    looked_s: float | None = None  # when the latest look began
    yielding_until_s: float | None = None  # nodes are refused: a lower candidate is there
    generation: int = 0  # the highest that anyone has seen
    restarts: int = 0  # failures, likewise
    unopened: int = 0  # generations in a row whose store was not opened
    losses: tuple[Loss, ...] = ()  # of one node, in a row
    suspicion: Suspicion | None = None
    quarantined: tuple[msg.Quarantine, ...] = ()
    judges: dict[str, Judge] = field(default_factory=dict)  # of notes, by topic
    failure: msg.GiveUp | None = None  # the first failure of the last generation, as it would be told
    early_failure: Death | None = None  # the latest one at the start of a generation
    end: msg.GiveUp | msg.Finished | None = None
    gather_from_s: float | None = None  # when the wait for a generation began
    joined_s: float = 0.0  # the latest join
    form_at_s: float | None = None
    admit_at_s: float | None = None  # newcomers are let in
    lease_check_s: float | None = None  # no lease ends earlier
    say_at_s: float | None = None
    announced: tuple[msg.Waiting, frozenset[int]] | None = None  # the last Waiting, and to whom

    def say(self, text: str, level: int = logging.WARNING) -> None:
        """Tell people; INFO: the job goes its ordinary way; DEBUG: its first node says it, too."""
        self.log(text, level)

    @property
    def joined(self) -> list[NodeRecord]:
        """The nodes that wait for a generation."""
        return [node for node in self.nodes.values() if node.joined]

    def set_joined(self, node: NodeRecord, joined: bool) -> None:
        """Whether a node waits for a generation."""
        self.n_joined += joined - node.joined
        node.joined = joined


def deadline_s(state: JobState) -> float | None:
    """When `tick` is due, None: never."""
    times = [state.lease_check_s, state.say_at_s, state.form_at_s, state.admit_at_s, give_up_at_s(state)]
    times.append(charge_at_s(state))
    times += [judge.due_s for judge in state.judges.values()]
    return min((time for time in times if time is not None), default=None)


def give_up_at_s(state: JobState) -> float | None:
    """When the present phase has lasted too long."""
    if state.phase is JobPhase.FORMED:
        return state.run.formed_s + state.run.late_s + state.settings.store_timeout_s
    if state.phase is JobPhase.GATHERING and state.gather_from_s is not None:
        return state.gather_from_s + state.settings.rejoin_timeout_s
    return None


def charge_at_s(state: JobState) -> float | None:
    """When a suspicion is one no longer: by then every lease that had ended at the failure was noticed."""
    suspicion = state.suspicion
    if suspicion is None:
        return None
    return suspicion.at_s + state.settings.lease_s + (timeouts.PATIENCE_S if suspicion.is_only_victim else 0.0)


def runs(state: JobState) -> bool:
    """Whether a generation is alive."""
    return state.phase in (JobPhase.FORMED, JobPhase.RUNNING)


def is_working(state: JobState, key: Key) -> bool:
    """Whether a node is a member of the generation that runs, and has not finished."""
    return runs(state) and key in state.run.members and key not in state.run.done


def has_finished(state: JobState, key: Key) -> bool:
    """Whether a node is done in the generation that runs."""
    return runs(state) and key in state.run.done


def members_of(state: JobState) -> list[MemberView]:
    """The members of the generation, as judges see them."""
    run, members, first = state.run, [], 0
    for number, key in enumerate(run.members):
        node, done_s = state.nodes[key], run.done.get(key)
        ranks = range(first, first + node.hello.workers)
        first = ranks.stop
        members.append(
            MemberView(
                number=number,
                name=node.name,
                ranks=ranks,
                answers=node.peer is not None and done_s is None,
                done_s=done_s,
                is_own=key == (state.settings.candidate or 0),
            )
        )
    return members


def room(state: JobState) -> int:
    """For how many more nodes the generation that runs has room."""
    return state.settings.max_nodes - len(state.run.members)


def newcomers(state: JobState) -> tuple[NodeRecord, ...]:
    """Nodes that could enter the generation that runs: it does not stop for a node that still imports."""
    waiting = (node for node in state.joined if node.prepared and not node.is_faulty)
    return tuple(node for node in waiting if node.key not in state.run.members)


def waiting(state: JobState) -> msg.Waiting:
    """The message to the nodes that wait."""
    low, high = state.settings.min_nodes, state.settings.max_nodes
    if runs(state):
        return msg.Waiting(len(state.run.members), high, (), running=True)
    present = state.n_joined
    return msg.Waiting(present, low if present < low else high, missing(state))


def missing(state: JobState) -> tuple[str, ...]:
    """The first few that are not there, by name where it is known."""
    high = state.settings.max_nodes
    if state.nodes and (state.settings.min_nodes == high or state.settings.candidate is not None):
        absentees = (
            rank
            for rank in range(state.settings.all_nodes)
            if rank not in state.nodes or not state.nodes[rank].joined
        )
        names = (state.nodes[rank].name if rank in state.nodes else f"node {rank}" for rank in absentees)
        return tuple(islice(names, MAX_NAMED))
    absent = (node for node in state.nodes.values() if not node.joined)
    return tuple(node.name for node in nsmallest(MAX_NAMED, absent, key=lambda node: node.node_rank))


ROWS_BYTES = 40_000  # at most, which leaves room in a line for all else
_HEAD_BYTES = 100  # of a message, with its newline
_ROW_BYTES = 60  # a row without its host
_LOST, _MISSING = "lost", "missing"


def why_stranger(job: str, message: msg.Hello | msg.StatusQuery) -> msg.Refused | None:
    """The answer to who is of another job, or of another version of ours."""
    if message.job != job:
        return msg.RefusedHere(f"this coordinator serves job {job}, not {message.job}", retry=False)
    return other_version(message)


def other_version(message: msg.Hello | msg.StatusQuery) -> msg.Refused | None:
    """The answer to who is of another version of ours."""
    return msg.refused_version("the coordinator", msg.VERSION, message.version)


def status(state: JobState, now_s: float) -> msg.JobStatus:
    """The whole table, or as much of it as fits into a line."""
    nodes = sorted(state.nodes.values(), key=lambda node: node.node_rank)
    rows: list[msg.Row] = []
    for node in nodes:
        word = _state_of(state, node)
        away_s = None if word != _LOST or node.lost_s is None else round(max(0.0, now_s - node.lost_s), 1)
        rows.append((node.node_rank, node.hello.host, word, away_s))
    ranks = range(state.settings.min_nodes + state.settings.spares)  # where nodes have ranks
    rows += [(rank, "", _MISSING, None) for rank in ranks if rank not in state.nodes]
    ended = state.end
    job_status = msg.JobStatus(
        phase=state.phase.value,
        generation=state.generation,
        restarts=state.restarts,
        max_restarts=state.settings.max_restarts,
        min_nodes=state.settings.min_nodes,
        max_nodes=state.settings.max_nodes,
        spares=state.settings.spares,
        quarantined=state.quarantined,
        n_nodes=len(rows),
        nodes=(),
        end=None if ended is None else ended.reason if isinstance(ended, msg.GiveUp) else "all nodes are done",
        notes={topic: judge.status(now_s) for topic, judge in state.judges.items()},
        ready=_is_ready(state),
    )
    return replace(
        job_status, nodes=_fitting(rows, min(ROWS_BYTES, MAX_LINE_BYTES - _HEAD_BYTES - len(encode(job_status))))
    )


def _is_ready(state: JobState) -> bool:
    """Whether nodes that train elsewhere are taken: not while this one still imports, unless it may begin alone."""
    own = state.nodes.get(state.settings.candidate or 0)
    is_prepared = own is not None and own.joined and own.prepared
    is_new = state.phase is JobPhase.GATHERING and not state.run.members
    return is_prepared or not is_new or bool(state.unseen)


def _state_of(state: JobState, node: NodeRecord) -> str:
    is_well = runs(state) or isinstance(state.end, msg.Finished)
    if is_well and node.key in state.run.done:
        return "done"
    if not node.has_lease:
        return _LOST
    if is_working(state, node.key):
        return "running" if state.phase is JobPhase.RUNNING else "starting"
    if node.joined:
        return "spare" if runs(state) and not room(state) else "joined"
    return "connected"


def _fitting(rows: list[msg.Row], room: int) -> tuple[msg.Row, ...]:
    """As many rows as fit, in their order; absent nodes matter most."""
    chosen: set[int] = set()
    for i in sorted(range(len(rows)), key=lambda i: rows[i][2] not in (_LOST, _MISSING)):
        room -= _ROW_BYTES + 2 * len(rows[i][1])  # an escaped character takes two
        if room < 0:
            break
        chosen.add(i)
    return tuple(row for i, row in enumerate(rows) if i in chosen)
