"""Tests of a GPU, in a child that can be killed; started by path in the program's own Python.

Only the standard library and torch, in a Python that may be older than ours. Each printed line is a JSON object
with the present stage and all results so far, so the last line is enough. The first visible GPU is tested; NCCL
needs to see the others. `--device cpu` does the same at small sizes, without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

SEED = 20260720
# Size of the square matrices; bytes of a block in memory, and of one that goes to the device and back.
SIZES = {"cuda": (8192, 1 << 30, 1 << 28), "cpu": (128, 1 << 20, 1 << 20)}
SECONDS = {"cuda": (0.2, 0.5), "cpu": (0.001, 0.01)}  # to warm up, to measure
REPEATS = 20  # of the product that must come out the same
_MEET_S, _PART_S = timedelta(seconds=30), timedelta(seconds=5)  # for all GPUs of the node
_REDUCTIONS = 5
_COPY_S = {"cuda": 0.1, "cpu": 0.005}
# What NCCL says that it uses between nodes, or else has.
_NETWORKS = (
    re.compile(r"NCCL INFO.*(?:Using network|Assigned NET plugin) (\S+)"),
    re.compile(r"NCCL INFO NET/(\S+)\s*: Using \["),
)
_GPUDIRECT = re.compile(r"GPU Direct RDMA (Enabled|Disabled) for HCA")


def main() -> None:
    """Do what the command line says."""
    words = argparse.ArgumentParser()
    words.add_argument("--device", choices=tuple(SIZES), default="cuda")
    words.add_argument("--limit", type=float, default=60.0)
    words.add_argument("--peers", metavar="RANK:SIZE:FOLDER", default="0:1:")
    words.add_argument("--burn", type=float, default=0.0)
    asked = words.parse_args()
    signal.setitimer(signal.ITIMER_REAL, asked.limit + 5)  # should our parent die first
    out = os.dup(1)
    aside = os.memfd_create("aside")
    os.dup2(aside, 1)  # what libraries print is no word of ours
    Bench(out, asked.device, asked.peers, asked.burn).run(aside)
    os._exit(0)  # all is said: libraries need not take leave, which takes time, or hangs


class Bench:
    """All tests, one after the other; the first that fails is the last."""

    def __init__(self, out: int, device: str, peers: str = "0:1:", burn_s: float = 0.0) -> None:
        self._out, self._device, self._burn_s = out, device, burn_s
        self._results: dict[str, Any] = {"figures": []}
        rank, size, self._folder = peers.split(":", 2)
        self._rank, self._size = int(rank), int(size)
        self._backend = "nccl" if device == "cuda" else "gloo"
        self._n, self._block, self._sent = SIZES[device]

    def run(self, aside: int) -> None:
        """Run all tests, and print the results after each."""
        try:
            began = time.monotonic()
            self._say(stage="import torch")
            import torch

            self._torch = torch
            self._say(import_s=round(time.monotonic() - began, 1))
            tests: dict[str, Callable[[], None]] = {
                "device": self._open,
                "gemm": self._gemm,
                "memory": self._copies,
                "peers" if self._size > 1 else self._backend: lambda: self._collective(aside),
            }
            for stage, test in tests.items():
                self._say(stage=stage)
                test()
            self._say(stage="end", ending="done")
        except ModuleNotFoundError as problem:
            self._say(ending="import" if problem.name == "torch" else "failed", why=f"{problem}"[:300])
        except Exception as problem:  # noqa: BLE001  whatever a driver does to torch is what we are here for
            self._say(ending="failed", why=f"{type(problem).__name__}: {problem}"[:600])

    def _say(self, **values: Any) -> None:
        self._results |= values
        os.write(self._out, json.dumps(self._results).encode() + b"\n")

    def _measured(self, name: str, value: float, unit: str) -> None:
        self._say(figures=[*self._results["figures"], [name, round(value, 3), unit]])

    def _open(self) -> None:
        torch = self._torch
        facts = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "model": "CPU", "uuid": ""}
        if self._device == "cuda":
            if not torch.cuda.is_available():
                built = "without CUDA" if torch.version.cuda is None else f"with CUDA {torch.version.cuda}"
                raise RuntimeError(f"torch {torch.__version__}, built {built}, sees no GPU{self._why_none()}")
            properties = torch.cuda.get_device_properties(0)
            facts |= {"model": properties.name, "uuid": str(getattr(properties, "uuid", ""))}
            with contextlib.suppress(AttributeError, RuntimeError):  # a torch without NCCL
                facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # of what is really loaded
        torch.zeros(1, device=self._device)
        self._sync()
        self._say(facts=facts)

    def _why_none(self) -> str:
        """The reason that CUDA has, if torch is built with it."""
        try:
            if self._torch.version.cuda is not None:
                self._torch.cuda.init()
        except Exception as problem:  # noqa: BLE001  as in `run`
            return f": {problem}"
        return ""

    def _sync(self) -> None:
        if self._device == "cuda":
            self._torch.cuda.synchronize()

    def _timed(self, work: Callable[[], Any], seconds: float) -> tuple[int, float]:
        """How often it can be done in about so many seconds, and how long that took; the device is warm."""
        began = time.perf_counter()
        work()
        self._sync()
        count = max(1, int(seconds / max(1e-6, time.perf_counter() - began)))
        began = time.perf_counter()
        for _ in range(count):
            work()
        self._sync()
        return count, time.perf_counter() - began

    def _gemm(self) -> None:
        torch, n = self._torch, self._n
        is_old = self._device == "cuda" and torch.cuda.get_device_capability(0) < (8, 0)  # it has no bfloat16
        kind = torch.float16 if is_old else torch.bfloat16
        chance = torch.Generator(device=self._device).manual_seed(SEED)
        left, right = (torch.randn(n, n, generator=chance, device=self._device, dtype=kind) for _ in range(2))
        made = torch.empty(n, n, device=self._device, dtype=kind)
        warm_s, measure_s = SECONDS[self._device]
        until = time.perf_counter() + warm_s
        while time.perf_counter() < until:
            torch.mm(left, right, out=made)
            self._sync()

        def multiply() -> None:
            torch.mm(left, right, out=made)

        self._multiply, self._made = multiply, made
        self._measured("gemm", self._speed(measure_s), "TFLOP/s")
        self._say(stage="repeats", repeats=0, different=0)
        multiply()
        self._first = made.clone()
        for _ in range(REPEATS):
            self._repeat()
        self._say(stage="burn" if self._burn_s else "repeats")
        if self._burn_s:
            self._burn()
        del self._multiply, self._made, self._first

    def _speed(self, seconds: float) -> float:
        """Of products, in 10^12 operations per second."""
        count, took_s = self._timed(self._multiply, seconds)
        return 2 * self._n**3 * count / took_s / 1e12

    def _repeat(self) -> None:
        """The product once more: every bit has to come out as at first."""
        self._multiply()
        self._results["repeats"] += 1
        self._results["different"] += not self._torch.equal(self._made, self._first)

    def _burn(self) -> None:
        """Heat the card for as long as was asked: its speed in the second half, its bits all the time."""
        until, speeds = time.monotonic() + self._burn_s, []
        while time.monotonic() < until:
            speeds.append(self._speed(min(1.0, self._burn_s)))
            self._repeat()
        hot = sorted(speeds[len(speeds) // 2 :])
        self._measured("gemm-burn", hot[len(hot) // 2], "TFLOP/s")

    def _copies(self) -> None:
        torch, pinned = self._torch, self._device == "cuda"
        source = torch.ones(self._block // 4, device=self._device)
        target = torch.empty_like(source)
        count, took_s = self._timed(lambda: target.copy_(source), _COPY_S[self._device])
        self._measured("hbm-copy", 2 * self._block * count / took_s / 1e9, "GB/s")
        self._say(stage="pcie")
        there = torch.empty(self._sent // 4, device=self._device)
        here = torch.ones(self._sent // 4, pin_memory=pinned)
        for name, work in (
            ("h2d", lambda: there.copy_(here, non_blocking=True)),
            ("d2h", lambda: here.copy_(there, non_blocking=True)),
        ):
            count, took_s = self._timed(work, _COPY_S[self._device])
            self._measured(name, self._sent * count / took_s / 1e9, "GB/s")
        if float(here.min()) != 1.0 or float(here.max()) != 1.0:
            raise RuntimeError("the data read back from the device differs from the data sent")

    def _collective(self, aside: int) -> None:
        """All GPUs of the node: NCCL finds its network and the ways between them, and adds right; how fast."""
        import torch.distributed as dist

        torch, size = self._torch, self._size
        if not (dist.is_available() and (self._backend != "nccl" or dist.is_nccl_available())):
            if size > 1:
                self._say(peers={"good": True, "rate": 0.0, "why": "this torch is built without NCCL"})
            return
        store: Any = dist.HashStore() if size == 1 else dist.FileStore(os.path.join(self._folder, "store"), size)
        store.set(f"here/{self._rank}", "")
        try:
            store.wait([f"here/{rank}" for rank in range(size)], _MEET_S)
        except RuntimeError:
            self._say(peers={"good": True, "rate": 0.0, "why": "not all GPUs got that far"})
            return
        among = dist.PrefixStore("peers", store)
        dist.init_process_group(self._backend, store=among, rank=self._rank, world_size=size)
        numbers = torch.arange(1 << 18, device=self._device, dtype=torch.float32) % 1024
        made = numbers + self._rank
        dist.all_reduce(made)
        good = bool((made == numbers * size + size * (size - 1) / 2).all())
        log = log_of(aside)
        self._say(network=network_in(log), gpudirect=gpudirect_in(log))
        large = torch.zeros(self._block // 4, device=self._device)
        dist.all_reduce(large)
        self._sync()
        began = time.perf_counter()
        for _ in range(_REDUCTIONS):
            dist.all_reduce(large)
        self._sync()
        moved = 2 * (size - 1) / size * self._block * _REDUCTIONS  # as nccl-tests has it: bus bandwidth
        rate = round(moved / (time.perf_counter() - began) / 1e9, 3)
        self._say(peers={"good": good, "rate": rate, "why": ""})
        with contextlib.suppress(RuntimeError):  # nobody leaves while another one still reads
            store.set(f"gone/{self._rank}", "")
            store.wait([f"gone/{rank}" for rank in range(size)], _PART_S)


def log_of(aside: int) -> str:
    """Read the output of NCCL."""
    ctypes.CDLL(None).fflush(None)  # it may be in C's own buffer yet
    with open(os.dup(aside), encoding="utf-8", errors="replace") as file:
        file.seek(0)
        return file.read()


def network_in(log: str) -> str:
    """The network that NCCL uses, the last that it names; empty: it names none."""
    matches = (pattern.findall(log) for pattern in _NETWORKS)
    return next((names[-1] for names in matches if names), "")


def gpudirect_in(log: str) -> str:
    """The adapters that reach GPUs' memory directly by NCCL's log: all, some or none; empty: it names none."""
    words = set(_GPUDIRECT.findall(log))
    return {"Enabled": "all", "Disabled": "none"}[words.pop()] if len(words) == 1 else "some" if words else ""


if __name__ == "__main__":
    del sys.path[0]
    main()
