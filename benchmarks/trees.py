"""What a launcher and its helpers cost while they run: memory, CPU, wake-ups; commands started and ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.measuring import Failed, wait_for
from tests.cli.launching import clean_env

FOLDERS = "/var/tmp"  # where each run has its folder: not where `private` hides it


class Started:
    """A command that runs; its output goes to a file."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path, began_s: float) -> None:
        self.process, self._output, self.began_s = process, output, began_s

    def wait_for(self, condition: Callable[[], object], what: str, limit_s: float) -> None:
        """Wait until something holds, while the command runs.

        Raises:
            Failed: it ended before, or the time is over.
        """
        wait_for(lambda: condition() or self.process.poll() is not None, what, limit_s)
        if not condition():
            raise Failed(f"{what}: it ended before with {self.process.returncode}: {self.last_line()}")

    def output(self) -> str:
        """All that it has written so far."""
        return self._output.read_text(errors="replace")

    def last_line(self) -> str:
        """The last line that it said in words."""
        lines = self.output().splitlines()
        return next((line.strip() for line in reversed(lines) if any(letter.isalpha() for letter in line)), "")[
            :120
        ]

    def others(self, programs: Iterable[int]) -> list[psutil.Process]:
        """The launcher and all below it, but not these programs nor what they started."""
        top = psutil.Process(self.process.pid)
        every = {process.pid: process for process in (top, *top.children(recursive=True))}
        for pid in programs:
            with contextlib.suppress(psutil.NoSuchProcess):
                below = psutil.Process(pid)
                for process in (below, *below.children(recursive=True)):
                    every.pop(process.pid, None)
        return list(every.values())


def folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for one run, outside of what `private` hides."""
    return tempfile.TemporaryDirectory(dir=FOLDERS, prefix="bench-")


def private() -> tuple[str, ...]:
    """What to put before a command so that it has a /tmp and a /dev/shm of its own, as a pod has.

    Some launchers keep sockets there under fixed names, and leave them. Nothing for ordinary users, or in /tmp.
    """
    if os.geteuid() or any(path.is_relative_to("/tmp") for path in (Path(__file__), Path(sys.prefix))):
        return ()
    mounts = 'mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && unset TMPDIR && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", mounts, "private")


@contextlib.contextmanager
def started(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> Iterator[Started]:
    """Start a command in a folder, in a session of its own; it is ended with the block."""
    with tempfile.NamedTemporaryFile(dir=cwd, prefix="output-") as file:
        began_s = time.monotonic()
        process = subprocess.Popen(
            (*private(), *argv),
            env=clean_env({"OMP_NUM_THREADS": "1", **env}),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield Started(process, Path(file.name), began_s)
        finally:
            process.kill()
            process.wait()


def pss_mb(processes: Iterable[psutil.Process]) -> float:
    """Proportional set size of all together, in MB; shared pages count once."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 1e6


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """CPU seconds so far, of all and of the children that they have waited for."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


def wakeups(processes: Sequence[psutil.Process], seconds: float) -> float:
    """How often per second any thread of these has waited and goes on; not when it had to let others run."""
    before = _switches(processes)
    time.sleep(seconds)
    return (_switches(processes) - before) / seconds


def _switches(processes: Sequence[psutil.Process]) -> int:
    total = 0
    for process in processes:
        for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
            with contextlib.suppress(OSError):
                lines = [line for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt")]
                total += sum(int(line.partition(":")[2]) for line in lines)
    return total
