"""The card that the tests run on.

With GPU_REHEARSAL=cpu the same tests run on the CPU over gloo. This shows that they work, and nothing of GPUs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import require
from tests.waiting import eventually
from trainer_launch.host.machine import count

IS_REHEARSED = os.environ.get("GPU_REHEARSAL") == "cpu"
ROOT = Path(__file__).parents[2]
HELD_BYTES = 4 << 30  # by each rank of job.py
_SPARE_BYTES = 256 << 20  # of the driver's own, which comes and goes
_GIVEN_BACK_S = 30.0
_PACE_S = 0.1
_VERSIONS = """
import torch
has_nccl = torch.distributed.is_nccl_available() and torch.cuda.is_available()
print(torch.__version__, ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none")
"""


@functools.cache
def nvml() -> Any:
    """NVIDIA's library, opened; without a context on any card."""
    library = importlib.import_module("pynvml")
    library.nvmlInit()
    return library


class Card:
    """The first card that is shown; a job on it has to give back its memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        self.env = {  # pods of a rehearsal get variables of torch
            "TORCH_JOB_DEVICE": "cpu" if IS_REHEARSED else "cuda",
            "TORCH_JOB_HELD_BYTES": str(1 << 20 if IS_REHEARSED else HELD_BYTES),
            "TORCH_JOB_FOLDER": self._folder,  # all processes of the job have it
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as NVML has it
            "CUDA_VISIBLE_DEVICES": "" if IS_REHEARSED else shown,
            "NCCL_SOCKET_IFNAME": "lo",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        if not IS_REHEARSED:
            by_index = nvml().nvmlDeviceGetHandleByIndex
            self._handle = by_index(int(shown)) if shown.isdecimal() else nvml().nvmlDeviceGetHandleByUUID(shown)
        self.before = self.used()
        self.most = self.before
        self._pids = self._holders()

    def used(self) -> int:
        """Bytes."""
        return 0 if IS_REHEARSED else int(nvml().nvmlDeviceGetMemoryInfo(self._handle).used)

    def _holders(self) -> set[int]:
        """Processes on the card, where this container sees them."""
        return (
            set()
            if IS_REHEARSED
            else {one.pid for one in nvml().nvmlDeviceGetComputeRunningProcesses(self._handle)}
        )

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note the most that is used meanwhile."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_PACE_S):
                self.most = max(self.most, self.used())

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def given_back(self) -> str:
        """Wait until no process of the job is left; the memory used before, at most and after."""
        eventually(lambda: not self._left(), lambda: f"no process of the job: {self._left()}", _GIVEN_BACK_S)
        eventually(
            lambda: self.used() <= self.before + _SPARE_BYTES and self._holders() <= self._pids,
            lambda: f"memory given back: {self} now; processes {self._holders() - self._pids}",
            _GIVEN_BACK_S,
        )
        if not IS_REHEARSED:  # otherwise nothing was seen
            assert self.most >= self.before + 2 * HELD_BYTES, str(self)
        return "no process left" if IS_REHEARSED else str(self)

    def __str__(self) -> str:
        before, most, now = (f"{one / (1 << 30):.2f}" for one in (self.before, self.most, self.used()))
        return f"{before} GiB before, {most} at most, {now} after"

    def _left(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.environ().get("TORCH_JOB_FOLDER") == self._folder
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
        return found


def made_card(folder: Path) -> Card:
    require(IS_REHEARSED or count(os.environ).is_nvidia, "needs an NVIDIA GPU")
    return Card(folder)


@pytest.fixture
def card(tmp_path: Path) -> Card:
    return made_card(tmp_path)


def needs_card(why: str) -> None:
    """Skip what has no meaning on the CPU."""
    if IS_REHEARSED:
        pytest.skip(f"not rehearsed: {why}")


@pytest.fixture(scope="session")
def what_the_tests_ran_on(record_testsuite_property: Callable[[str, object], None]) -> None:
    """For the result, which pytest writes."""
    for name, value in about().items():
        record_testsuite_property(name, value)


def about() -> Mapping[str, str]:
    torch, _, nccl = _said(sys.executable, "-c", _VERSIONS).partition(" ")
    commit = os.environ.get("COMMIT") or _said("git", "rev-parse", "--short", "HEAD") or "unknown"
    versions = {"torch": torch, "NCCL": nccl, "Python": platform.python_version(), "commit": commit}
    if IS_REHEARSED:
        return {"rehearsed on": "the CPU with gloo, which proves nothing of GPUs", **versions}
    if not count(os.environ).count:
        return versions
    names = [
        nvml().nvmlDeviceGetName(nvml().nvmlDeviceGetHandleByIndex(one))
        for one in range(nvml().nvmlDeviceGetCount())
    ]
    gpus = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
    return {"GPU": gpus, "driver": nvml().nvmlSystemGetDriverVersion(), **versions}


def _said(*argv: str) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120).stdout.strip()
    return ""
