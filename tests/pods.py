"""Pods of tests: the product's own emulator of pods, driven from a test, with the restarts of a kubelet.

A `Host` is the place of a pod: its network, names, /dev/shm and TMPDIR. A `Pod` runs one command there, and again
some seconds after it has failed. A `Job` has a pod on each host. Without root the hosts are on loopback: plain
processes with a host name in their environment. There nothing can move, be cut off, or look up a name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from msgspec.structs import replace

from tests.cli.launching import LAUNCHER, clean_env
from tests.conftest import require
from tests.ports import free_port
from tests.waiting import eventually
from trainer_launch.model import Process
from trainer_launch.rehearsal.controllers import local_jobs
from trainer_launch.rehearsal.pod_isolation import DEVICE, OwnNetwork

RESTART_S = 3.0  # what a kubelet waits before it starts a failed container again
GRACE_S = 30.0  # Kubernetes' own terminationGracePeriodSeconds


def missing() -> str | None:
    """What pods with a network of their own need and this machine does not give."""
    if os.geteuid() == 0 and shutil.which("ip") and shutil.which("unshare"):
        return None
    return "needs root, iproute2, util-linux"


class MovingNetwork(OwnNetwork):
    """A network whose pods can get another address, as pods do that are made again."""

    def move(self, pod: str) -> None:
        """Give the pod an address in the next of 100 networks, which all pods' /etc/hosts then have."""
        old = self._places[pod]
        first, second, rest = old.address.split(".", 2)
        self._places[pod] = place = replace(old, address=f"{first}.{77 + (int(second) - 76) % 100}.{rest}")
        self._route(f"route del {old.address}/32", f"route add {place.address}/32 dev {place.port}")
        commands = "\n".join((f"addr flush dev {DEVICE}", *place.plug()))
        subprocess.run((*place.enter("net"), "ip", "-batch", "-"), input=commands, text=True, check=True)
        self.write_names()


class Host:
    """The place of a pod; programs started in it run as process 1."""

    def __init__(
        self, name: str, number: int, folder: Path, network: MovingNetwork | None, shm_bytes: int | None
    ) -> None:
        self.name, self.network = name, network
        self.tmp = folder / name / "tmp"
        self.started: list[subprocess.Popen[str]] = []
        self._number, self._hosts_file = number, folder / name / "hosts"
        self.tmp.mkdir(parents=True)
        self.tmp.chmod(0o1777)  # as /tmp is
        if network is not None:
            network.add(name, number, (name,), shm_bytes)

    @property
    def address(self) -> str:
        """Its address now."""
        return local_jobs.address_of(self._number) if self.network is None else self.network.address(self.name)

    def enter(self, *kinds: str) -> tuple[str, ...]:
        """What runs a program in its namespaces of these kinds, or in all; nothing on loopback."""
        return () if self.network is None else self.network.enter(self.name, *kinds)

    def knows(self, names: Mapping[str, str]) -> None:
        """Write other names and addresses into its /etc/hosts, in place."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
        self._hosts_file.write_text("\n".join(lines) + "\n")

    def move(self) -> None:
        """Give it another address, as a pod has that was made again; all hosts know it by that."""
        self._own_network.move(self.name)

    def unplug(self) -> None:
        """Lose all packets from and to it."""
        self._own_network.cut_off(self.name)

    def plug(self) -> None:
        """Undo `unplug`."""
        self._own_network.reconnect(self.name)

    @property
    def _own_network(self) -> MovingNetwork:
        assert self.network is not None, missing()
        return self.network

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a program as process 1; several may run at once, as a pod's containers do."""
        own = {"HOSTNAME": self.name, "TMPDIR": str(self.tmp)}
        if self.network is None:
            own["GLOO_SOCKET_IFNAME"] = "lo"
        else:
            argv = self.network.wrap(self.name, Process(name=self.name, argv=tuple(argv), env={})).argv
        started = subprocess.Popen(
            argv,
            env=clean_env({**own, **env}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(started)
        return started

    def process_1(self, started: subprocess.Popen[str]) -> psutil.Process:
        """The program that was started. Raises psutil.NoSuchProcess: it has ended."""
        outer = psutil.Process(started.pid)
        if self.network is None:
            return outer
        below = eventually(lambda: outer.children() or started.poll() is not None, f"{self.name} starts")
        if isinstance(below, bool):
            raise psutil.NoSuchProcess(started.pid)
        return below[0]

    def kill(self, started: subprocess.Popen[str]) -> None:
        """Kill process 1, and all that it has started."""
        program = self.process_1(started)
        for process in (program, *(program.children(recursive=True) if self.network is None else ())):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def processes(self) -> list[psutil.Process]:
        """All that runs here."""
        alive = [psutil.Process(started.pid) for started in self.started if started.poll() is None]
        return [process for outer in alive for process in outer.children(recursive=True)]

    def close(self) -> None:
        """End what runs here; nothing stays as a zombie, or with an open pipe."""
        for started in self.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(started.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            started.kill()
            with contextlib.suppress(ValueError, subprocess.TimeoutExpired):  # it was read to its end already
                started.communicate(timeout=10)


@contextlib.contextmanager
def hosts(*names: str, on_loopback: bool = False, shm_bytes: int | None = None) -> Iterator[list[Host]]:
    """Make one host for each name, all knowing each other; all is gone afterwards.

    Each has a /dev/shm of `shm_bytes`, by default what a pod gets.
    """
    require(on_loopback or missing() is None, str(missing()))
    with contextlib.ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="pods-", ignore_cleanup_errors=True)))
        folder.chmod(0o755)
        network = None if on_loopback else undo.enter_context(contextlib.closing(MovingNetwork(folder)))
        made = []
        for number, name in enumerate(names):
            made.append(Host(name, number, folder, network, shm_bytes))
            undo.callback(made[-1].close)
        if network is not None:
            network.write_names()
        yield made


class Pod:
    """How often its command was started, how each start ended, and all that it said. Its files are in `folder`."""

    def __init__(
        self, host: Host, argv: Sequence[str], env: Mapping[str, str], folder: Path, restart_s: float
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
        self._ending, self._away_no_more = threading.Event(), threading.Event()
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
        below = [(process, _number_inside(process)) for process in self._below()]
        files = sorted(self._folder.glob(f"worker-{self.host.name}-*[0-9]"))
        return [process for path in files for process, number in below if number == path.read_text()]

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

    def come_back(self) -> None:
        """Let the kubelet start it again now."""
        self._away_no_more.set()

    def end(self) -> None:
        """Take the pod away for good."""
        self._ending.set()
        self._away_no_more.set()
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
            if self.succeeded:
                return
            self._away_no_more.wait(self.restart_s)
            if self.is_gone:
                return
            self._away_no_more.clear()
            self.before_restart()
            for path in self.host.tmp.iterdir():  # a container that is started again has an empty /tmp
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            self._process = self._start()


class Job:
    """A job of one pod per host. All that it writes is in `folder`."""

    def __init__(
        self,
        places: Sequence[Host],
        argv: Sequence[str],
        env_of: Callable[[int], Mapping[str, str]],
        folder: Path,
        restart_s: float,
    ) -> None:
        self.hosts, self.folder = places, folder
        self.pods: list[Pod] = []
        self._argv, self._env_of, self._restart_s = argv, env_of, restart_s

    def start_next(self) -> Pod:
        """Start the pod of the next host."""
        number = len(self.pods)
        self.pods.append(Pod(self.hosts[number], self._argv, self._env_of(number), self.folder, self._restart_s))
        return self.pods[-1]


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
    why = missing()
    require(why is None or "PET_MASTER_ADDR" in env_of(0), f"{why}: an elastic job's pods find node 0 by its name")
    with hosts(*names, on_loopback=why is not None) as places:
        # On loopback node 0 goes by its address, which stands for the name that nothing resolves.
        there = {"PET_MASTER_ADDR": places[0].address, "PET_MASTER_PORT": str(free_port())} if why else {}
        made = Job(places, argv, lambda number: {**env_of(number), **there}, folder, restart_s)
        try:
            for _ in places[:at_first]:
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
        output = (f"--- {pod.host.name} {pod.codes}\n{''.join(pod.lines[-60:])}" for pod in pods)
        return "\n".join((what, *output))

    eventually(condition, evidence, deadline_s, pace_s)


def of_the_fork_server(launcher: psutil.Process, *, is_store: bool) -> psutil.Process:
    """The fork server, which has one thread, or its fork that serves the store; either may be the older one."""
    found = [process for process in launcher.children() if "fork_server" in " ".join(process.cmdline())]
    return next(process for process in found if (process.num_threads() > 1) == is_store)


def _number_inside(process: psutil.Process) -> str | None:
    """A process's number in its own namespace."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return line.split()[-1]
    return None
