"""Asks all hosts at once, over ssh, and hears who calls back; each question ends by its deadline."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from trainer_launch.host.deadline_subprocess import Ended, run
from trainer_launch.host.network import free_port
from trainer_launch.model import PortRange

AT_ONCE = 64  # sessions under way; PRRTE has 128
_LINE_BYTES = 400
_BACKLOG = 512
_CALLERS = 512  # that are heard at once
_HEAR_S = 2.0  # for one line of who has called


def everywhere(
    hosts: Sequence[str], argv: Callable[[str], Sequence[str]], env: Mapping[str, str], limit_s: float
) -> dict[str, Ended]:
    """Run a command for each host, at most AT_ONCE at a time, each for at most `limit_s`."""
    if not hosts:
        return {}
    with ThreadPoolExecutor(max_workers=min(AT_ONCE, len(hosts))) as pool:
        return dict(zip(hosts, pool.map(lambda host: run(argv(host), env, limit_s), hosts), strict=True))


class Ear:
    """Listens on a port of its own, `among` those allowed, for hosts that call back with `TOKEN HOST`.

    Raises NodeError where none of these is free.
    """

    def __init__(self, token: str, among: PortRange | None = None) -> None:
        self._token = token
        self.heard: dict[str, str] = {}  # host: from which address
        self._room = threading.BoundedSemaphore(_CALLERS)  # anybody may call
        self._listener = _listening(0 if among is None else free_port(among))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(_HEAR_S)

    def _listen(self) -> None:
        while True:
            try:
                made, address = self._listener.accept()
            except OSError:
                return
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._hear, args=(made, str(address[0])), daemon=True).start()
            else:
                made.close()

    def _hear(self, made: socket.socket, address: str) -> None:
        """One line, and a byte in return so that the other side knows that it was we who answered."""
        until_s, said = time.monotonic() + _HEAR_S, b""
        with contextlib.closing(made), contextlib.ExitStack() as over, contextlib.suppress(OSError):
            over.callback(self._room.release)
            while not said.endswith(b"\n") and len(said) < _LINE_BYTES:
                made.settimeout(max(0.01, until_s - time.monotonic()))
                data = made.recv(_LINE_BYTES)
                if not data or time.monotonic() > until_s:
                    return
                said += data
            token, _, host = said.decode("ascii", "replace").strip().partition(" ")
            if token == self._token:
                self.heard.setdefault(host, address)
                made.sendall(b".")


def _listening(port: int) -> socket.socket:
    """On all addresses of both families, where there are both."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


def ways_back(hosts: Iterable[str], source_to: Callable[[str], str], most: int = 3) -> tuple[str, ...]:
    """Our own addresses that hosts would see: those from which packets to them go, without loopback's."""
    found: dict[str, None] = {}
    for host in hosts:
        with contextlib.suppress(OSError):
            source = source_to(host)
            if not source.startswith("127.") and source != "::1":
                found[source] = None
        if len(found) == most:
            break
    return tuple(found)
