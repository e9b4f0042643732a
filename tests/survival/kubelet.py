"""A tiny kubelet over the tests' hosts: it starts each pod, and again some seconds after it has failed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from tests.cli.launching import LAUNCHER
from tests.hosts.network import Host, hosts

RESTART_S = 3.0  # what a kubelet waits before it starts a failed container again


class Pod:
    """One pod: how often it was started, how each start ended, and all that it said."""

    def __init__(self, host: Host, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.host = host
        self.codes: list[int] = []
        self.starts = 0
        self.lines: list[str] = []
        self.before_restart: Callable[[], None] = lambda: None
        self._argv, self._env = argv, env
        self._ending = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._look_after, daemon=True)
        self._thread.start()

    @property
    def succeeded(self) -> bool:
        """Whether it has ended with 0."""
        return bool(self.codes) and self.codes[-1] == 0

    def workers(self) -> list[psutil.Process]:
        """Its training processes by rank."""
        found = []
        for process in self._below():
            with contextlib.suppress(psutil.Error):
                if "train.py" in " ".join(process.cmdline()) and "RANK" in process.environ():
                    found.append(process)
        return sorted(found, key=lambda process: int(process.environ()["RANK"]))

    def launcher(self) -> psutil.Process:
        """Its process 1."""
        return next(p for p in self._below() if "trainer_launch" in p.cmdline())

    def end(self) -> None:
        """Take the pod away for good."""
        self._ending.set()
        for process in self._below():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.kill()
        self._thread.join(10)

    def _below(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []

    def _start(self):
        self.starts += 1
        return self.host.start(self._argv, self._env)

    def _look_after(self) -> None:
        while True:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                self.lines.append(line)
            self.codes.append(self._process.wait())
            self._process.stdout.close()
            if self.succeeded or self._ending.wait(RESTART_S):
                return
            self.before_restart()
            self._process = self._start()


class Job:
    """A job of one pod per host."""

    def __init__(
        self, machines: Sequence[Host], argv: Sequence[str], env_of: Callable[[int], Mapping[str, str]]
    ) -> None:
        self.machines = machines
        self.pods: list[Pod] = []
        self._argv, self._env_of = argv, env_of

    def start_next(self) -> Pod:
        """Start the pod of the next host."""
        number = len(self.pods)
        self.pods.append(Pod(self.machines[number], self._argv, self._env_of(number)))
        return self.pods[-1]

    def move(self, number: int, address: str) -> None:
        """Give a host another address, and tell all hosts."""
        self.machines[number].moves_to(address)
        names = {machine.name: machine.address for machine in self.machines}
        for machine in self.machines:
            machine.knows(names)


@contextlib.contextmanager
def job(
    names: Sequence[str], script: str, env_of: Callable[[int], Mapping[str, str]], *options: str, at_first: int = 99
) -> Iterator[Job]:
    """Start the first `at_first` pods of a job; all pods are gone afterwards."""
    argv = (*LAUNCHER, "run", "--prefix", "--grace", "5", *options, "--", script)
    with hosts(*names) as machines:
        made = Job(machines, argv, env_of)
        try:
            for _ in machines[:at_first]:
                made.start_next()
            yield made
        finally:
            for pod in made.pods:
                pod.end()


def wait_until(condition: Callable[[], object], what: str, pods: Sequence[Pod], deadline_s: float) -> None:
    """Wait for a condition; at the deadline fail with all that the pods have said."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            said = "\n".join(f"--- {pod.host.name} {pod.codes}\n{''.join(pod.lines[-60:])}" for pod in pods)
            raise AssertionError(f"still waiting after {deadline_s} s for: {what}\n{said}")
        time.sleep(0.02)  # the pace of asking; the condition decides


def step_of(folder: Path) -> int:
    """The step of the job's checkpoint, 0 before there is one."""
    try:
        return int((folder / "checkpoint").read_text())
    except (OSError, ValueError):
        return 0
