"""One rail's part in a test of nodes: all-reduces with gloo or NCCL in a process of its own, compared bit by bit.

Imported by path, beside collective_bench.py, in the program's own Python; torch is imported there already.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

BLOCK = 1 << 16  # numbers of the pattern, repeated
SMALL, LARGE = {"gloo": 1 << 20, "nccl": 1 << 23}, {"gloo": 1 << 23, "nccl": 1 << 28}  # bytes
MEASURE_S = 0.12
FAST_S = 0.02  # for the small size: then the large one is taken
MAX_REPEATS = 100
_TRIED = 50  # ports, at most
_END_S = 1.0  # for the others to have read the last of it


class DamagedError(Exception):
    """A number came out wrong."""


def work(
    order: Mapping[str, Any], rail: int, until: float, port: int | None, tell: Callable[[object], None]
) -> None:
    """Meet the others of this rail, reduce with them; tells the store's port if it opens it, then the result."""
    import torch.distributed as dist

    rank, size = int(order["rank"]), int(order["size"])
    if order["is_whole"]:
        rank, size = rank * int(order["rails"]) + rail, size * int(order["rails"])
    left = timedelta(seconds=max(0.1, until - time.monotonic()))
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")  # else its init knows no time limit
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, int(left.total_seconds()))))
    try:
        if port is None:
            store = _opened(order, left)
            tell(store.port)
        else:
            host = "127.0.0.1" if int(order["rank"]) == 0 else str(order["host"])
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=left)
        rate = Reduction(order, rail, rank, size).measured(store, left)
    except Exception as problem:  # noqa: BLE001  torch, gloo, NCCL and drivers raise what they like
        tell([reason(problem), 0])
        return
    tell(["", rate])
    with contextlib.suppress(Exception):
        _part(store, rank, size)


def _opened(order: Mapping[str, Any], left: timedelta) -> Any:
    """The store, on any port or one of those allowed, whoever has some of them."""
    import torch.distributed as dist

    low, high = order["ports"] or (0, 0)
    ports = random.sample(range(low, high + 1), min(_TRIED, high + 1 - low))
    for port in ports[:-1]:
        with contextlib.suppress(RuntimeError):
            return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=left)
    return dist.TCPStore("127.0.0.1", ports[-1], is_master=True, wait_for_workers=False, timeout=left)


def _part(store: Any, rank: int, size: int) -> None:
    """Go when all have what they need: who goes at once takes data with it that the others have not read."""
    last = timedelta(seconds=_END_S)
    store.set(f"end/{rank}", b"")
    if rank == 0:
        store.wait([f"end/{other}" for other in range(size)], last)
        store.set("end", b"")
    store.wait(["end"], last)


def reason(problem: Exception) -> str:
    """An exception's first line, without the source line of C++ that it begins with."""
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    text = lines[0]
    if text.startswith("[") and "] " in text:
        text = text.partition("] ")[2]
    return text[:250]


def bus_rate(size: int, took_s: float, n_ranks: int) -> int:
    """Bytes per second that a ring's all-reduce of so many bytes has each rank send, as nccl-tests count them."""
    return int(2 * (n_ranks - 1) / n_ranks * size / took_s)


class Reduction:
    """All-reduces of numbers that follow from the test's token, compared bit by bit."""

    def __init__(self, order: Mapping[str, Any], rail: int, rank: int, size: int) -> None:
        self._way, self._rank, self._size = str(order["way"]), rank, size
        self._token = f"{order['token']}/{0 if order['is_whole'] else rail}"
        self._device = f"cuda:{rail}" if self._way == "nccl" else "cpu"
        self._patterns: dict[int, Any] = {}

    def measured(self, store: Any, left: timedelta) -> int:
        """Bytes per second that go each way on the bus."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if self._way == "nccl":
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            self._way, store=dist.PrefixStore("test", store), rank=self._rank, world_size=self._size, timeout=left
        )
        self._reduced(SMALL[self._way])  # sets connections up
        took_s = self._reduced(SMALL[self._way])
        is_fast = took_s < FAST_S and (self._size == 2 or self._way == "nccl")
        size = (LARGE if is_fast else SMALL)[self._way]
        took_s *= size / SMALL[self._way]
        repeats = max(2, min(MAX_REPEATS, int(MEASURE_S / max(took_s, 1e-6))))
        agreed = torch.tensor([size, repeats], dtype=torch.int64, device=self._device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        size, repeats = agreed.tolist()
        best_s = min(self._reduced(size) for _ in range(repeats))  # the others waited for a processor
        return bus_rate(size, best_s, self._size)

    def _reduced(self, size: int) -> float:
        """One all-reduce of so many bytes: seconds."""
        import torch
        import torch.distributed as dist

        pattern = self._pattern(size)
        numbers = pattern * (2 * self._rank + 1)
        self._settle()
        began = time.perf_counter()
        dist.all_reduce(numbers)
        self._settle()
        took_s = time.perf_counter() - began
        total = self._size**2 & 0xFFFFFFFF  # 1 + 3 + 5 ..., in 32 bits
        if not torch.equal(numbers, pattern * (total if total < 1 << 31 else total - (1 << 32))):
            raise DamagedError("the data arrives damaged")
        return took_s

    def _pattern(self, size: int) -> Any:
        """The same on all nodes."""
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
