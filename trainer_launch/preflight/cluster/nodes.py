"""The nodes of a cluster preflight: their names, how far each has come, and what is said and known of them."""

from __future__ import annotations

import errno
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from queue import Empty, Queue
from typing import TYPE_CHECKING, TypeAlias

from trainer_launch.membership.protocol import Challenge
from trainer_launch.model import Endpoint, Job, Topology
from trainer_launch.model.findings import Finding
from trainer_launch.model.json_lines import MAX_LINE_BYTES, MessageError
from trainer_launch.preflight.cluster import protocol as msg
from trainer_launch.preflight.measurements import Checksum, Measure
from trainer_launch.preflight.thresholds import Shares, Table, Thresholds

if TYPE_CHECKING:
    from trainer_launch.preflight.check import Check
    from trainer_launch.preflight.cluster.pair_results import Rounds
    from trainer_launch.preflight.cluster.shared_storage import Sharing

_FIRST = re.compile(r"(?P<stem>[^.]*-)0")  # the first of some hosts with an index each


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Host names by node rank; `pattern` has # for an index."""

    home: Endpoint  # node 0's
    members: tuple[str, ...] = ()
    pattern: str | None = None
    offset: int = 0  # from a node's rank to the index in its name

    def place(self, rank: int) -> Endpoint | None:
        """Where a node should be found, None when nothing tells."""
        if rank == 0:
            return self.home
        if rank < len(self.members):
            return Endpoint(self.members[rank], self.home.port)
        if self.pattern is None:
            return None
        return Endpoint(self.pattern.replace("#", str(rank + self.offset)), self.home.port)


def names_of(job: Job, topology: Topology, home: Endpoint, hostname: str) -> Names:
    """From the contract's members, else from node 0's name and this one's, when they differ in an index alone."""
    members = tuple(member.host for member in job.members or ())
    if members:
        return Names(home=home, members=members)
    label, dot, domain = home.host.partition(".")
    first = _FIRST.fullmatch(label)
    own_rank = topology.node_rank
    if first is None or own_rank is None:
        return Names(home=home)
    stem, offset = first["stem"], 0
    if stem.endswith("-master-"):  # PyTorchJob calls its other nodes worker-0, worker-1 ...
        stem, offset = f"{stem.removesuffix('-master-')}-worker-", -1
    names = Names(home=home, pattern=f"{stem}#{dot}{domain}", offset=offset)
    own = names.place(own_rank)
    fits = own is not None and own.host.partition(".")[0] == hostname.partition(".")[0]
    return names if fits else Names(home=home)


# -- at which stage a node is stuck that should be there and is not ----------------------------


if TYPE_CHECKING:
    from trainer_launch.preflight.check import Check
    from trainer_launch.preflight.cluster.pair_results import Rounds
    from trainer_launch.preflight.cluster.shared_storage import Sharing

_THREADS = 64


class Stage(str, Enum):
    """How far a node has come, in the order of a pod's life."""

    UNNAMED = "unnamed"
    NO_RECORD = "no DNS record"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    SILENT = "silent"
    RUNS = "cut off"


@dataclass(frozen=True, slots=True)
class Stuck:
    """A stage, and what was seen in words."""

    stage: Stage
    text: str


MEANING: Mapping[Stage, str] = {
    Stage.UNNAMED: "its host name is unknown",
    Stage.NO_RECORD: "its pod is not created, not scheduled, or its Service does not publish addresses of pods "
    "that are not ready (publishNotReadyAddresses)",
    Stage.UNREACHABLE: "there is no route to its network",
    Stage.REFUSED: "its pod has an address, but its preflight is not running: the image is being pulled, an "
    "earlier init container runs, or it has ended",
    Stage.TIMEOUT: "packets to it are lost: a network policy, a firewall, or the machine is gone",
    Stage.SILENT: "its process is stopped or stuck: it accepts connections but does not answer",
    Stage.RUNS: "its preflight runs, but could not reach node 0",
}
_ADVICE: Mapping[Stage, str] = {
    Stage.UNNAMED: "check which pods of the job are not running",
    Stage.NO_RECORD: "check whether its pod is scheduled (kubectl describe pod), and the job's headless Service",
    Stage.UNREACHABLE: "see the routes and the CNI of both machines",
    Stage.REFUSED: "check the events and the init containers of its pod",
    Stage.TIMEOUT: "see network policies, both ways, for the port of node 0",
    Stage.SILENT: "see what its process waits for; the machine may need a reboot",
    Stage.RUNS: "see its own log, and network policies, both ways, for the port of node 0",
}


def advice(stage: Stage) -> str:
    """What to do about it."""
    return _ADVICE[stage]


def look(place: Endpoint | None, limit_s: float) -> Stuck:
    """Look a node up, connect, listen. May hang in the resolver for longer: call it in a thread."""
    if place is None:
        return _stuck(Stage.UNNAMED, "")
    until_s = time.monotonic() + limit_s
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        return _stuck(Stage.NO_RECORD, f"{place.host}: {getattr(problem, 'strerror', None) or problem}")
    worst = _stuck(Stage.NO_RECORD, place.host)
    for family, _, _, _, address in found[:4]:
        at = str(Endpoint(str(address[0]), int(address[1])))
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.settimeout(max(0.05, until_s - time.monotonic()))
                sock.connect(address)
                return _hear(sock, at, until_s)
        except TimeoutError:
            worst = _stuck(Stage.TIMEOUT, at)
        except OSError as problem:
            stage = Stage.REFUSED if problem.errno == errno.ECONNREFUSED else Stage.UNREACHABLE
            worst = _stuck(stage, f"{at}: {problem.strerror}")
    return worst


def _hear(sock: socket.socket, at: str, until_s: float) -> Stuck:
    """Whether somebody to whom there is a connection says anything."""
    data = b""
    while b"\n" not in data:
        sock.settimeout(max(0.05, until_s - time.monotonic()))
        try:
            more = sock.recv(4096)
        except OSError:
            return _stuck(Stage.SILENT, f"{at} accepts connections")
        if not more or len(data) > MAX_LINE_BYTES or time.monotonic() > until_s:
            return _stuck(Stage.SILENT, f"{at} accepts connections, and ends them")
        data += more
    try:
        said = msg.parse(data.partition(b"\n")[0])
    except MessageError:
        return _stuck(Stage.SILENT, f"what listens at {at} is no preflight")
    if isinstance(said, msg.Here):
        return _stuck(Stage.RUNS, f"it says: {printable(said.stage)}")
    return _stuck(Stage.RUNS, f"{at} is a coordinator" if isinstance(said, Challenge) else at)


def _stuck(stage: Stage, seen: str) -> Stuck:
    return Stuck(stage, f"{stage.value}{f' ({seen})' if seen else ''}: {MEANING[stage]}")


def look_at_all(
    places: Sequence[Endpoint | None], limit_s: float, by: Callable[[Endpoint | None, float], Stuck] = look
) -> list[Stuck]:
    """Many at once; who keeps even the resolver waiting has no DNS record that could be had in time."""
    found: Queue[tuple[int, Stuck]] = Queue()
    until_s = time.monotonic() + limit_s

    def work(start: int) -> None:
        for number in range(start, len(places), _THREADS):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            rounds = 1 + (len(places) - 1 - number) // _THREADS
            found.put((number, by(places[number], left_s / rounds)))

    for start in range(min(_THREADS, len(places))):
        threading.Thread(target=work, args=(start,), daemon=True, name="look").start()
    late = _stuck(Stage.NO_RECORD, "the resolver did not answer in time")
    answers: list[Stuck] = [_stuck(Stage.UNNAMED, "") if place is None else late for place in places]
    for _ in places:
        try:
            number, stuck = found.get(timeout=max(0.0, until_s + 0.3 - time.monotonic()))
        except Empty:
            break
        answers[number] = stuck
    return answers


def printable(text: str) -> str:
    """As a part of one line."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:300])


# -- what the cluster preflight is told --------------------------------------------------------


TOLD = "check "  # how a fact begins that is a check's own, and not compared
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All nodes, for the checks that look at all of them: what each has told, seen and measured."""

    settings: Settings
    nodes: Sequence[Node]  # that have told what they are, in the order of their ranks
    n_present: int
    collisions: Mapping[Key, Collection[str]] = field(default_factory=dict)  # hosts that want one rank
    sharing: Sharing
    rounds: Rounds | None = None  # of pair tests, if there were any

    @property
    def names(self) -> list[str]:
        """As people know them."""
        return [node.name for node in self.nodes]

    def told(self, check: Check[Cluster]) -> dict[str, str]:
        """What each node's `tell` has said for a check, by the node's name."""
        key = f"{TOLD}{check.id}"
        return {node.name: node.facts[key] for node in self.nodes if key in node.facts}


def label(key: Key, host: str | None) -> str:
    """A node for people."""
    if isinstance(key, str):
        return key
    return f"node {key} ({host})" if host else f"node {key}"
