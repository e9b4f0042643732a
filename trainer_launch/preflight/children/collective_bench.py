"""Tests of pairs of nodes with torch's NCCL, or gloo without a GPU, started by path in the program's own Python.

Imports torch once, then takes orders as JSON, each in a packet of its input, a socket. For each rail of an
order a process is forked, which never outlives its time: the parent touches no GPU, so it cannot hang in a driver.
Rank 0 of a test opens the store, in a process of its own, and gives its port to the node that has the token.
A rail's all-reduces are compared bit by bit.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

pair_bench: Any = importlib.import_module("pair_bench")  # beside this file
sys.path.pop(0)  # this folder's names are no modules of torch's or the user's

BLOCK = 1 << 16  # numbers of the pattern, repeated
SMALL, LARGE = {"gloo": 1 << 20, "nccl": 1 << 23}, {"gloo": 1 << 23, "nccl": 1 << 28}  # bytes
MEASURE_S = 0.12
FAST_S = 0.02  # for the small size: then the large one is taken
MAX_REPEATS = 100
_TRIED = 50  # ports, at most
_END_S = 1.0  # for the others to have read the last of it
_PR_SET_PDEATHSIG = 1
_FORK = multiprocessing.get_context("fork")


def main() -> None:
    """Serve until the other end of the socket is gone."""
    orders = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import torch.distributed as dist

        gpus = _gpus(dist) if dist.is_available() else 0
        can = {"gpus": gpus, "why": "" if gpus else "this torch sees no GPU, or has no NCCL"}
    except Exception as problem:  # noqa: BLE001  a broken torch raises whatever it likes
        can = {"why": f"torch cannot be imported: {type(problem).__name__}: {problem}"[:300]}
    _tell(orders, can)
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, 1 << 16, 1)
        if not order:
            return
        listener = socket.socket(fileno=descriptors[0]) if descriptors else None
        _tell(orders, {"rails": serve(json.loads(order), listener)})


def _tell(orders: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        orders.sendall(json.dumps(message).encode())


def _gpus(dist: Any) -> int:
    """How many GPUs NCCL could use; asked by a child, since asking may open the driver."""
    if not dist.is_nccl_available():
        return 0

    def count(tell: Callable[[object], None]) -> None:
        import torch

        tell(torch.cuda.device_count())

    child = ForkedChild(count)
    gpus = child.line(time.monotonic() + 20.0)
    child.end()
    return gpus if isinstance(gpus, int) else 0


class ForkedChild:
    """A forked process that sends a value or two, and is killed when it is not wanted any more."""

    def __init__(self, work: Callable[..., None], *args: object) -> None:
        self._reader, writer = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(target=_begun, args=(os.getpid(), work, *args, writer.send), daemon=True)
        self._process.start()
        writer.close()

    def line(self, until: float) -> object:
        """Receive its next value; None: none came in time, or it has ended."""
        try:
            return self._reader.recv() if self._reader.poll(max(0.0, until - time.monotonic())) else None
        except EOFError:
            return None

    def end(self) -> bool:
        """Kill it; return whether it went."""
        self._reader.close()
        self._process.kill()
        self._process.join(0.5)
        return not self._process.is_alive()


def _begun(parent: int, work: Callable[..., None], *args: object) -> None:
    """In the child: end with the parent, and without torch's own end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        if os.getppid() == parent:
            work(*args)
    finally:
        os._exit(0)


def serve(order: Mapping[str, Any], listener: socket.socket | None) -> list[tuple[str, int]]:
    """Run all rails of a test; for each, why it failed, or "", and its bytes per second."""
    until = time.monotonic() + float(order["limit_s"])
    n_rails = int(order["rails"])
    store = None if listener is None else ForkedChild(keep_store, order, until)
    rails: list[ForkedChild] = []
    try:
        port = dialed(order, until) if store is None else store.line(until)
        if not isinstance(port, int):
            raise pair_bench.PairTestFailed(f"its store could not be opened: {_result(port)[0]}")
        rails = [ForkedChild(work, order, rail, until, port) for rail in range(n_rails)]
        if listener is not None:
            late = "the other end did not connect in time"
            pair_bench.accepted(listener, order["token"], until, f"ok {port}\n".encode(), late).close()
        results = [_result(child.line(until)) for child in rails]
        last = time.monotonic() + _END_S
        for number, child in enumerate(rails):
            if not results[number][0]:
                child.line(last)  # its end: the others may still read what it has sent
    except pair_bench.PairTestFailed as problem:
        results = [(str(problem), 0)] * n_rails
    for number, child in enumerate(rails):
        if not child.end():
            results[number] = ("its test hangs in the kernel: not even SIGKILL ends it", 0)
    if store is not None:
        store.end()
    return results


def dialed(order: Mapping[str, Any], until: float) -> object:
    """Connect until rank 0 is at this test; the port of its store, or why there is none."""
    sock, port = pair_bench.dialed(order["token"], until, str(order["host"]), int(order["port"]))
    sock.close()
    return int(port) if port.isascii() and port.isdigit() and len(port) < 6 else ("the other end names no port", 0)


def _result(word: object) -> tuple[str, int]:
    if isinstance(word, tuple):
        return word
    return "its test hung and was killed, or died", 0


class DamagedError(Exception):
    """A number came out wrong."""


def keep_store(order: Mapping[str, Any], until: float, tell: Callable[[object], None]) -> None:
    """Open the store of all rails and tell its port; the store's own thread serves it."""
    try:
        store = _opened(order, timedelta(seconds=max(0.1, until - time.monotonic())))
    except Exception as problem:  # noqa: BLE001  as in `work`
        tell((reason(problem), 0))
        return
    tell(store.port)
    signal.pause()


def work(order: Mapping[str, Any], rail: int, until: float, port: int, tell: Callable[[object], None]) -> None:
    """Meet the other node on this rail at the store, reduce with it, and send the result."""
    import torch.distributed as dist

    rank = int(order["rank"])
    host = "127.0.0.1" if rank == 0 else str(order["host"])
    left = timedelta(seconds=max(0.1, until - time.monotonic()))
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")  # else its init knows no time limit
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, int(left.total_seconds()))))
    try:
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=left)
        store = dist.PrefixStore(f"rail {rail}", store)
        rate = Reduction(order, rail, rank).measured(store, left)
    except Exception as problem:  # noqa: BLE001  torch, gloo, NCCL and drivers raise what they like
        tell((reason(problem), 0))
        return
    tell(("", rate))
    with contextlib.suppress(Exception):
        _part(store, rank)


def _opened(order: Mapping[str, Any], left: timedelta) -> Any:
    """Open the store on any port, or on a free port of those allowed."""
    import torch.distributed as dist

    low, high = order["ports"] or (0, 0)
    ports = random.sample(range(low, high + 1), min(_TRIED, high + 1 - low))
    for port in ports[:-1]:
        with contextlib.suppress(RuntimeError):
            return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=left)
    return dist.TCPStore("127.0.0.1", ports[-1], is_master=True, wait_for_workers=False, timeout=left)


def _part(store: Any, rank: int) -> None:
    """End when both have what they need: a process that ends at once takes unread data with it."""
    store.set(f"end/{rank}", b"")
    store.wait([f"end/{1 - rank}"], timedelta(seconds=_END_S))


def reason(problem: Exception) -> str:
    """An exception's first line, without the source line of C++ that it begins with."""
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    text = lines[0]
    if text.startswith("[") and "] " in text:
        text = text.partition("] ")[2]
    return text[:250]


class Reduction:
    """All-reduces of two ranks: numbers that follow from the test's token, compared bit by bit."""

    def __init__(self, order: Mapping[str, Any], rail: int, rank: int) -> None:
        self._way, self._rank = str(order["way"]), rank
        self._token = f"{order['token']}/{rail}"
        self._device = f"cuda:{rail}" if self._way == "nccl" else "cpu"
        self._patterns: dict[int, Any] = {}

    def measured(self, store: Any, left: timedelta) -> int:
        """Measure the bytes per second that go each way, which is the bus bandwidth of nccl-tests for two ranks."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if self._way == "nccl":
            torch.cuda.set_device(self._device)
        dist.init_process_group(self._way, store=store, rank=self._rank, world_size=2, timeout=left)
        self._reduced(SMALL[self._way])  # sets connections up
        took_s = self._reduced(SMALL[self._way])
        size = (LARGE if took_s < FAST_S else SMALL)[self._way]
        took_s *= size / SMALL[self._way]
        repeats = max(2, min(MAX_REPEATS, int(MEASURE_S / max(took_s, 1e-6))))
        agreed = torch.tensor([size, repeats], dtype=torch.int64, device=self._device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        size, repeats = agreed.tolist()
        best_s = min(self._reduced(size) for _ in range(repeats))  # the others waited for a processor
        return int(size / best_s)

    def _reduced(self, size: int) -> float:
        import torch
        import torch.distributed as dist

        pattern = self._pattern(size)
        numbers = pattern * (2 * self._rank + 1)
        self._settle()
        began = time.perf_counter()
        dist.all_reduce(numbers)
        self._settle()
        took_s = time.perf_counter() - began
        if not torch.equal(numbers, pattern * 4):  # 1 + 3
            raise DamagedError("the data arrives damaged")
        return took_s

    def _pattern(self, size: int) -> Any:
        """Make numbers that are the same on both nodes."""
        if size in self._patterns:
            return self._patterns[size]
        import torch

        seed = int.from_bytes(hashlib.sha256(self._token.encode()).digest()[:7], "big")
        made = torch.Generator().manual_seed(seed)
        block = torch.randint(-(1 << 31), 1 << 31, (BLOCK,), dtype=torch.int32, generator=made)
        self._patterns[size] = block.to(self._device).repeat(size // 4 // BLOCK)
        return self._patterns[size]

    def _settle(self) -> None:
        if self._way == "nccl":
            import torch

            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
    os._exit(0)  # torch takes its time
