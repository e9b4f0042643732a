"""How long all nodes together take to their verdict, and what that costs the coordinator's node."""

from __future__ import annotations

import functools
import multiprocessing
import resource
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection

from benchmarks.measuring import Case, Section, Setup, floats_of
from benchmarks.peers import versions_here
from trainer_launch.membership.protocol import Challenge
from trainer_launch.model import Endpoint
from trainer_launch.model.findings import Finding, Status
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.cluster_preflight import PreflightServer
from trainer_launch.preflight.cluster.present_nodes import ClusterSettings

JOB = "benchmark"
LATEST_S = 120.0
SIZES = (2, 8, 64, 512, 4096)
WHO = "standard"  # the level
SIMULATED = {"to the verdict": "s", "CPU of node 0": "s", "memory of node 0": "MB"}
FACTS = {f"env NCCL_BENCHMARK_{number}": "x" * 40 for number in range(60)}  # about 4 KB, as a real node has


class Node:
    """One simulated node on a socket of its own."""

    def __init__(self, rank: int, port: int) -> None:
        self.rank = rank
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.buffer = bytearray()
        self.verdict: tuple[Finding, ...] = ()

    def read(self) -> None:
        data = self.sock.recv(262144)
        if not data:
            raise ConnectionResetError
        self.buffer += data
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            self.hear(msg.parse(bytes(line)))

    def hear(self, message: msg.Message) -> None:
        match message:
            case Challenge():
                name = f"job-node-0-{self.rank}"
                self.say(msg.Hello(msg.VERSION, JOB, self.rank, name, str(self.rank), listens=29500))
                self.say(msg.Time(time.time()))
            case msg.Complete():
                self.say(msg.NodeReport(FACTS, 0.0, 0.01))
            case msg.Test():
                self.say(msg.Result(message.round, (msg.RailResult("", 10**9),) * message.rails))
            case msg.Decided(findings):
                self.verdict = findings

    def say(self, message: msg.FromNode) -> None:
        self.sock.sendall(msg.render(message))


def hold(n_nodes: int, pipe: Connection) -> None:
    """Node 0's part, in a process of its own as in a pod."""
    home = Endpoint("127.0.0.1", 0)
    settings = ClusterSettings(
        job=JOB,
        min_nodes=n_nodes,
        max_nodes=n_nodes,
        deadline_s=LATEST_S,
        places=(home, *(Endpoint(f"job-node-0-{rank}.job", 0) for rank in range(1, n_nodes))),
        salt="s",
    )
    server = PreflightServer(settings, home)
    pipe.send(server.start())
    pipe.recv()
    cpu_s = time.process_time()
    server.stop()
    pipe.send((cpu_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def serve(selector: selectors.BaseSelector, port: int, wait_s: float) -> set[int]:
    """Let those read who can; the ranks that have their verdict."""
    done = set()
    for key, _ in selector.select(wait_s):
        node: Node = key.data
        try:
            node.read()
        except ConnectionError:  # it was too slow for a crowd, and comes again as a real one does
            selector.unregister(node.sock)
            node.sock.close()
            node.sock, node.buffer = socket.create_connection(("127.0.0.1", port)), bytearray()
            selector.register(node.sock, selectors.EVENT_READ, node)
        if node.verdict:
            done.add(node.rank)
            selector.unregister(node.sock)
            node.sock.close()
    return done


def simulate(n_nodes: int) -> tuple[float, float, float]:
    """All nodes in one loop: seconds to the last verdict, CPU seconds and MB of node 0."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=hold, args=(n_nodes, theirs), daemon=True)
    process.start()
    port = ours.recv()
    selector = selectors.DefaultSelector()
    nodes = []
    began_s = time.monotonic()
    for rank in range(n_nodes):
        node = Node(rank, port)
        nodes.append(node)
        selector.register(node.sock, selectors.EVENT_READ, node)
        if rank % 32 == 0:
            serve(selector, port, 0)
    waiting = set(range(n_nodes))
    while waiting:
        if time.monotonic() > began_s + LATEST_S:
            raise SystemExit(f"no verdict within {LATEST_S:g} s")
        waiting -= serve(selector, port, 1.0)
    ended_s = time.monotonic()
    ours.send("stop")
    cpu_s, megabytes = ours.recv()
    process.join()
    if bad := [found.check for found in nodes[0].verdict if found.status is Status.FAIL]:
        raise SystemExit(f"the verdict was no: {bad}")
    return ended_s - began_s, cpu_s, megabytes


def simulated(n_nodes: int) -> Mapping[str, float]:
    values = floats_of("benchmarks.preflight", str(n_nodes), within_s=LATEST_S)
    return dict(zip(rows(n_nodes), values, strict=True))


def rows(n_nodes: int) -> dict[str, str]:
    """The rows for so many simulated nodes."""
    return {f"{n_nodes:,} nodes: {row}": unit for row, unit in SIMULATED.items()}


def opened() -> Setup:
    """Each number of nodes."""
    return Setup([Case(WHO, rows(n), functools.partial(simulated, n), LATEST_S, 0.6 + n / 1200) for n in SIZES])


SECTION = Section(
    name="preflight",
    title="Cluster preflight",
    about="Simulated nodes on real sockets until the last verdict.",
    shows=("4,096 nodes: to the verdict", "4,096 nodes: memory of node 0"),
    open=opened,
    versions=lambda: versions_here("trainer-launch"),
    whos=(WHO,),
)


if __name__ == "__main__":
    print(*simulate(int(sys.argv[1])))
