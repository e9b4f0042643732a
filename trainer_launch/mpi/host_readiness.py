"""Looks for all hosts at once whether each would take a daemon: its name, its port, its banner, its key.

Sockets belong to the caller's selector; only names are asked for in threads. A host that has shown its banner is
not asked again: sshd counts those who come and do not log in.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
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
from trainer_launch.model.units import counted, listed

_CONNECT_S = 2.0
_BANNER_S = 4.0  # sshd looks the name of its caller up before it says anything, where UseDNS is on
_RESOLVE_AGAIN_S = 2.0  # a pod that was made again has another address
_PAUSE_S = 0.1
_REST_S = 1.0  # likewise, while the job runs without them
_PER_SECOND = 500  # attempts for all hosts together
_KEY_PAUSE_S = 2.0
_SPARE_S = 1.0  # of waiting, after which keys are tried of those that are there already
_SPARE_AT_ONCE = 2
_OWN_BANNER = b"SSH-2.0-trainer_launch_probe\r\n"  # to who leaves without one, sshd's log gives an error each time
_BANNER_BYTES = 4096

Address = tuple[int, tuple[object, ...]]  # family, and what connect takes
LogIn = Callable[[str], "str | None"]  # blocks; why a host does not let us in, None: it does


class _Target:
    """One host, and the attempt that is under way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reached = Readiness()  # what the last attempt came to; one under way can only be further than that
        self.stage = Stage.DNS  # of the attempt under way
        self.next_s = 0.0
        self.addresses: tuple[Address, ...] = ()
        self.resolved_s = 0.0
        self.tried = 0
        self.socket: socket.socket | None = None
        self.until_s = 0.0
        self.heard = b""
        self.busy = False  # a thread works for it
        self.let_in = False


class Probes:
    """The hosts that are looked at, and what was seen; without a port their names are all that can be looked at."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        threads: Threads,
        port: int | None,
        log_in: LogIn,
        *,
        over_ssh: bool = True,
    ) -> None:
        self._selector, self._threads, self._port = selector, threads, port
        self._log_in, self._over_ssh = log_in, over_ssh
        self._targets: dict[str, _Target] = {}
        self._must_log_in = not over_ssh
        self._since_s = 0.0
        self._at_rest = False
        self.changed = False

    def watch(self, hosts: Iterable[str], afresh: Iterable[str] = (), *, check_keys: bool = False) -> None:
        """Look at these hosts from now on; those `afresh` have to pass everything again."""
        wanted, forgotten = list(hosts), set(afresh)
        for name in [*self._targets]:
            if name not in wanted or name in forgotten:
                self._close(self._targets.pop(name))
        self._targets = {name: self._targets.get(name) or _Target(name) for name in wanted}
        self._must_log_in = check_keys or not self._over_ssh
        self._since_s, self._at_rest = time.monotonic(), False
        self.changed = True

    def rest(self) -> None:
        """The job runs: look seldom at those that are not in it, and try no keys."""
        self._at_rest = True

    @property
    def readiness(self) -> dict[str, Readiness]:
        """What was seen of each host, in the order in which they were named."""
        return {name: target.reached for name, target in self._targets.items()}

    @property
    def due_s(self) -> float | None:
        """When to `tick` next; None: nothing is due."""
        times = [
            t.until_s if t.socket else t.next_s for t in self._targets.values() if self._is_open(t) and not t.busy
        ]
        spare = [self._since_s + _SPARE_S] if self._spare() else []
        return min((at_s for at_s in (*times, *spare)), default=None)

    def tick(self, now_s: float) -> None:
        """Begin what is due, and give up what takes too long."""
        for target in self._targets.values():
            if target.socket is not None and now_s >= target.until_s:
                why = "no answer" if target.stage is Stage.PORT else f"silent for {_BANNER_S:g} s"
                self._fail(target, Readiness(target.stage, why), now_s)
            elif self._is_open(target) and not target.busy and not target.socket and now_s >= target.next_s:
                self._attempt(target, now_s)
        if now_s >= self._since_s + _SPARE_S:
            for target in self._spare():
                self._try_key(target)

    # -- attempts -----------------------------------------------------------------------------

    def _is_open(self, target: _Target) -> bool:
        return target.reached.stage is not Stage.READY

    def _attempt(self, target: _Target, now_s: float) -> None:
        if target.reached.stage is Stage.KEY or not self._over_ssh:
            self._try_key(target)
        elif not target.addresses or now_s - target.resolved_s > _RESOLVE_AGAIN_S:
            target.busy = True
            self._threads.submit(partial(self._resolve, target))
        else:
            self._connect(target, now_s)

    def _resolve(self, target: _Target) -> Done:
        """In a thread."""
        try:
            found = socket.getaddrinfo(target.name, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as problem:
            return partial(self._resolved, target, (), False, getattr(problem, "strerror", None) or str(problem))
        addresses = tuple((family, address) for family, _, _, _, address in found)
        return partial(self._resolved, target, addresses, _is_own(addresses, target.name), "")

    def _resolved(self, target: _Target, addresses: tuple[Address, ...], is_here: bool, why: str) -> None:
        target.busy = False
        if self._targets.get(target.name) is not target or not self._is_open(target):
            return
        now_s = time.monotonic()
        target.addresses, target.resolved_s = addresses, now_s
        if not addresses:
            self._fail(target, Readiness(Stage.DNS, why), now_s)
        elif is_here or self._port is None:  # mpirun starts ranks on its own host itself
            target.let_in = True
            self._pass(target, Stage.READY)
        else:
            self._connect(target, now_s)

    def _connect(self, target: _Target, now_s: float) -> None:
        family, address = target.addresses[target.tried % len(target.addresses)]
        target.tried += 1
        self._reach(target, Stage.PORT, "no answer yet")
        try:
            made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError as problem:
            self._fail(target, Readiness(Stage.PORT, str(problem.strerror)), now_s)
            return
        target.socket, target.until_s, target.heard = made, now_s + _CONNECT_S, b""
        code = made.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            self._fail(target, Readiness(Stage.PORT, os.strerror(code)), now_s)
            return
        self._selector.register(made, selectors.EVENT_WRITE, partial(self._connected, target))

    def _connected(self, target: _Target) -> None:
        made, now_s = target.socket, time.monotonic()
        if made is None:
            return
        code = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._fail(target, Readiness(Stage.PORT, os.strerror(code)), now_s)
            return
        self._reach(target, Stage.BANNER, "no banner yet")
        target.until_s = now_s + _BANNER_S
        self._selector.modify(made, selectors.EVENT_READ, partial(self._readable, target))

    def _readable(self, target: _Target) -> None:
        made, now_s = target.socket, time.monotonic()
        if made is None:
            return
        try:
            data = made.recv(_BANNER_BYTES)
        except OSError as problem:
            self._fail(target, Readiness(Stage.BANNER, str(problem.strerror)), now_s)
            return
        target.heard += data
        if b"SSH-" in target.heard and b"\n" in target.heard.partition(b"SSH-")[2]:
            with contextlib.suppress(OSError):
                made.send(_OWN_BANNER)
            self._pass(target, Stage.KEY if self._must_log_in and not target.let_in else Stage.READY)
        elif not data or len(target.heard) > _BANNER_BYTES:
            why = "what listens there is no sshd" if target.heard else "it closes connections at once"
            self._fail(target, Readiness(Stage.BANNER, why), now_s)

    # -- keys ---------------------------------------------------------------------------------

    def _spare(self) -> list[_Target]:
        """Whose keys may be tried while others are still missing: that costs the start nothing."""
        if self._at_rest or not any(map(self._is_open, self._targets.values())):
            return []
        there = [t for t in self._targets.values() if not self._is_open(t) and not t.let_in]
        at_once = _SPARE_AT_ONCE - sum(target.busy for target in there)
        return [target for target in there if not target.busy and target.addresses][: max(0, at_once)]

    def _try_key(self, target: _Target) -> None:
        target.busy = True

        def work() -> Done:
            why = self._log_in(target.name)
            return partial(self._tried, target, why)

        self._threads.submit(work)

    def _tried(self, target: _Target, why: str | None) -> None:
        target.busy = False
        if self._targets.get(target.name) is not target:
            return
        target.let_in = why is None
        if why is None:
            self._pass(target, Stage.READY)
        else:
            self._fail(target, Readiness(Stage.KEY, why), time.monotonic(), _KEY_PAUSE_S)

    # -- ends of attempts ---------------------------------------------------------------------

    def _reach(self, target: _Target, stage: Stage, why: str) -> None:
        target.stage = stage
        if target.reached.stage < stage:
            target.reached = Readiness(stage, why)

    def _pass(self, target: _Target, stage: Stage) -> None:
        self._close(target)
        self.changed |= stage is not target.reached.stage
        target.reached = Readiness(stage, "" if stage is Stage.READY else "logging in")
        target.next_s = 0.0

    def _fail(self, target: _Target, reached: Readiness, now_s: float, pause_s: float = 0.0) -> None:
        self._close(target)
        self.changed |= reached != target.reached
        target.reached = reached
        usual_s = _REST_S if self._at_rest else max(_PAUSE_S, len(self._targets) / _PER_SECOND)
        target.next_s = now_s + max(pause_s, usual_s)

    def _close(self, target: _Target) -> None:
        if target.socket is not None:
            if target.socket.fileno() in self._selector.get_map():
                self._selector.unregister(target.socket)
            target.socket.close()
            target.socket = None


def _is_own(addresses: tuple[Address, ...], host: str) -> bool:
    """Whether ranks there are started without ssh; the pods of a rehearsal have loopback addresses of their own."""
    first = str(addresses[0][1][0]) if addresses else ""
    return first in ("127.0.0.1", "::1") or (not first.startswith("127.") and network.is_here(host))


# -- how far each host has come ----------------------------------------------------------------


class Stage(IntEnum):
    """What a host has to pass, in order."""

    DNS = 0
    PORT = 1
    BANNER = 2
    KEY = 3
    READY = 4


class Readiness(Struct, frozen=True):
    """The stage that a host has not passed yet, and why."""

    stage: Stage = Stage.DNS
    why: str = "not asked yet"

    def __str__(self) -> str:
        return "ready" if self.stage is Stage.READY else f"{_NAMES[self.stage]}: {self.why}"


_NAMES = {Stage.DNS: "DNS", Stage.PORT: "port", Stage.BANNER: "banner", Stage.KEY: "key", Stage.READY: "ready"}


def summary(readiness: Mapping[str, Readiness], most: int = 5) -> str:
    """One line for a log."""
    stuck = [(host, reached) for host, reached in readiness.items() if reached.stage is not Stage.READY]
    words = listed([f"{host} ({reached})" for host, reached in stuck], most, "; ")
    return f"{len(readiness) - len(stuck)} of {counted(len(readiness), 'host')} ready; waiting for {words}"


def stuck(readiness: Mapping[str, Readiness]) -> dict[str, str]:
    """Where each host that is not ready is stuck."""
    return {host: str(reached) for host, reached in readiness.items() if reached.stage is not Stage.READY}


def ready(readiness: Mapping[str, Readiness]) -> frozenset[str]:
    """Who has passed everything."""
    return frozenset(host for host, reached in readiness.items() if reached.stage is Stage.READY)


# -- calls that may block ----------------------------------------------------------------------


Done: TypeAlias = Callable[[], None]  # called in the main loop
Work: TypeAlias = Callable[[], Done]

_STACK_BYTES = 256 * 1024


class Threads:
    """Daemon threads, so that one that hangs keeps nobody alive; `fd` is readable when something was found."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._threads = 0
        self._idle = 0
        self._lock = threading.Lock()
        self._work: SimpleQueue[Work] = SimpleQueue()
        self._found: SimpleQueue[Done] = SimpleQueue()
        self.fd, self._post = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def submit(self, work: Work) -> None:
        """Let a thread do `work`; what it returns is called in the main loop."""
        with self._lock:
            self._idle -= 1
            if self._idle < 0 and self._threads < self._size:
                self._threads += 1
                threading.stack_size(_STACK_BYTES)
                threading.Thread(target=self._labour, daemon=True).start()
        self._work.put(work)

    def post(self, done: Done) -> None:
        """Have `done` called in the main loop; from any thread."""
        self._found.put(done)
        with contextlib.suppress(BlockingIOError):  # full: its reader is due to wake up anyway
            os.write(self._post, b".")

    def settle(self) -> None:
        """In the main loop: call what was found."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 65536)
        while True:
            try:
                done = self._found.get_nowait()
            except Empty:
                return
            done()

    def _labour(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            self.post(self._work.get()())
