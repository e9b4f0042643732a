"""Looks at hosts, over real sockets of this machine."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Iterator

from trainer_launch.mpi.crew import Crew
from trainer_launch.mpi.probes import Probes
from trainer_launch.mpi.sights import Sight, Stage


class Host:
    """Listens at an address of its own; says `banner` to the first who comes, and keeps what that one said."""

    def __init__(self, address: str, banner: bytes) -> None:
        self._listener = socket.create_server((address, 0))
        self._banner = banner
        self.place = self._listener.getsockname()
        self.heard = b""
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            caller, _ = self._listener.accept()
            with caller:
                caller.sendall(self._banner)
                while data := caller.recv(4096):
                    self.heard += data

    def close(self) -> None:
        self._listener.close()


@contextlib.contextmanager
def probing(**hosts: Host) -> Iterator[Probes]:
    """Probes of hosts by the names that the job gives them."""
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as undo:
        for host in hosts.values():
            undo.callback(host.close)
        crew = Crew(2)
        selector.register(crew.fd, selectors.EVENT_READ, crew.settle)
        probes = Probes(selector, crew, 22, lambda name: None, aliases={n: h.place for n, h in hosts.items()})
        probes.watch(hosts)
        undo.callback(probes.watch, ())
        probes.turn = lambda: _turn(selector, probes)  # type: ignore[attr-defined]
        yield probes


def _turn(selector: selectors.BaseSelector, probes: Probes) -> None:
    now_s = time.monotonic()
    probes.tick(now_s)
    for key, _ in selector.select(0.05):
        key.data()


def _until(probes: Probes, name: str, stage: Stage) -> Sight:
    until_s = time.monotonic() + 30
    while probes.sights[name].stage is not stage:
        assert time.monotonic() < until_s, probes.sights
        probes.turn()  # type: ignore[attr-defined]
    return probes.sights[name]


def test_a_host_with_a_banner_is_ready_and_was_told_who_came() -> None:
    host = Host("127.0.0.41", b"SSH-2.0-OpenSSH_9.2\r\n")
    with probing(worker=host) as probes:
        _until(probes, "worker", Stage.READY)
        host.thread.join(timeout=30)
        assert host.heard.startswith(b"SSH-2.0-"), "sshd's log gives an error for who leaves without a word"


def test_what_is_no_sshd_is_told_as_that() -> None:
    with probing(worker=Host("127.0.0.42", b"x" * 5000)) as probes:
        until_s = time.monotonic() + 30
        while "no sshd" not in probes.sights["worker"].why:
            assert time.monotonic() < until_s, probes.sights
            probes.turn()  # type: ignore[attr-defined]
        assert probes.sights["worker"].stage is Stage.BANNER
