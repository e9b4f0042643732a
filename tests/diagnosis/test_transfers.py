"""Real processes that wait: for a file, a server or a person, or for what only looks like it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tests.waiting import eventually
from trainer_launch.diagnosis import worker_samples
from trainer_launch.diagnosis.collectives import Doing
from trainer_launch.diagnosis.worker_samples import Recorders, WatchedWorkers
from trainer_launch.host import process_tree
from trainer_launch.host.process_tree import CallKind, SystemCall

pytestmark = pytest.mark.process
HEAD = """
import fcntl, multiprocessing as mp, os, queue, select, signal, socket, subprocess, sys, threading, time
def connected():
    return socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def fetch():
    connected().recv(1)
def lock():
    return open(sys.argv[3], "w")
READS = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(1)"
CHILD = [sys.executable, "-S", "-c", READS, *sys.argv[1:]]
"""
POOL = "from concurrent.futures import ProcessPoolExecutor as P; a = P(1, mp.get_context('fork')); "
PIPE, SLEEP = "a, b = os.pipe(); os.read(a, 1)", "subprocess.run(['sleep', '60'])"
TRANSFERS = {
    "reads from a server": "fetch()",
    "reads with a timeout": "a = connected(); a.settimeout(60); a.recv(1)",
    "selects": "select.select([connected()], [], [])",
    "waits in an event loop": "a = connected(); b = select.epoll(); b.register(a, select.EPOLLIN); b.poll()",
    "waits for a thread that reads": "a = threading.Thread(target=fetch); a.start(); a.join()",
    "waits for a program that reads": "subprocess.run(CHILD)",
    "waits for the output of a program that reads": "subprocess.run(CHILD, capture_output=True, timeout=60)",
    "waits for a shell whose program reads": "subprocess.run(['sh', '-c', '\"$@\"; true', 'sh', *CHILD])",
    "waits for a pool of processes that read": f"{POOL}a.submit(fetch).result()",
    "reads a file of a slow disk": "os.read(os.open(sys.argv[2], os.O_RDWR), 1)",
    "writes a file of a slow disk": "a = os.open(sys.argv[2], os.O_RDWR)\nwhile True: os.write(a, bytes(65536))",
}
NO_TRANSFERS = {
    "sleeps": (CallKind.OTHER, "time.sleep(60)"),
    "sleeps while a thread reads": (CallKind.OTHER, "threading.Thread(target=fetch).start(); time.sleep(60)"),
    "waits for a queue": (CallKind.LOCK, "queue.Queue().get()"),
    "waits for a queue beside a pool": (
        CallKind.LOCK,
        f"{POOL}a.submit(callable, fetch).result(); queue.Queue().get()",
    ),
    "reads from its own pipe": (CallKind.DATA, PIPE),
    "reads from its own pipe beside a program that reads": (CallKind.DATA, f"subprocess.Popen(CHILD); {PIPE}"),
    "opens a pipe that nobody writes": (CallKind.OTHER, "open(sys.argv[2])"),
    "reads from its own socket": (CallKind.DATA, "a, b = socket.socketpair(); a.recv(1)"),
    "waits for a lock of a file": (CallKind.OTHER, "a, b = lock(), lock(); fcntl.flock(a, 2); fcntl.flock(b, 2)"),
    "waits for a program that sleeps": (CallKind.CHILD, SLEEP),
    "waits for a program that sleeps beside one that reads": (CallKind.CHILD, f"subprocess.Popen(CHILD); {SLEEP}"),
    "serves": (
        CallKind.POLL,
        "a = select.poll(); b = socket.create_server(('127.0.0.1', 0)); a.register(b); a.poll()",
    ),
}


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server that accepts, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def started(tmp_path: Path, port: int) -> Iterator[Callable[[str], int]]:
    """Start a program; its pid."""
    os.mkfifo(tmp_path / "disk")
    running = []

    def start(code: str) -> int:
        argv = (sys.executable, "-S", "-c", HEAD + code, str(port), str(tmp_path / "disk"), str(tmp_path / "lock"))
        running.append(subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True))
        return running[-1].pid

    yield start
    for process in running:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def doing(pid: int, *own_ports: int, has_joined: bool = False) -> Doing:
    return worker_samples.wait_in_kernel(pid, process_tree.descendants(pid), own_ports, has_joined=has_joined)


def calls_of(pid: int) -> list[SystemCall | None]:
    """Of the main thread first, then of all threads beside it and below it."""
    pids = [pid, *(entry.pid for entry in process_tree.descendants(pid))]
    others = [call for each in pids for call in process_tree.of_other_threads(each)]
    return [*(process_tree.of_thread(each, each) for each in pids), *others]


@pytest.mark.parametrize("code", TRANSFERS.values(), ids=[*TRANSFERS])
def test_a_worker_that_waits_for_files_or_a_server_is_in_a_transfer(
    started: Callable[[str], int], code: str
) -> None:
    pid = started(code)
    eventually(lambda: doing(pid) is Doing.TRANSFER, "it waits", within_s=20)


@pytest.mark.parametrize(("kind", "code"), NO_TRANSFERS.values(), ids=[*NO_TRANSFERS])
def test_a_worker_that_waits_for_itself_or_for_nobody_is_in_no_transfer(
    started: Callable[[str], int], kind: CallKind, code: str
) -> None:
    pid = started(code)

    def waits() -> bool:
        """And what reads beside it does so."""
        main, *others = calls_of(pid)
        reads = any(call is not None and call.kind is CallKind.DATA and call.fds[:1] != (0,) for call in others)
        return main is not None and main.kind is kind and reads == ("CHILD" in code or "fetch" in code)

    eventually(waits, "it waits", within_s=20)
    assert doing(pid) is Doing.UNKNOWN


@pytest.mark.parametrize(
    ("start", "rank", "waits"),
    [
        ("subprocess.Popen(CHILD)", None, Doing.TRANSFER),
        ("subprocess.Popen(CHILD, env={'RANK': '0'})", None, Doing.UNKNOWN),
        ("subprocess.Popen(CHILD)", 0, Doing.UNKNOWN),
    ],
    ids=["a download", "a rank, as torchrun does", "a rank's own child"],
)
def test_a_program_that_sleeps_between_two_looks_at_a_download_is_in_a_transfer(
    started: Callable[[str], int], start: str, rank: int | None, waits: Doing
) -> None:
    pid, kinds = started(f"{start}\ntime.sleep(600)"), [CallKind.OTHER, CallKind.DATA]
    eventually(lambda: [call and call.kind for call in calls_of(pid)] == kinds, "its child reads", within_s=20)
    workers = WatchedWorkers(lambda: {"program": pid}, lambda _: 0, "/nowhere")
    (worker,) = workers.look()
    assert workers.doing(replace(worker, rank=rank), "") is waits


@pytest.fixture
def recorders() -> Iterator[Recorders]:
    """The connection to rank 0, which has entered seven collectives."""
    made = Recorders()
    worker = socket.socket(fileno=made.open("rank 0"))

    def reply() -> None:
        worker.send(b"\n")
        while data := worker.recv(4096):
            answer = {"number": json.loads(data)["number"], "far": 7, "entries": {"rank": 0}}
            worker.send(json.dumps(answer).encode() + b"\n")

    thread = threading.Thread(target=reply)
    thread.start()
    eventually(lambda: made.how_far() == {"rank 0": 7}, "it answers")
    yield made
    made.close()
    thread.join()
    worker.close()


def is_judged(recorders: Recorders) -> bool:
    """Whether it may be a straggler."""
    entries = recorders.entries(1, time.monotonic() + 20.0)["rank 0"].entries
    return entries is not None and not entries.hides_messages


@pytest.mark.parametrize("is_store", [True, False])
def test_a_rank_that_waits_for_the_jobs_store_waits_for_other_ranks_and_is_not_judged_as_a_straggler(
    started: Callable[[str], int], port: int, recorders: Recorders, is_store: bool
) -> None:
    pid = started("fetch()")
    eventually(lambda: doing(pid) is Doing.TRANSFER, "it waits", within_s=20)
    group: Any = SimpleNamespace(places={}, recorders=recorders, store_port=port if is_store else port + 1)
    workers = WatchedWorkers(lambda: {"rank 0": pid}, lambda _: 0, "/nowhere", group)
    (rank,) = workers.look()
    assert workers.doing(rank, "") is (Doing.COLLECTIVE if is_store else Doing.TRANSFER)
    assert is_judged(recorders) == (not is_store)


def test_a_slow_rank_that_seldom_waits_for_the_store_may_be_a_straggler(recorders: Recorders) -> None:
    for look in range(40):
        recorders.note("rank 0", waits=look < 1)
    assert is_judged(recorders)
    recorders.note("rank 0", waits=True)
    recorders.note("rank 0", waits=True)
    assert not is_judged(recorders)


def test_a_worker_that_has_joined_a_collective_does_not_wait_for_a_thread_that_uploads(
    started: Callable[[str], int],
) -> None:
    pid = started("a = threading.Thread(target=fetch); a.start(); a.join()")
    eventually(lambda: doing(pid) is Doing.TRANSFER, "it waits", within_s=20)
    assert doing(pid, has_joined=True) is Doing.UNKNOWN


@pytest.mark.parametrize("code", ["input()", "select.select([sys.stdin], [], [])"])
def test_a_worker_that_reads_standard_input_waits_for_a_person(started: Callable[[str], int], code: str) -> None:
    pid = started(code)
    eventually(lambda: doing(pid) is Doing.INPUT, "it waits", within_s=20)


def test_a_look_at_a_worker_that_holds_no_lock_starts_no_thread(
    started: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = started("a, b = socket.socketpair(); a.recv(1)")
    eventually(lambda: process_tree.of_thread(pid, pid) is not None, "it waits", within_s=20)
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a wake-up of PID 1"))
    workers = WatchedWorkers(lambda: {"program": pid}, lambda _: 0, "/nowhere")
    assert workers.look()
    assert process_tree.of_thread(pid, pid) is not None


def test_of_a_process_that_is_gone_nothing_is_known() -> None:
    assert worker_samples.wait_in_kernel(2**22 + 1, ()) is Doing.UNKNOWN
