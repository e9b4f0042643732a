"""A small DNS client, because getaddrinfo cannot tell a name that is not there from a server that is not well.

It asks the servers of resolv.conf with its search list, as glibc does, for A and AAAA, over UDP, and it never waits
longer than it was told.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from trainer_launch.model.value_parsers import MAX_COUNT, parse_number

RESOLV_CONF = "/etc/resolv.conf"
_MAX_SERVERS = 3  # glibc asks no more
_TRIES_S = 1.0  # between two datagrams to the same server
_TYPES = {"A": 1, "AAAA": 28}
_HEADER = struct.Struct("!HHHHHH")
_MAX_LABEL = 63
_MAX_NDOTS = 15  # glibc goes no further


class Answer(str, Enum):
    """What DNS says about a name; the ones that name a trouble beat those that deny."""

    FOUND = "found"
    TIMEOUT = "timeout"
    SERVFAIL = "SERVFAIL"
    REFUSED = "REFUSED"
    NO_DATA = "no address"  # the name is there, and has neither A nor AAAA
    NXDOMAIN = "NXDOMAIN"
    NO_SERVER = "no server"


_RANK = tuple(Answer)
_RCODES = {0: Answer.NO_DATA, 2: Answer.SERVFAIL, 3: Answer.NXDOMAIN, 5: Answer.REFUSED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolver:
    """Whom to ask, and with which suffixes."""

    servers: tuple[tuple[str, int], ...] = ()
    search: tuple[str, ...] = ()
    ndots: int = 1

    def full_names(self, name: str) -> tuple[str, ...]:
        """Every name that is asked for, in glibc's order."""
        if name.endswith("."):
            return (name[:-1],)
        with_suffix = tuple(f"{name}.{suffix}" for suffix in self.search)
        return (name, *with_suffix) if name.count(".") >= self.ndots else (*with_suffix, name)

    def __str__(self) -> str:
        servers = ", ".join(host for host, _ in self.servers) or "none"
        return f"servers {servers}; search {' '.join(self.search) or '-'}; ndots {self.ndots}"


def resolver(path: str = RESOLV_CONF) -> Resolver:
    """Read resolv.conf; without one, there is nobody to ask."""
    servers: list[tuple[str, int]] = []
    search: tuple[str, ...] = ()
    ndots = 1
    with contextlib.suppress(OSError):
        for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
            word, *rest = line.split() or [""]
            if word == "nameserver" and rest:
                servers.append((rest[0], 53))
            elif word in ("search", "domain"):
                search = tuple(suffix.rstrip(".") for suffix in rest if suffix != ".")
            elif word == "options":
                given = [option[6:] for option in rest if option.startswith("ndots:")]
                numbers = (parse_number(number, 0, MAX_COUNT) for number in given)
                ndots = min(_MAX_NDOTS, next((number for number in numbers if number is not None), ndots))
    return Resolver(servers=tuple(servers[:_MAX_SERVERS]), search=search, ndots=ndots)


def ask(name: str, limit_s: float, by: Resolver | None = None) -> Answer:
    """What DNS says about a name, within `limit_s`."""
    chosen = resolver() if by is None else by
    if not chosen.servers:
        return Answer.NO_SERVER
    until_s = time.monotonic() + limit_s
    worst = Answer.NXDOMAIN
    for full in chosen.full_names(name):
        if any(not 0 < len(label.encode()) <= _MAX_LABEL for label in full.split(".")):
            continue  # no such name can exist
        answers = [_ask_for(full, kind, chosen.servers, until_s) for kind in _TYPES.values()]
        worst = min(worst, *answers, key=_RANK.index)
        if worst is Answer.FOUND:
            break
    return worst


def _ask_for(full: str, kind: int, servers: Sequence[tuple[str, int]], until_s: float) -> Answer:
    """Ask one server after the other, again and again, until one answers or the time is up."""
    trouble = Answer.TIMEOUT
    for number in range(2 * len(servers)):
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            break
        answer = _exchange(full, kind, servers[number % len(servers)], min(_TRIES_S, left_s))
        if answer not in (Answer.TIMEOUT, Answer.SERVFAIL, Answer.REFUSED):
            return answer
        trouble = answer if trouble is Answer.TIMEOUT else trouble
    return trouble


def _exchange(full: str, kind: int, server: tuple[str, int], limit_s: float) -> Answer:
    number = random.randrange(1 << 16)
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    until_s = time.monotonic() + limit_s
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.setblocking(False)
            asking.connect(server)
            asking.send(_query(number, full, kind))
            while (left_s := until_s - time.monotonic()) > 0:
                if not select.select([asking], [], [], left_s)[0]:
                    break
                answer = _parsed(asking.recv(4096), number, kind)
                if answer is not None:
                    return answer
    except (OSError, UnicodeError):  # refused by the host there, or no way to it: it does not answer
        pass
    return Answer.TIMEOUT


def _query(number: int, full: str, kind: int) -> bytes:
    labels = b"".join(bytes([len(label)]) + label for label in full.encode().split(b"."))
    return _HEADER.pack(number, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)


def _parsed(data: bytes, number: int, kind: int) -> Answer | None:
    """None when it is not the answer to our question."""
    if len(data) < _HEADER.size:
        return None
    told, flags, questions, answers, _, _ = _HEADER.unpack_from(data)
    if told != number or not flags & 0x8000:
        return None
    rcode = flags & 0xF
    if rcode:
        return _RCODES.get(rcode, Answer.SERVFAIL)
    if flags & 0x0200:  # cut, because it has so much to say
        return Answer.FOUND
    try:
        return Answer.FOUND if kind in _kinds(data, questions, answers) else Answer.NO_DATA
    except (IndexError, struct.error):
        return Answer.SERVFAIL


def _kinds(data: bytes, questions: int, answers: int) -> list[int]:
    """The record types of the answers; a name ends with a zero or with a pointer of two bytes."""
    at = _HEADER.size
    for _ in range(questions):
        at = _after_name(data, at) + 4
    kinds = []
    for _ in range(answers):
        at = _after_name(data, at)
        kind, _, _, length = struct.unpack_from("!HHIH", data, at)
        kinds.append(kind)
        at += 10 + length
    return kinds


def _after_name(data: bytes, at: int) -> int:
    while (length := data[at]) != 0:
        if length >= 0xC0:
            return at + 2
        at += 1 + length
    return at + 1
