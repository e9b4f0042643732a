"""A tiny kubelet over the tests' hosts: it starts each pod, and again some seconds after it has failed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from tests.cli.launching import LAUNCHER
from tests.conftest import require
from tests.hosts import network
from tests.hosts.loopback import LoopbackHost
from tests.hosts.network import Host
from tests.ports import free_port
from tests.waiting import eventually

RESTART_S = 3.0  # what a kubelet waits before it starts a failed container again
GRACE_S = 30.0  # Kubernetes' own terminationGracePeriodSeconds
AnyHost = Host | LoopbackHost


class Pod:
    """One pod: how often it was started, how each start ended, and all that it said. Its files are in `folder`."""

    def __init__(
        self, host: AnyHost, argv: Sequence[str], env: Mapping[str, str], folder: Path, restart_s: float
    ) -> None:
        self.host = host
        self.codes: list[int] = []
        self.last_words: list[str] = []  # for each end
        self.started_s: list[float] = []
        self.lines: list[str] = []
        self.before_restart: Callable[[], None] = lambda: None
        self.restart_s = restart_s  # what it is away for when it has failed
        self._folder = folder
        self._last_words = folder / f"last-words-{host.name}"
        self._argv, self._env = argv, {"TRAINER_LAUNCH_TERMINATION_LOG": str(self._last_words), **env}
        self._ending = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._look_after, daemon=True)
        self._thread.start()

    @property
    def starts(self) -> int:
        """How often it was started; 1 is untouched."""
        return len(self.started_s)

    @property
    def succeeded(self) -> bool:
        """Whether it has ended with 0."""
        return bool(self.codes) and self.codes[-1] == 0

    @property
    def is_gone(self) -> bool:
        """Whether it was taken away for good."""
        return self._ending.is_set()

    def workers(self) -> list[psutil.Process]:
        """Its training processes by local rank: those that `train.py` has named by their number in the pod."""
        found = []
        for path in sorted(self._folder.glob(f"worker-{self.host.name}-*[0-9]")):
            number = path.read_text()
            found += [process for process in self._below() if _number_inside(process) == number]
        return found

    def launcher(self) -> psutil.Process:
        """Its process 1."""
        return self.host.process_1(self._process)

    def kill(self) -> None:
        """End it as a node does that loses its power; the kubelet starts it again."""
        self.host.kill(self._process)

    def stop(self) -> None:
        """Ask it to stop, as an eviction does: what has not ended when the grace period is over is killed."""
        process = self._process
        self.launcher().send_signal(signal.SIGTERM)
        threading.Thread(target=self._kill_late, args=(process,), daemon=True).start()

    def _kill_late(self, process: subprocess.Popen[str]) -> None:
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.host.kill(process)

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

    def _start(self) -> subprocess.Popen[str]:
        self._last_words.unlink(missing_ok=True)
        for path in self._folder.glob(f"worker-{self.host.name}-*"):
            path.unlink()
        self.started_s.append(time.monotonic())
        return self.host.start(self._argv, self._env)

    def _look_after(self) -> None:
        while True:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                self.lines.append(line)
            code = self._process.wait()
            self._process.stdout.close()
            self.last_words.append(self._last_words.read_text() if self._last_words.exists() else "")
            self.codes.append(code if code >= 0 else 128 - code)  # as a container's runtime says it
            if self.succeeded or self._ending.wait(self.restart_s):
                return
            self.before_restart()
            self._process = self._start()


class Job:
    """A job of one pod per host. All that it writes is in `folder`."""

    def __init__(
        self,
        machines: Sequence[AnyHost],
        argv: Sequence[str],
        env_of: Callable[[int], Mapping[str, str]],
        folder: Path,
        restart_s: float,
    ) -> None:
        self.machines = machines
        self.pods: list[Pod] = []
        self.folder = folder
        self._argv, self._env_of, self._restart_s = argv, env_of, restart_s

    def start_next(self) -> Pod:
        """Start the pod of the next host."""
        number = len(self.pods)
        env = self._env_of(number)
        self.pods.append(Pod(self.machines[number], self._argv, env, self.folder, self._restart_s))
        return self.pods[-1]

    def move(self, number: int) -> None:
        """Give a host another address, and tell all hosts."""
        machines = [machine for machine in self.machines if isinstance(machine, Host)]
        last = int(machines[number].address.rpartition(".")[2])
        machines[number].moves_to(f"{network.SUBNET}.{last + 100 if last < 100 else last - 100}")
        names = {machine.name: machine.address for machine in machines}
        for machine in machines:
            machine.knows(names)


@contextlib.contextmanager
def job(
    names: Sequence[str],
    script: str,
    env_of: Callable[[int], Mapping[str, str]],
    *options: str,
    at_first: int = 99,
    restart_s: float = RESTART_S,
) -> Iterator[Job]:
    """Start the first `at_first` pods of a job of ours; all pods are gone afterwards."""
    argv = (*LAUNCHER, "run", "--prefix", "--grace", "5", *options, "--", script)
    with pods_of(names, argv, env_of, Path(script).parent, at_first=at_first, restart_s=restart_s) as made:
        yield made


@contextlib.contextmanager
def pods_of(
    names: Sequence[str],
    argv: Sequence[str],
    env_of: Callable[[int], Mapping[str, str]],
    folder: Path,
    *,
    at_first: int = 99,
    restart_s: float = RESTART_S,
) -> Iterator[Job]:
    """Start the first `at_first` pods that run `argv`; all pods are gone afterwards."""
    with contextlib.ExitStack() as undo:
        if network.missing() is None:
            made = Job(undo.enter_context(network.hosts(*names)), argv, env_of, folder, restart_s)
        else:
            made = _on_loopback(names, argv, env_of, folder, restart_s)
        try:
            for _ in made.machines[:at_first]:
                made.start_next()
            yield made
        finally:
            for pod in made.pods:
                pod.end()


def wait_until(
    condition: Callable[[], object], what: str, pods: Sequence[Pod], deadline_s: float, pace_s: float = 0.02
) -> None:
    """Wait for a condition; at the deadline fail with all that the pods have said."""

    def evidence() -> str:
        said = (f"--- {pod.host.name} {pod.codes}\n{''.join(pod.lines[-60:])}" for pod in pods)
        return "\n".join((what, *said))

    eventually(condition, evidence, deadline_s, pace_s)


def step_of(folder: Path) -> int:
    """The step of the job's checkpoint, 0 before there is one."""
    try:
        return int((folder / "checkpoint").read_text())
    except (OSError, ValueError):
        return 0


def _on_loopback(
    names: Sequence[str],
    argv: Sequence[str],
    env_of: Callable[[int], Mapping[str, str]],
    folder: Path,
    restart_s: float,
) -> Job:
    """Without root: node 0 goes by its address, which stands for the name that nothing resolves."""
    is_fixed = "PET_MASTER_ADDR" in env_of(0)
    require(is_fixed, f"{network.missing()}: an elastic job's pods find node 0 by its name")
    machines = [LoopbackHost(number, name) for number, name in enumerate(names)]
    there = {"PET_MASTER_ADDR": machines[0].address, "PET_MASTER_PORT": str(free_port())}
    return Job(machines, argv, lambda number: {**env_of(number), **there}, folder, restart_s)


def _number_inside(process: psutil.Process) -> str | None:
    """A process's number in its own namespace."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return line.split()[-1]
    return None
