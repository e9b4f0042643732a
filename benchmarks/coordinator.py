"""How fast one coordinator serves many simulated nodes, and how it stands a minute in which nodes are lost."""

from __future__ import annotations

import functools
import multiprocessing
import random
import resource
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection

from benchmarks.measuring import Case, Section, Setup, floats_of
from benchmarks.peers import versions_here
from trainer_launch.membership import protocol as msg
from trainer_launch.membership.server import Coordinator
from trainer_launch.membership.state import CoordinatorSettings
from trainer_launch.model import Endpoint

JOB = "benchmark"
LATEST_S = 120.0
SIZES = (1000, 4096)
LOSSES = 60  # one a second
SHARE = 0.01  # of the nodes, in each loss
ROWS = {
    "join": "s",
    "lose one and form again": "s",
    "join, lose one and form again": "s",
    "CPU of the coordinator until then": "s",
    "CPU of the simulated nodes until then": "s",
    "1 % lost every second: form again, median": "s",
    "1 % lost every second: form again, longest": "s",
    "1 % lost every second: generations formed": "",
    "1 % lost every second: CPU of the coordinator": "%",
    "connections refused, reset or dropped": "",
    "memory of the coordinator": "MB",
}


class Node:
    """One simulated node on a socket of its own; it joins whenever it may."""

    def __init__(self, rank: int, port: int, incarnation: str) -> None:
        self.rank, self.incarnation = rank, incarnation
        self.in_generation = 0
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.buffer = bytearray()

    def read(self) -> None:
        data = self.sock.recv(262144)
        if not data:
            raise ConnectionResetError
        self.buffer += data
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            self.hear(msg.parse(bytes(line)))

    def hear(self, message: msg.Message) -> None:
        if isinstance(message, msg.Challenge):
            self.say(msg.Hello(msg.VERSION, JOB, self.rank, f"job-node-0-{self.rank}.job", self.incarnation))
            self.say(msg.Join(self.incarnation))
        elif isinstance(message, msg.Restart):
            self.say(msg.Join(self.incarnation, message.generation))
        elif isinstance(message, msg.Formed) and message.is_store_host:
            self.say(msg.Store(message.generation, "10.0.0.1", 4000))
        elif isinstance(message, msg.Go):
            self.in_generation = message.generation

    def say(self, message: msg.FromNode) -> None:
        self.sock.sendall(msg.render(message))


class Crowd:
    """All nodes in one loop."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.selector = selectors.DefaultSelector()
        self.nodes: dict[int, Node] = {}
        self.refused = 0
        self.lost_s: float | None = None  # when the generation was broken that is not whole again
        self.took_s: list[float] = []

    def come(self, rank: int) -> None:
        """A new process as this node."""
        while True:
            try:
                self.nodes[rank] = node = Node(rank, self.port, f"{rank}-{time.monotonic_ns()}")
                break
            except OSError:
                self.refused += 1
        self.selector.register(node.sock, selectors.EVENT_READ, node)

    def come_all(self, ranks: Iterable[int]) -> None:
        """New processes as these nodes; all answer at once, also while others still connect."""
        for rank in ranks:
            self.come(rank)
            self.read(0.0)

    def read(self, timeout_s: float) -> None:
        for key, _ in self.selector.select(timeout_s):
            node: Node = key.data
            if self.nodes.get(node.rank) is not node:  # lost since
                continue
            try:
                node.read()
            except OSError:  # it did not say soon enough who it is: it comes again, as a client does
                self.refused += 1
                self.leave(node.rank)
                self.come(node.rank)

    def leave(self, rank: int) -> None:
        node = self.nodes.pop(rank)
        self.selector.unregister(node.sock)
        node.sock.close()

    def lose(self, ranks: list[int]) -> None:
        """Lose these nodes at once; each comes back as a new process."""
        self.lost_s = self.lost_s or time.monotonic()
        for rank in ranks:
            self.leave(rank)
        self.come_all(ranks)

    def is_whole(self) -> bool:
        """Whether all are in one generation."""
        generation = next(iter(self.nodes.values())).in_generation
        return generation > 0 and all(node.in_generation == generation for node in self.nodes.values())

    def serve(self, until_s: float, *, only_until_whole: bool) -> None:
        """Serve the nodes until then, and note how long they took until all had formed again."""
        while (left_s := until_s - time.monotonic()) > 0:
            self.read(left_s)
            if self.lost_s is not None and self.is_whole():
                self.took_s.append(time.monotonic() - self.lost_s)
                self.lost_s = None
                if only_until_whole:
                    return

    def form(self) -> float:
        """Serve the nodes until all have formed; the seconds since the first was missing."""
        self.serve(time.monotonic() + LATEST_S, only_until_whole=True)
        if self.lost_s is not None:
            raise SystemExit(f"no generation within {LATEST_S:g} s")
        return self.took_s[-1]


def host(n_nodes: int, pipe: Connection) -> None:
    """The coordinator, in a process of its own as in a pod; tells its CPU whenever it is asked."""
    settings = CoordinatorSettings(job=JOB, min_nodes=n_nodes, max_nodes=n_nodes, max_restarts=0, lease_s=600.0)
    server = Coordinator(settings, Endpoint("127.0.0.1", 0), log=lambda text, level: None)
    pipe.send(server.start())
    while pipe.recv() != "stop":
        pipe.send((time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
    server.stop()


def simulate(n_nodes: int, losses: int) -> tuple[float, ...]:
    """The values of ROWS."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=host, args=(n_nodes, theirs), daemon=True)
    process.start()
    crowd, dropped = Crowd(ours.recv()), overflows()

    def used() -> tuple[float, float]:
        ours.send("used")
        found: tuple[float, float] = ours.recv()
        return found

    own_s = time.process_time()
    crowd.lost_s = time.monotonic()  # all are missing
    crowd.come_all(range(n_nodes))
    join_s = crowd.form()
    crowd.lose([random.randrange(n_nodes)])
    again_s = crowd.form()
    own_s, (cpu_s, _) = time.process_time() - own_s, used()
    crowd.took_s.clear()
    began_s = time.monotonic()
    for i in range(losses):
        crowd.lose(random.sample(range(n_nodes), max(1, round(SHARE * n_nodes))))
        crowd.serve(began_s + i + 1, only_until_whole=False)
    generations = len(crowd.took_s)
    share = 100 * (used()[0] - cpu_s) / (time.monotonic() - began_s)
    if crowd.lost_s is not None:
        crowd.form()
    megabytes = used()[1]
    ours.send("stop")
    process.join()
    return (
        *(join_s, again_s, join_s + again_s, cpu_s, own_s),
        *(statistics.median(crowd.took_s), max(crowd.took_s), generations, share),
        *(crowd.refused + overflows() - dropped, megabytes),
    )


def simulated(n_nodes: int, losses: int = LOSSES) -> Mapping[str, float]:
    values = floats_of("benchmarks.coordinator", str(n_nodes), str(losses), within_s=2 * LATEST_S)
    return dict(zip(ROWS, values, strict=True))


def overflows() -> int:
    """How often the kernel has dropped a connection because a queue was full."""
    with open("/proc/net/netstat", encoding="ascii") as lines:
        names, values = (line.split() for line in list(lines)[:2])
    return int(dict(zip(names, values, strict=True))["ListenOverflows"])


def opened() -> Setup:
    """Each number of nodes."""
    return Setup(
        [Case(name_of(n), ROWS, functools.partial(simulated, n), 2 * LATEST_S, LOSSES + 6.0) for n in SIZES]
    )


def name_of(n_nodes: int) -> str:
    """The column of so many nodes."""
    return f"{n_nodes:,} nodes"


SECTION = Section(
    name="coordinator",
    title="Scale",
    about=(
        "One coordinator and simulated nodes on real sockets of one machine. In the third row "
        f"{SHARE:.0%} of the nodes are lost together every second for {LOSSES} s."
    ),
    pictured=("join", "lose one and form again"),
    shows=(
        "join",
        "lose one and form again",
        "1 % lost every second: form again, longest",
        "memory of the coordinator",
    ),
    open=opened,
    versions=lambda: versions_here("trainer-launch", "Python"),
    whos=tuple(map(name_of, SIZES)),
)


if __name__ == "__main__":
    print(*simulate(int(sys.argv[1]), int(sys.argv[2])))
