"""Probes of real sockets: how each kind of host is seen, and what is said of those that are waited for."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from tests.process.world import DEADLINE_S
from trainer_launch.host.deadline_subprocess import begin_thread
from trainer_launch.mpi import remote_hosts
from trainer_launch.mpi.remote_hosts import HostStage, Probes, Readiness, Threads, summary


class Watcher:
    """Probes with a loop."""

    def __init__(self, log_in: Callable[[str], str | None] = lambda _: None, port: int | None = 22) -> None:
        self.selector, self.threads = selectors.DefaultSelector(), Threads(4)
        self.selector.register(self.threads.fd, selectors.EVENT_READ, self.threads.settle)
        self.places: dict[str, tuple[str, int]] = {}
        self.probes = Probes(self.threads, port, log_in)

    def close(self) -> None:
        self.probes.watch([])
        self.selector.close()

    def until(self, condition: Callable[[dict[str, Readiness]], bool]) -> dict[str, Readiness]:
        until_s = time.monotonic() + DEADLINE_S
        while not condition(self.probes.readiness):
            assert time.monotonic() < until_s, self.probes.readiness
            due_s = self.probes.due_s
            wait_s = 0.1 if due_s is None else max(0.0, due_s - time.monotonic())
            for key, _ in self.selector.select(min(wait_s, 0.1)):
                key.data()
            self.probes.tick(time.monotonic())
        return self.probes.readiness


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Watcher]]:
    """Make watchers, which take hosts on loopback for others than their own."""
    monkeypatch.setattr(remote_hosts, "_is_own", lambda *_: False)
    look_up = socket.getaddrinfo
    with ExitStack() as undo:

        def make(log_in: Callable[[str], str | None] = lambda _: None, port: int | None = 22) -> Watcher:
            made = Watcher(log_in, port)
            named = lambda host, port, **how: look_up(*made.places.get(host, (host, port)), **how)  # noqa: E731
            monkeypatch.setattr(socket, "getaddrinfo", named)
            undo.callback(made.close)
            return made

        yield make


@pytest.fixture
def listen() -> Iterator[Callable[[bytes], int]]:
    """A server on loopback that says some bytes to whoever comes and hangs up, or says nothing at all and waits."""
    with ExitStack() as undo:

        def start(says: bytes) -> int:
            made = undo.enter_context(socket.create_server(("127.0.0.1", 0)))
            closing = undo.enter_context(ExitStack())

            def serve() -> None:
                with suppress(OSError):
                    while True:
                        met = closing.enter_context(made.accept()[0])
                        with suppress(OSError):  # whoever comes hangs up when it likes
                            if says:
                                met.sendall(says)
                                met.shutdown(socket.SHUT_RDWR)

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            undo.callback(thread.join)
            undo.callback(made.shutdown, socket.SHUT_RDWR)
            return int(made.getsockname()[1])

        yield start


def test_hosts_are_told_apart_by_what_they_lack(
    listen: Callable[[bytes], int], watch: Callable[..., Watcher]
) -> None:
    watcher = watch()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        watcher.places |= {
            "well": ("127.0.0.1", listen(b"SSH-2.0-test\r\n")),
            "web": ("127.0.0.1", listen(b"HTTP/1.1 400 Bad Request\r\n\r\n")),
            "refused": ("127.0.0.1", unused.getsockname()[1]),
            "nameless": ("no-such-host.invalid", 22),
        }
        watcher.probes.watch(watcher.places)
        seen = watcher.until(
            lambda s: (
                s["well"].stage is HostStage.READY and "not sshd" in s["web"].why and "refused" in s["refused"].why
            )
        )
        assert seen["refused"].stage is HostStage.PORT
        assert seen["web"].stage is HostStage.BANNER
        assert seen["nameless"].stage is HostStage.DNS


def test_a_host_that_has_to_let_us_in_is_ready_only_then(
    listen: Callable[[bytes], int], watch: Callable[..., Watcher]
) -> None:
    answers = ["Permission denied (publickey).", None]
    watcher = watch(lambda _: answers.pop(0))
    watcher.places["a"] = ("127.0.0.1", listen(b"SSH-2.0-test\r\n"))
    watcher.probes.watch(["a"], check_keys=True)
    watcher.until(lambda s: s["a"].stage is HostStage.KEY and "denied" in s["a"].why)
    watcher.until(lambda s: s["a"].stage is HostStage.READY)
    assert answers == []


def test_where_no_more_threads_may_start_hosts_are_looked_at_later(
    listen: Callable[[bytes], int], watch: Callable[..., Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a pod's limit of processes: the launcher goes on."""
    watcher, refusals = watch(), [None]
    refuse = lambda *how: refusals.pop() if refusals else begin_thread(*how)  # noqa: E731
    monkeypatch.setattr(remote_hosts, "begin_thread", refuse)
    watcher.places["a"] = ("127.0.0.1", listen(b"SSH-2.0-test\r\n"))
    watcher.probes.watch(["a"])
    watcher.until(lambda s: s["a"].stage is HostStage.READY)
    assert refusals == []


def test_hosts_that_are_reached_without_ssh_need_a_name_and_no_more(watch: Callable[..., Watcher]) -> None:
    watcher = watch(lambda _: "there is no ssh", port=None)
    watcher.probes.watch(["127.7.7.7", "none.invalid"], check_keys=True)
    seen = watcher.until(lambda s: s["127.7.7.7"].stage is HostStage.READY and s["none.invalid"] != Readiness())
    assert seen["none.invalid"].stage is HostStage.DNS


SEEN = {
    "a.job": Readiness(HostStage.READY, ""),
    "b.job": Readiness(HostStage.PORT, "Connection refused"),
    "c.job": Readiness(HostStage.DNS, "Name or service not known"),
    "d.job": Readiness(HostStage.KEY, "Permission denied (publickey)."),
}


def test_one_line_says_which_hosts_are_missing_and_why() -> None:
    assert summary(SEEN, most=2) == (
        "1 of 4 hosts ready; waiting for b.job (port: Connection refused); "
        "c.job (DNS: Name or service not known); and 1 more"
    )
