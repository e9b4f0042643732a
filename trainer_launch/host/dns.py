"""Names to addresses: by a small DNS client of our own, and by the system's resolver.

The client is there because getaddrinfo cannot tell a name that is not there from a server that is not well.
It asks the servers of resolv.conf with its search list, as glibc does, for A and AAAA, over UDP, and it never waits
longer than it was told.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from queue import Empty, Queue, SimpleQueue
from typing import TypeAlias

from trainer_launch.model.frozen import dataclass
from trainer_launch.model.units import listed
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
    problem = Answer.TIMEOUT
    for number in range(2 * len(servers)):
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            break
        answer = _exchange(full, kind, servers[number % len(servers)], min(_TRIES_S, left_s))
        if answer not in (Answer.TIMEOUT, Answer.SERVFAIL, Answer.REFUSED):
            return answer
        problem = answer if problem is Answer.TIMEOUT else problem
    return problem


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


# -- the system's resolver ---------------------------------------------------------------------


Addresses: TypeAlias = frozenset[str]
Lookup: TypeAlias = Callable[[str], Addresses]  # raises OSError while the name does not resolve

_THREADS = 16


def lookup(name: str) -> Addresses:
    """All addresses of a name, of both families, as a worker's own getaddrinfo would find them.

    Raises:
        OSError: it does not resolve.
    """
    try:
        found = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except UnicodeError as problem:  # a label that is empty or too long
        raise OSError(str(problem)) from None
    return frozenset(str(entry[4][0]).partition("%")[0] for entry in found)


def lookup_all(names: Sequence[str], limit_s: float, by: Lookup = lookup) -> Mapping[str, Addresses | None]:
    """The addresses of each name, None for one that does not resolve; who is not in it did not answer in time."""
    answers: Queue[tuple[str, Addresses | None]] = Queue()
    for start in range(min(_THREADS, len(names))):
        threading.Thread(target=_answer, args=(names[start::_THREADS], by, answers), daemon=True).start()
    found: dict[str, Addresses | None] = {}
    until_s = time.monotonic() + limit_s
    while len(found) < len(names):
        try:
            name, addresses = answers.get(timeout=max(0.0, until_s - time.monotonic()))
        except Empty:
            break
        found[name] = addresses
    return found


class Resolving:
    """Looks a name up. A lookup that outlasts a caller's patience goes on, and the next caller waits for it."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._answers: Queue[list[str] | OSError] | None = None

    def within(self, limit_s: float) -> list[str]:
        """The addresses in the resolver's order.

        Raises:
            OSError: the name does not resolve, or not within `limit_s`.
        """
        if self._answers is None:
            self._answers = Queue()
            threading.Thread(target=self._ask, args=(self._answers,), daemon=True, name="resolver").start()
        try:
            found = self._answers.get(timeout=max(0.0, limit_s))
        except Empty:
            raise socket.gaierror(socket.EAI_AGAIN, "the resolver did not answer in time") from None
        self._answers = None
        if isinstance(found, OSError):
            raise found
        return found

    def connected(self, limit_s: float) -> socket.socket:
        """A connection to the first address that accepts one, or the OSError of the last one."""
        *others, last = self.within(limit_s)
        for address in others:
            with contextlib.suppress(OSError):
                return socket.create_connection((address, self._port), timeout=limit_s)
        return socket.create_connection((last, self._port), timeout=limit_s)

    def _ask(self, answers: Queue[list[str] | OSError]) -> None:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as problem:  # the latter: a label that is empty or too long
            answers.put(problem if isinstance(problem, OSError) else OSError(str(problem)))
        else:
            answers.put([str(entry[4][0]) for entry in found])


def _answer(names: Sequence[str], by: Lookup, answers: Queue[tuple[str, Addresses | None]]) -> None:
    for name in names:
        answers.put((name, _addresses(name, by)))


def _addresses(name: str, by: Lookup) -> Addresses | None:
    try:
        return by(name)
    except OSError:
        return None


# -- waiting until names resolve ---------------------------------------------------------------


_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_FIRST_SAY_S = 5.0  # between the first and the second message, then doubled
_LONGEST_SAY_S = 60.0
_SHOWN = 5


class PendingNames:
    """Resolves names until all have an address; `fd` is readable when `news` has something to tell."""

    def __init__(self, names: Iterable[str], resolver: Lookup = lookup) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._resolve = resolver
        self._pending = dict.fromkeys(self._names, "no answer yet")
        self._answers: SimpleQueue[tuple[str, str | None]] = SimpleQueue()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._say_at_s = 0.0
        self._say_every_s = _FIRST_SAY_S
        self.fd, self._post_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def start(self) -> None:
        """Begin; the threads are daemons, so one that is stuck in the resolver cannot keep us alive."""
        for i in range(min(_THREADS, len(self._names))):
            threading.Thread(target=self._run, args=(self._names[i::_THREADS],), daemon=True).start()

    def news(self, now_s: float) -> tuple[bool, str | None]:
        """Take in the answers: whether all resolve, and a sentence when it is time to say one."""
        self._drain()
        failed = False
        while True:
            try:
                name, error = self._answers.get_nowait()
            except Empty:
                break
            if error is None:
                self._pending.pop(name, None)
            else:
                self._pending[name] = error
                failed = True
        if not failed or not self._pending or now_s < self._say_at_s:
            return not self._pending, None
        self._say_at_s = now_s + self._say_every_s
        self._say_every_s = min(2 * self._say_every_s, _LONGEST_SAY_S)
        return False, self._sentence()

    def close(self) -> None:
        """Stop asking. Under the lock: a late answer must not be written into a descriptor used anew."""
        self._closed.set()
        with self._lock:
            os.close(self.fd)
            os.close(self._post_fd)

    def _sentence(self) -> str:
        pending = [f"{name} ({error})" for name, error in self._pending.items()]
        return f"not resolved yet: {listed(pending, _SHOWN)}"

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 65536)

    def _run(self, names: Iterable[str]) -> None:
        pending, pause_s = list(names), _FIRST_PAUSE_S
        while pending:
            pending = [name for name in pending if not self._ask(name)]
            if self._closed.wait(pause_s if pending else 0):
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _ask(self, name: str) -> bool:
        error: str | None = None
        try:
            self._resolve(name)
        except OSError as problem:
            error = getattr(problem, "strerror", None) or str(problem)
        self._answers.put((name, error))
        with self._lock:
            if not self._closed.is_set():
                with contextlib.suppress(BlockingIOError):  # full: its reader is due to wake up anyway
                    os.write(self._post_fd, b".")
        return error is None
