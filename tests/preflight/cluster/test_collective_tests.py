"""Tests with gloo in real processes: numbers compared, rails apart, nobody waited for longer than allowed."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.pair_tests import CHILD, Collectives, Listener

# As where it is started by path: what lies beside it can be imported, and it takes that back.
sys.path.insert(0, str(CHILD.parent))
from trainer_launch.preflight.children.collective_bench import _opened

pytestmark = [pytest.mark.process, pytest.mark.torch, pytest.mark.timeout(400)]

ENV = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
LIMIT_S = 120.0  # a loaded machine may take long


def test_a_store_takes_a_port_of_those_allowed_whoever_has_some_of_them() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        order = {"ports": [port, port + 9]}
        stores = [_opened(order, timedelta(seconds=10)) for _ in range(5)]
    assert len({store.port for store in stores}) == 5
    assert all(port < store.port < port + 10 for store in stores)
    assert _opened({"ports": None}, timedelta(seconds=10)).port > 0


class Node:
    """One node's child and listener."""

    def __init__(self, **env: str) -> None:
        self.listener = Listener(None)
        self.collectives = Collectives((sys.executable,), {**ENV, **env})

    def close(self) -> None:
        self.collectives.close()
        self.listener.close()

    @property
    def child(self) -> psutil.Process:
        running = self.collectives._child
        assert running is not None
        return psutil.Process(running._process.pid)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    """Four of them; torch is imported once in each, for all tests here."""
    made = [Node() for _ in range(4)]
    try:
        yield made
    finally:
        for node in made:
            node.close()


def held(tests: Mapping[int, tuple[Node, msg.Test]]) -> dict[int, tuple[msg.RailResult, ...]]:
    """All parts at the same time."""
    seen: dict[int, tuple[msg.RailResult, ...]] = {}
    threads = [
        threading.Thread(
            target=lambda n=n, node=node, test=test: seen.update({n: node.collectives.run(test, node.listener)})
        )
        for n, (node, test) in tests.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S + 60)
    return seen


def order(
    members: Sequence[Node], number: int, *, rails: int = 1, limit_s: float = LIMIT_S
) -> list[tuple[Node, msg.Test]]:
    """The parts of these two in a test."""
    port = members[0].listener.port
    about = ("127.0.0.1", port, f"s-{number}-{port}", limit_s, "gloo", rails)
    return [(node, msg.Test(number, rank, *about)) for rank, node in enumerate(members)]


def whys(seen: Mapping[int, tuple[msg.RailResult, ...]]) -> list[list[str]]:
    return [[one.why for one in seen[number]] for number in sorted(seen)]


def test_four_processes_test_two_pairs_at_once_and_then_two_others_with_the_same_children(
    nodes: list[Node],
) -> None:
    assert all(node.collectives.ability().startswith(("nccl on ", "only plain sockets: ")) for node in nodes)
    pids = [node.child.pid for node in nodes]
    for number, (first, second) in enumerate((((0, 1), (2, 3)), ((1, 2), (0, 3)))):
        parts = [*order([nodes[n] for n in first], number), *order([nodes[n] for n in second], number)]
        seen = held(dict(enumerate(parts)))
        assert whys(seen) == [[""]] * 4
        assert all(one.rate > 1_000_000 for its in seen.values() for one in its)
    assert [node.child.pid for node in nodes] == pids


def test_rails_have_a_communicator_each_at_the_same_time(nodes: list[Node]) -> None:
    seen = held(dict(enumerate(order(nodes[:2], 10, rails=3))))
    assert whys(seen) == [["", "", ""]] * 2


def test_who_waits_alone_and_who_dials_nobody_say_so_in_time_and_serve_on(nodes: list[Node]) -> None:
    (alone, _) = order(nodes[:2], 30, limit_s=3.0)
    began_s = time.monotonic()
    seen = held({0: alone})
    assert time.monotonic() - began_s < 30
    assert whys(seen) == [["the other end did not connect in time"]]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = msg.Test(31, 1, "127.0.0.1", probe.getsockname()[1], "t", 3.0, "gloo", 2)
        seen = held({0: (nodes[1], nobody)})
    assert all("Connection refused" in why for why in whys(seen)[0])
    assert whys(held(dict(enumerate(order(nodes[:2], 32))))) == [[""]] * 2


def test_a_partner_that_stops_midway_is_a_failure_of_this_test_and_not_of_the_next(nodes: list[Node]) -> None:
    (first, second) = order(nodes[:2], 40, limit_s=8.0)
    stopped = threading.Event()

    def stop() -> None:
        """The process of its rail, as soon as there is one: its driver hangs."""
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s and not stopped.is_set():
            for process in nodes[1].child.children():
                process.send_signal(signal.SIGSTOP)
                stopped.set()

    watcher = threading.Thread(target=stop)
    watcher.start()
    seen = held({0: first, 1: second})
    watcher.join()
    assert stopped.is_set()
    assert all(why for (why,) in whys(seen))
    assert whys(seen)[1] == ["its test hung and was killed, or died"]
    assert not nodes[1].child.children()
    assert whys(held(dict(enumerate(order(nodes[:2], 41))))) == [[""]] * 2


def test_a_probe_and_a_word_of_an_earlier_test_disturb_nobody(nodes: list[Node]) -> None:
    parts = order(nodes[:2], 50)
    silent = socket.create_connection(("127.0.0.1", nodes[0].listener.port))
    late = socket.create_connection(("127.0.0.1", nodes[0].listener.port))
    late.sendall(b"s-49-0-1\n")
    seen = held(dict(enumerate(parts)))
    silent.close()
    late.close()
    assert whys(seen) == [[""]] * 2


def test_a_child_that_is_killed_is_replaced() -> None:
    node, other = Node(), Node()
    try:
        assert node.collectives.ability()
        node.child.kill()
        assert all(why for (why,) in whys(held(dict(enumerate(order([node, other], 60, limit_s=5.0))))))
        assert whys(held(dict(enumerate(order([node, other], 61))))) == [[""]] * 2
    finally:
        node.close()
        other.close()


def test_a_number_that_comes_out_wrong_on_one_node_is_told_by_that_node(nodes: list[Node], tmp_path: Path) -> None:
    """Its torch is sabotaged: of each sum a bit is flipped."""
    flips = "import torch.distributed as dist\nreduce = dist.all_reduce\n"
    flips += "def flipped(numbers, *more, **options):\n    reduce(numbers, *more, **options)\n"
    flips += "    numbers[7] ^= 4 if len(numbers) > 2 else 0\ndist.all_reduce = flipped\n"
    (tmp_path / "sitecustomize.py").write_text(flips)
    node = Node(PYTHONPATH=str(tmp_path))
    try:
        seen = held(dict(enumerate(order([nodes[0], node], 70))))
    finally:
        node.close()
    assert whys(seen)[1] == ["the data arrives damaged"]


def test_a_python_without_torch_can_only_do_plain_sockets(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    made = Collectives((sys.executable,), {**ENV, "PYTHONPATH": str(tmp_path)})
    try:
        told = made.ability()
    finally:
        made.close()
    assert told == "only plain sockets: torch cannot be imported: ImportError: libcudart.so.13: cannot open"


def test_a_python_that_is_not_there_is_told() -> None:
    made = Collectives(("/no/such/python",), ENV)
    assert "its process could not be started: No such file" in made.ability()
    test = msg.Test(0, 1, "127.0.0.1", 1, "t", 1.0, "gloo")
    listener = Listener(None)
    assert "could not be started" in made.run(test, listener)[0].why
    listener.close()
    made.close()
