"""How fast a coordinator serves many nodes: all join, one is lost, it returns, and the next generation forms.

Run: python benchmarks/coordinator.py [nodes]
"""

from __future__ import annotations

import multiprocessing
import random
import resource
import selectors
import socket
import sys
import time
from multiprocessing.connection import Connection

from trainer_launch.coordinator import protocol as msg
from trainer_launch.coordinator.server import Server
from trainer_launch.coordinator.state import Settings
from trainer_launch.model import Endpoint

JOB = "benchmark"
LATEST_S = 120.0


class Node:
    """One simulated node on a socket of its own; it joins whenever it may."""

    def __init__(self, rank: int, port: int, incarnation: str) -> None:
        self.rank, self.incarnation = rank, incarnation
        self.in_generation = 0
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.buffer = bytearray()

    def read(self) -> None:
        self.buffer += self.sock.recv(262144)
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

    def come(self, rank: int, incarnation: str) -> None:
        self.add(rank, incarnation)
        self.read(0.0)  # nodes answer at once, also while others still connect

    def add(self, rank: int, incarnation: str) -> None:
        self.nodes[rank] = node = Node(rank, self.port, incarnation)
        self.selector.register(node.sock, selectors.EVENT_READ, node)

    def read(self, timeout_s: float) -> None:
        for key, _ in self.selector.select(timeout_s):
            node = key.data
            try:
                node.read()
            except OSError:  # it did not say soon enough who it is: it comes again, as a client does
                self.lose(node.rank)
                self.add(node.rank, node.incarnation)

    def lose(self, rank: int) -> None:
        node = self.nodes.pop(rank)
        self.selector.unregister(node.sock)
        node.sock.close()

    def run_until(self, generation: int) -> None:
        end_s = time.monotonic() + LATEST_S
        while any(node.in_generation < generation for node in self.nodes.values()):
            if time.monotonic() > end_s:
                raise SystemExit(f"generation {generation} did not start within {LATEST_S:g} s")
            self.read(1.0)


def host(n_nodes: int, pipe: Connection) -> None:
    """The coordinator, in a process of its own as in a pod."""
    settings = Settings(job=JOB, min_nodes=n_nodes, max_nodes=n_nodes, max_restarts=0, lease_s=60.0)
    server = Server(settings, Endpoint("127.0.0.1", 0), log=lambda text: None)
    pipe.send(server.start())
    pipe.recv()
    cpu_s = time.process_time()
    server.stop()
    pipe.send((cpu_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def main() -> None:
    n_nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=host, args=(n_nodes, theirs))
    process.start()
    crowd = Crowd(ours.recv())
    started_s = time.monotonic()
    for rank in range(n_nodes):
        crowd.come(rank, f"{rank}-a")
    crowd.run_until(1)
    joined_s = time.monotonic()
    lost = random.randrange(n_nodes)
    crowd.lose(lost)
    crowd.come(lost, f"{lost}-b")
    crowd.run_until(2)
    ended_s = time.monotonic()
    ours.send("stop")
    for node in crowd.nodes.values():
        node.sock.close()
    cpu_s, megabytes = ours.recv()
    process.join()
    print(
        f"{n_nodes} nodes: join {joined_s - started_s:.2f} s, lose one and form again {ended_s - joined_s:.2f} s,",
        end=" ",
    )
    print(f"together {ended_s - started_s:.2f} s; coordinator {cpu_s:.2f} s of CPU, {megabytes:.0f} MB")


if __name__ == "__main__":
    main()
