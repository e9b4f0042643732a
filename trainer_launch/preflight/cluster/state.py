"""What the cluster preflight is told, what it wants done, and what it knows of a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from trainer_launch.model import Endpoint
from trainer_launch.model.findings import Finding
from trainer_launch.preflight.cluster import protocol as msg
from trainer_launch.preflight.cluster.node_names import Names
from trainer_launch.preflight.cluster.node_stages import Stuck
from trainer_launch.preflight.cluster.pair_results import Thresholds
from trainer_launch.preflight.gpu_judgement import Shares
from trainer_launch.preflight.measurements import Checksum, Measure
from trainer_launch.preflight.reference_values import Table

LEASE_S = 6.0  # a node that says nothing for so long is lost

Key: TypeAlias = "int | str"  # a node's rank, or its host name where nothing tells ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Who should come, and what is to be done when they are there."""

    job: str
    min_nodes: int
    max_nodes: int
    deadline_s: float  # from the start, for all to come
    names: Names
    salt: str
    with_facts: bool = True
    with_pairs: bool = True
    is_deep: bool = False
    with_full: bool = True  # all nodes together, where it is deep
    pair_test: str = "auto"  # or a way
    thresholds: Thresholds = field(default_factory=Thresholds)
    shares: Shares = field(default_factory=Shares)
    table: Table = field(default_factory=Table)  # what GPUs should deliver
    storage: Mapping[str, bool] = field(default_factory=dict)  # folders, and whether each has to be shared
    gather_s: float = 2.0  # after the last that came, in a job that may have more nodes than it needs
    look_s: float = 3.0  # before the deadline: the others are looked at
    record_s: float = 60.0  # for the records of all nodes
    test_s: float = 5.0  # for a pair test


# -- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Said:
    """A message, from a connection with a number."""

    peer: int
    address: str
    message: msg.Message


@dataclass(frozen=True, slots=True)
class Gone:
    """A connection has ended."""

    peer: int


@dataclass(frozen=True, slots=True)
class Looked:
    """How far those have come whom a Look named, in its order."""

    found: Sequence[Stuck]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = Said | Gone | Looked | Tick


# -- replies ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Say that."""

    peer: int
    message: msg.FromServer


@dataclass(frozen=True, slots=True)
class Drop:
    """End the connection when all is said."""

    peer: int


@dataclass(frozen=True, slots=True)
class Look:
    """Find out how far these nodes have come; the answer is a Looked."""

    places: tuple[Endpoint | None, ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Over:
    """All is said."""


Reply: TypeAlias = Send | Drop | Look | Over


# -- nodes ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Node:
    """One that has come."""

    key: Key
    host: str
    incarnation: str
    address: str  # as its connection has it
    port: int
    peer: int | None
    heard_s: float
    lost: str = ""  # how, while it is not connected
    lost_s: float = 0.0
    facts: dict[str, str] = field(default_factory=dict)
    offset: tuple[float, float] = (0.0, 0.0)
    findings: tuple[Finding, ...] = ()
    measures: tuple[Measure, ...] = ()
    checksums: tuple[Checksum, ...] = ()
    has_record: bool = False

    @property
    def name(self) -> str:
        """As people know it."""
        return label(self.key, self.host)


def label(key: Key, host: str | None) -> str:
    """A node for people."""
    if isinstance(key, str):
        return key
    return f"node {key} ({host})" if host else f"node {key}"
