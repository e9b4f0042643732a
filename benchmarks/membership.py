"""Many real launchers on this machine: how soon they have formed a job, go on without one, and have it back."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks import peers, trees
from benchmarks.measuring import Case, Section, Setup, wait_for
from benchmarks.peers import RELEASE, versions_of_launchers
from tests.cli.launching import clean_env
from trainer_launch.host import network

NODES = 32
LIMIT_S = 180.0
LOST = NODES // 2
ROWS = {"formed, from the first start": "s", "without the lost one": "s", "with all again, from its new start": "s"}
# A worker needs neither torch nor time: it says to which generation it belongs, and waits.
WORKER = """
import os, signal
line = f"{os.environ['WORLD_SIZE']} {os.environ['MASTER_PORT']} {os.environ['RANK']}\\n"
with open("notes", "a") as file:
    file.write(line)
signal.pause()
"""


class Job:
    """The launchers of one job, and what their workers say."""

    def __init__(self, python: str, folder: str) -> None:
        self._python, self._folder = python, folder
        self._port = network.free_port()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        Path(folder, "worker.py").write_text(WORKER)

    def start(self, node: int) -> None:
        """One node's launcher, whose job may go on with one fewer."""
        words = ("--nodes", f"{NODES - 1}:{NODES}", "--nproc-per-node", "1", "--node-rank", str(node))
        place = ("--master-addr", "127.0.0.1", "--master-port", str(self._port), "--start-method", "exec")
        self._running[node] = subprocess.Popen(
            (self._python, "-m", "trainer_launch", "run", *words, *place, "--", "worker.py"),
            env=clean_env({"OMP_NUM_THREADS": "1"}),
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def lose(self, node: int) -> None:
        """Kill a launcher and all below it, as the end of its pod does."""
        started = psutil.Process(self._running.pop(node).pid)
        for process in (started, *started.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def wait_for(self, size: int, since: Sequence[str]) -> list[str]:
        """Wait until all workers of a generation of this size have begun; all lines so far."""

        def has_formed() -> bool:
            new = [line.split() for line in self._lines()[len(since) :]]
            stores = {port for _, port, _ in new}
            return any(sum(line[:2] == [str(size), port] for line in new) == size for port in stores)

        wait_for(has_formed, f"a generation of {size} nodes", LIMIT_S, 0.02)
        return self._lines()

    def _lines(self) -> list[str]:
        path = Path(self._folder, "notes")
        return path.read_text().split("\n")[:-1] if path.exists() else []


def once(python: str) -> Mapping[str, float]:
    """Start all, kill one, start it again."""
    with trees.folder() as folder:
        job = Job(python, folder)
        times = [time.monotonic()]
        for node in range(NODES):
            job.start(node)
        lines = job.wait_for(NODES, ())
        times += [time.monotonic()] * 2
        job.lose(LOST)
        lines = job.wait_for(NODES - 1, lines)
        times += [time.monotonic()] * 2
        job.start(LOST)
        job.wait_for(NODES, lines)
        times.append(time.monotonic())
        took = [after - before for before, after in zip(times[::2], times[1::2], strict=True)]
        return dict(zip(ROWS, took, strict=True))


@contextlib.contextmanager
def opened() -> Iterator[Setup]:
    """This tree and the last release."""

    def case(who: str, python: str) -> Case:
        return Case(who, ROWS, functools.partial(once, python), 3 * LIMIT_S, 60.0)

    found, absent = peers.those_here({RELEASE: lambda _: peers.release()})
    cases = [case(peers.OURS.who, peers.OURS.command(1)[0]), *(case(RELEASE, python) for python in found)]
    yield Setup(cases, absent)


SECTION = Section(
    name="membership",
    title="Many launchers",
    about=f"""\
{NODES} real launchers on this one machine, each with one worker that needs neither torch nor time. One launcher is
killed with all below it, as the end of its pod does; the others go on with {NODES - 1} nodes; then it is started
again. A figure ends when the last worker of the generation has begun. Most of the first is the start of {NODES}
interpreters on a few CPUs.""",
    open=opened,
    versions=versions_of_launchers,
    whos=("trainer-launch", RELEASE),
)
