"""How long the roll call, the facts and the verdict take for many nodes, and what they cost the node that holds it.

Run: python benchmarks/preflight.py [nodes ...]     simulated nodes on real sockets, the pair tests answered at once
     python benchmarks/preflight.py real [nodes]    real `trainer-launch preflight` processes, all levels
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection

from trainer_launch.coordinator.protocol import Challenge
from trainer_launch.manifest.flags import own_environment
from trainer_launch.manifest.loopback import address_of
from trainer_launch.model import Endpoint
from trainer_launch.rollcall import protocol as msg
from trainer_launch.rollcall import ways
from trainer_launch.rollcall.names import Names
from trainer_launch.rollcall.server import Server
from trainer_launch.rollcall.state import Settings

JOB = "benchmark"
LATEST_S = 120.0
FACTS = {ways.FACT: "gloo"} | {
    f"env NCCL_BENCHMARK_{number}": "x" * 40 for number in range(60)
}  # about 4 KB, as a real node has


class Node:
    """One simulated node on a socket of its own."""

    def __init__(self, rank: int, port: int) -> None:
        self.rank = rank
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.buffer = bytearray()
        self.verdict = ""

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
                self.say(msg.Present(msg.VERSION, JOB, self.rank, name, str(self.rank), 29500))
                self.say(msg.Time(time.time()))
            case msg.Complete():
                self.say(msg.Record(FACTS, 0.0, 0.01, "[]"))
            case msg.Test():
                self.say(msg.Result(message.round, (msg.Seen("", 10**9),) * message.rails))
            case msg.Decided(findings):
                self.verdict = findings

    def say(self, message: msg.FromNode) -> None:
        self.sock.sendall(msg.render(message))


def hold(n_nodes: int, is_deep: bool, pipe: Connection) -> None:
    """Node 0's part, in a process of its own as in a pod."""
    home = Endpoint("127.0.0.1", 0)
    names = Names(home=home, pattern="job-node-0-#.job")
    settings = Settings(
        job=JOB,
        min_nodes=n_nodes,
        max_nodes=n_nodes,
        deadline_s=LATEST_S,
        names=names,
        salt="s",
        is_deep=is_deep,
    )
    server = Server(settings, home)
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


def simulate(n_nodes: int, *, is_deep: bool) -> None:
    """All nodes in one loop."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=hold, args=(n_nodes, is_deep, theirs), daemon=True)
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
    there_s = time.monotonic()
    waiting = set(range(n_nodes))
    while waiting:
        if time.monotonic() > began_s + LATEST_S:
            raise SystemExit(f"no verdict within {LATEST_S:g} s")
        waiting -= serve(selector, port, 1.0)
    ended_s = time.monotonic()
    ours.send("stop")
    cpu_s, megabytes = ours.recv()
    process.join()
    level = "deep" if is_deep else "standard"
    found = [(one["check"], one["status"]) for one in json.loads(nodes[0].verdict)]
    print(
        f"{n_nodes} nodes, {level}: all connected {there_s - began_s:.2f} s, verdict after "
        f"{ended_s - there_s:.2f} s more, together {ended_s - began_s:.2f} s; "
        f"node 0 {cpu_s:.2f} s of CPU, {megabytes:.0f} MB; {found}"
    )


def rehearse(n_nodes: int, level: str, *more: str) -> None:
    """Real processes, all started at once."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        started = []
        for number in range(n_nodes):
            report = os.path.join(folder, f"{number}.json")
            argv = (
                sys.executable,
                "-m",
                "trainer_launch",
                "preflight",
                "--level",
                level,
                "--skip",
                "own-name,gloo-socket-ifname,cpu",
                *more,
            )
            env = {
                **own_environment(os.environ),
                "PET_NNODES": str(n_nodes),
                "PET_NPROC_PER_NODE": "1",
                "PET_NODE_RANK": str(number),
                "PET_MASTER_ADDR": address_of(0),
                "PET_MASTER_PORT": str(port),
                "JOB_COMPLETION_INDEX": str(number),
                "HOSTNAME": f"local-node-0-{number}",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            started.append(subprocess.Popen((*argv, "--report", report), env=env, stdout=subprocess.DEVNULL))
        codes = [process.wait() for process in started]
        ended_s = time.monotonic()
        took_s = []
        for number in range(n_nodes):
            with open(os.path.join(folder, f"{number}.json"), encoding="utf-8") as file:
                took_s.append(json.load(file)["took_s"])
    print(
        f"{n_nodes} processes, {' '.join((level, *more))}: "
        f"{ended_s - began_s:.2f} s from the first start to the last end, "
        f"the last one to come took {min(took_s):.2f} s; exit codes {sorted(set(codes))}"
    )


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["real"]:
        n_nodes = int(words[1]) if len(words) > 1 else 8
        for level in (("container",), ("quick",), ("standard",), ("standard", "--pair-test", "gloo"), ("deep",)):
            rehearse(n_nodes, *level)
        return
    for n_nodes in map(int, words or ["64", "512", "4096"]):
        for is_deep in (False, True):
            simulate(n_nodes, is_deep=is_deep)


if __name__ == "__main__":
    main()
