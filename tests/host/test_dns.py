"""The DNS client: what a server on loopback says, and what it does not say in time."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_launch.host import dns
from trainer_launch.host.dns import Answer, Resolver

A, AAAA, CNAME = 1, 28, 5
NOERROR, SERVFAIL, NXDOMAIN, REFUSED = 0, 2, 3, 5


class Server:
    """Answers by name: a code and the types of its records; None is silence."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.settimeout(0.05)
        self.says: dict[str, tuple[int, tuple[int, ...]] | None] = {}
        self.asked: list[str] = []
        self.noise = b""  # sent before each answer
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def resolver(self, *search: str, ndots: int = 1) -> Resolver:
        return Resolver(servers=(self.socket.getsockname(),), search=search, ndots=ndots)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self.socket.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                query, caller = self.socket.recvfrom(512)
            except TimeoutError:
                continue
            labels, at = [], 12
            while query[at]:
                labels.append(query[at + 1 : at + 1 + query[at]].decode())
                at += 1 + query[at]
            (kind,) = struct.unpack_from("!H", query, at + 1)
            name = ".".join(labels)
            self.asked.append(name)
            said = self.says.get(name, (NXDOMAIN, ()))
            if said is None:
                continue
            code, kinds = said
            records = [found for found in kinds if found in (kind, CNAME)]
            head = query[:2] + struct.pack("!HHHHH", 0x8180 | code, 1, len(records), 0, 0)
            body = b"".join(b"\xc0\x0c" + struct.pack("!HHIH", found, 1, 5, 4) + b"\0\0\0\0" for found in records)
            if self.noise:
                self.socket.sendto(self.noise, caller)
            self.socket.sendto(head + query[12:] + body, caller)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ((NOERROR, (A,)), Answer.FOUND),
        ((NOERROR, (AAAA,)), Answer.FOUND),
        ((NOERROR, (CNAME, A)), Answer.FOUND),
        ((NOERROR, (CNAME,)), Answer.NO_DATA),
        ((NOERROR, ()), Answer.NO_DATA),
        ((NXDOMAIN, ()), Answer.NXDOMAIN),
        ((SERVFAIL, ()), Answer.SERVFAIL),
        ((REFUSED, ()), Answer.REFUSED),
    ],
)
def test_what_the_server_says_is_told_apart(
    server: Server, said: tuple[int, tuple[int, ...]], answer: Answer
) -> None:
    server.says["node-0.job"] = said
    assert dns.ask("node-0.job", 5.0, server.resolver()) is answer


def test_silence_is_a_timeout_that_keeps_its_limit(server: Server) -> None:
    server.says["node-0.job"] = None
    began_s = time.monotonic()
    assert dns.ask("node-0.job", 0.3, server.resolver()) is Answer.TIMEOUT
    assert time.monotonic() - began_s < 20


def test_a_port_where_nobody_is_counts_as_silence() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as gone:
        gone.bind(("127.0.0.1", 0))
        address = gone.getsockname()
    assert dns.ask("node-0.job", 0.3, Resolver(servers=(address,))) is Answer.TIMEOUT


def test_the_search_list_is_asked_first_where_the_name_has_few_dots(server: Server) -> None:
    server.says["node-0.job.team.svc.cluster.local"] = (NOERROR, (A,))
    resolver = server.resolver("team.svc.cluster.local", "svc.cluster.local", ndots=5)
    assert dns.ask("node-0.job", 5.0, resolver) is Answer.FOUND
    assert set(server.asked) == {"node-0.job.team.svc.cluster.local"}


def test_a_name_with_many_dots_is_asked_as_it_is(server: Server) -> None:
    server.says["node-0.job"] = (NOERROR, (A,))
    assert dns.ask("node-0.job", 5.0, server.resolver("svc.cluster.local")) is Answer.FOUND
    assert set(server.asked) == {"node-0.job"}


def test_a_trouble_with_one_suffix_is_not_hidden_by_another_that_denies(server: Server) -> None:
    server.says["node-0.job.team"] = (SERVFAIL, ())
    assert dns.ask("node-0.job", 5.0, server.resolver("team", ndots=5)) is Answer.SERVFAIL


def test_the_second_server_is_asked_where_the_first_is_not_well(server: Server) -> None:
    server.says["node-0.job"] = (NOERROR, (A,))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as gone:
        gone.bind(("127.0.0.1", 0))
        dead = gone.getsockname()
    resolver = Resolver(servers=(dead, server.socket.getsockname()))
    assert dns.ask("node-0.job", 5.0, resolver) is Answer.FOUND


@pytest.mark.parametrize("noise", [b"x", b"\0" * 12, b"\x7f" * 40])
def test_what_is_no_answer_to_our_question_is_passed_over(server: Server, noise: bytes) -> None:
    server.noise = noise
    server.says["node-0.job"] = (NOERROR, (A,))
    assert dns.ask("node-0.job", 5.0, server.resolver()) is Answer.FOUND


@pytest.mark.parametrize("name", ["a..b", "x" * 64, "." * 3, ""])
def test_a_name_that_cannot_exist_is_denied_without_asking(server: Server, name: str) -> None:
    assert dns.ask(name, 5.0, server.resolver()) is Answer.NXDOMAIN
    assert server.asked == []


def test_without_a_server_nobody_is_asked(tmp_path: Path) -> None:
    assert dns.ask("node-0.job", 5.0, dns.resolver(str(tmp_path / "resolv.conf"))) is Answer.NO_SERVER


def test_resolv_conf_is_read_as_glibc_does(tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    file.write_text(
        "# kubelet\nsearch team.svc.cluster.local svc.cluster.local\nnameserver 10.96.0.10\nnameserver fd00::a\n"
        "nameserver 1\nnameserver 2\noptions ndots:5 edns0\n"
    )
    read = dns.resolver(str(file))
    assert [host for host, _ in read.servers] == ["10.96.0.10", "fd00::a", "1"]
    assert (read.search, read.ndots) == (("team.svc.cluster.local", "svc.cluster.local"), 5)
    assert str(read).endswith("search team.svc.cluster.local svc.cluster.local; ndots 5")


@given(st.binary(max_size=80), st.integers(0, 3), st.integers(0, 3))
def test_no_datagram_can_break_the_reader(rest: bytes, questions: int, answers: int) -> None:
    data = struct.pack("!HHHHHH", 7, 0x8180, questions, answers, 0, 0) + rest
    assert dns._parsed(data, 7, A) in set(Answer)
