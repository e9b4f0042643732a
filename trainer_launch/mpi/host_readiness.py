"""How far each host of the job is, from whether it would take a daemon: its name, its port, its banner, its key.

Each host is looked at in threads, until it is ready. One that has shown its banner is not asked again: sshd counts
those who come and do not log in.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeAlias

from msgspec import Struct

from trainer_launch.host import network
from trainer_launch.host.deadline_subprocess import begin_thread
from trainer_launch.model.units import counted, listed

_CONNECT_S = 1.2  # less than `RemoteHosts.ask_s`: who is asked and gives no answer has had it by then
_BANNER_S = 4.0  # sshd looks the name of its caller up before it says anything, where UseDNS is on
_PAUSE_S = 0.1  # between two attempts
_REST_S = 1.0  # likewise, while the job runs without them
_PER_SECOND = 500  # attempts for all hosts together
_KEY_PAUSE_S = 2.0
_OWN_BANNER = b"SSH-2.0-trainer_launch_probe\r\n"  # to who leaves without one, sshd's log gives an error each time
_BANNER_BYTES = 4096
_STACK_BYTES = 256 * 1024

LogIn: TypeAlias = Callable[[str], "str | None"]  # blocks; why a host does not let us in, None: it does
Done: TypeAlias = Callable[[], None]  # called in the main loop
Work: TypeAlias = Callable[[], Done]


class HostStage(IntEnum):
    """The stages that a host has to pass, in order."""

    DNS = 0
    PORT = 1
    BANNER = 2
    KEY = 3
    READY = 4


_NAMES = {HostStage.DNS: "DNS", HostStage.PORT: "port", HostStage.BANNER: "banner", HostStage.KEY: "key"}


class Readiness(Struct, frozen=True):
    """The stage that a host has not passed yet, and why."""

    stage: HostStage = HostStage.DNS
    why: str = "not asked yet"

    def __str__(self) -> str:
        return "ready" if self.stage is HostStage.READY else f"{_NAMES[self.stage]}: {self.why}"


def summary(readiness: Mapping[str, Readiness], most: int = 5) -> str:
    """How many hosts are ready and what the others wait for, as a line of the log."""
    missing = stuck(readiness)
    words = listed([f"{host} ({why})" for host, why in missing.items()], most, "; ")
    return f"{len(readiness) - len(missing)} of {counted(len(readiness), 'host')} ready; waiting for {words}"


def stuck(readiness: Mapping[str, Readiness]) -> dict[str, str]:
    """Where each host that is not ready is stuck."""
    return {host: str(reached) for host, reached in readiness.items() if reached.stage is not HostStage.READY}


def ready(readiness: Mapping[str, Readiness]) -> frozenset[str]:
    """The hosts that have passed all stages."""
    return frozenset(host for host, reached in readiness.items() if reached.stage is HostStage.READY)


class _Target:
    """A host, and the attempt that is under way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reached = Readiness()  # what the last attempt came to; one under way can only be further than that
        self.address = ""  # that it was last looked for at
        self.next_s = 0.0
        self.tried = 0
        self.is_busy = False  # a thread works for it

    @property
    def is_due(self) -> bool:
        """Whether the host is not ready, and no attempt is under way."""
        return self.reached.stage is not HostStage.READY and not self.is_busy

    def reach(self, stage: HostStage, why: str) -> None:
        """An attempt has come so far; from its thread."""
        if self.reached.stage < stage:
            self.reached = Readiness(stage, why)


class Probes:
    """The hosts that are probed, and their readiness; without a port only their names can be probed."""

    def __init__(
        self,
        threads: Threads,
        port: int | None,
        log_in: LogIn = lambda _: "not asked yet",
        *,
        over_ssh: bool = True,
    ) -> None:
        self._threads, self._port, self.log_in, self._over_ssh = threads, port, log_in, over_ssh
        self._targets: dict[str, _Target] = {}
        self._must_log_in = False
        self._at_rest = False
        self.changed = False

    def watch(self, hosts: Iterable[str], afresh: Iterable[str] = (), *, check_keys: bool = False) -> None:
        """Look at these hosts from now on; those `afresh` have to pass everything again."""
        kept = {name: target for name, target in self._targets.items() if name not in set(afresh)}
        self._targets = {name: kept.get(name) or _Target(name) for name in hosts}
        self._must_log_in = check_keys
        self._at_rest, self.changed = False, True

    def rest(self) -> None:
        """The job runs: look seldom at those that are not in it."""
        self._at_rest = True

    @property
    def readiness(self) -> dict[str, Readiness]:
        """The stage of each host, in the order in which they were named."""
        return {name: target.reached for name, target in self._targets.items()}

    @property
    def addresses(self) -> dict[str, str]:
        """Where each host was found."""
        return {name: target.address for name, target in self._targets.items() if target.address}

    @property
    def due_s(self) -> float | None:
        """When to `tick` next; None: nothing is due."""
        return min((target.next_s for target in self._targets.values() if target.is_due), default=None)

    def tick(self, now_s: float) -> None:
        """Begin what is due."""
        for target in self._targets.values():
            if target.is_due and now_s >= target.next_s:
                target.is_busy = self._threads.submit(partial(self._work, target))
                target.next_s = now_s + _REST_S

    def _work(self, target: _Target) -> Done:
        """In a thread."""
        return partial(self._ended, target, self._attempt(target))

    def _ended(self, target: _Target, reached: Readiness) -> None:
        target.is_busy = False
        if self._targets.get(target.name) is not target:
            return
        self.changed |= reached != target.reached
        target.reached = reached
        usual_s = _REST_S if self._at_rest else max(_PAUSE_S, len(self._targets) / _PER_SECOND)
        target.next_s = time.monotonic() + (_KEY_PAUSE_S if reached.stage is HostStage.KEY else usual_s)

    def _attempt(self, target: _Target) -> Readiness:
        """In a thread."""
        if not self._over_ssh or target.reached.stage is HostStage.KEY:
            return self._key(target)
        try:
            addresses = socket.getaddrinfo(target.name, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as problem:
            return Readiness(HostStage.DNS, getattr(problem, "strerror", None) or str(problem))
        family, _, _, _, address = addresses[target.tried % len(addresses)]
        target.tried += 1
        target.address = str(address[0])
        if self._port is None or _is_own(str(addresses[0][4][0])):
            return Readiness(HostStage.READY, "")  # mpirun starts ranks on its own host itself
        target.reach(HostStage.PORT, "no answer yet")
        try:
            with socket.socket(family, socket.SOCK_STREAM) as connected:
                connected.settimeout(_CONNECT_S)
                connected.connect(address)
                target.reach(HostStage.BANNER, "no banner yet")
                why = banner_fault(connected)
        except TimeoutError:
            return Readiness(HostStage.PORT, "no answer")
        except OSError as problem:
            return Readiness(HostStage.PORT, str(problem.strerror))
        if why:
            return Readiness(HostStage.BANNER, why)
        if self._must_log_in:
            target.reach(HostStage.KEY, "logging in")
            return self._key(target)
        return Readiness(HostStage.READY, "")

    def _key(self, target: _Target) -> Readiness:
        why = self.log_in(target.name)
        return Readiness(HostStage.READY, "") if why is None else Readiness(HostStage.KEY, why)


def banner_fault(connected: socket.socket) -> str:
    """Why what has answered is no sshd; "": it is. Blocks."""
    until_s, text = time.monotonic() + _BANNER_S, b""
    while b"\n" not in text.partition(b"SSH-")[2]:
        try:
            connected.settimeout(max(0.001, until_s - time.monotonic()))
            data = connected.recv(_BANNER_BYTES)
        except TimeoutError:
            return f"silent for {_BANNER_S:g} s"
        except OSError as problem:
            return str(problem.strerror)
        text += data
        if not data or len(text) > _BANNER_BYTES:
            return "what listens there is not sshd" if text else "it closes connections at once"
    with contextlib.suppress(OSError):
        connected.send(_OWN_BANNER)
    return ""


def _is_own(address: str) -> bool:
    """Whether ranks there are started without ssh; the pods of a rehearsal have loopback addresses of their own."""
    return address in ("127.0.0.1", "::1") or (not address.startswith("127.") and network.is_here(address))


class Threads:
    """Daemon threads, so that one that hangs keeps nobody alive; `fd` is readable when one has an answer."""

    def __init__(self, size: int) -> None:
        self._free = threading.BoundedSemaphore(size)
        self._answers: SimpleQueue[Done] = SimpleQueue()
        self.fd, self._post = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def submit(self, work: Work) -> bool:
        """Let a thread do `work`; what it returns is called in the main loop. False: no more threads may start."""
        others_bytes = threading.stack_size(_STACK_BYTES)
        try:
            return begin_thread("hosts", self._labour, work) is not None
        finally:
            threading.stack_size(others_bytes)

    def post(self, done: Done) -> None:
        """Have `done` called in the main loop; from any thread."""
        self._answers.put(done)
        self.wake()

    def wake(self) -> None:
        """Let the main loop turn; from any thread."""
        with contextlib.suppress(BlockingIOError):  # full: its reader is due to wake up anyway
            os.write(self._post, b".")

    def settle(self) -> None:
        """In the main loop: call what threads have answered."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 65536)
        while True:
            try:
                done = self._answers.get_nowait()
            except Empty:
                return
            done()

    def _labour(self, work: Work) -> None:
        with self._free:
            self.post(work())
