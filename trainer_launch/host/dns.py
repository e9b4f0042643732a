"""Names to addresses by the system's resolver, in threads: a lookup that hangs holds nobody up."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from queue import Empty, Queue
from typing import TypeAlias, TypeVar

from trainer_launch.host.deadline_subprocess import begin_thread

Addresses: TypeAlias = frozenset[str] | tuple[str, ...]
Lookup: TypeAlias = Callable[[str], Addresses]  # raises OSError while the name does not resolve

_THREADS = 16
K = TypeVar("K")
V = TypeVar("V")


class Answer(str, Enum):
    """Why a name has no address, in words; what fails is not known to be absent."""

    NXDOMAIN = "NXDOMAIN"
    NO_DATA = "no address"  # the name is there, and has neither A nor AAAA
    TEMPORARY = "the DNS server does not answer, or answers SERVFAIL or REFUSED"
    FAILED = "the resolver failed"


_ANSWERS = {
    getattr(socket, "EAI_NODATA", socket.EAI_NONAME): Answer.NO_DATA,  # musl has none
    socket.EAI_NONAME: Answer.NXDOMAIN,
    socket.EAI_AGAIN: Answer.TEMPORARY,
}


def lookup(name: str) -> tuple[str, ...]:
    """All addresses of a name, of both families and in the order of a worker's own getaddrinfo.

    Raises:
        OSError: it does not resolve.
    """
    try:
        entries = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except UnicodeError as problem:  # a label that is empty or too long
        raise socket.gaierror(socket.EAI_NONAME, str(problem)) from None
    return tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries))


def lookup_all(names: Sequence[str], limit_s: float, by: Lookup = lookup) -> Mapping[str, Addresses | Answer]:
    """The addresses of each name, or why there are none: TEMPORARY where nothing came within `limit_s`."""
    answers = in_threads(names, lambda name: _addresses(name, by), limit_s)
    return {name: answers.get(name, Answer.TEMPORARY) for name in names}


def in_threads(keys: Sequence[K], ask: Callable[[K], V], limit_s: float, *, threads: int = _THREADS) -> dict[K, V]:
    """The results of `ask` for each key that come within `limit_s`; `ask` may hang, and raises nothing."""
    answers: Queue[tuple[K, V]] = Queue()
    until_s = time.monotonic() + limit_s
    left = iter(keys)  # of all threads: a slow answer delays no other

    def work() -> None:
        for key in left:
            answers.put((key, ask(key)))
            if time.monotonic() > until_s:
                return  # nobody waits any more

    for _ in range(min(threads, len(keys))):
        if begin_thread("lookup", work) is None:
            break
    arrived: dict[K, V] = {}
    with contextlib.suppress(Empty):
        for _ in keys:
            key, value = answers.get(timeout=max(0.0, until_s - time.monotonic()))
            arrived[key] = value
    return arrived


def is_absent(problem: socket.gaierror) -> bool:
    """Whether the resolver knows that a name has no address."""
    return _answer_of(problem) in (Answer.NXDOMAIN, Answer.NO_DATA)


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
            result = self._answers.get(timeout=max(0.0, limit_s))
        except Empty:
            raise socket.gaierror(socket.EAI_AGAIN, "the resolver did not answer in time") from None
        self._answers = None
        if isinstance(result, OSError):
            raise result
        return result

    def connected(self, limit_s: float) -> socket.socket:
        """A connection to the first address that accepts one, or the OSError of the last one."""
        *others, last = self.within(limit_s)
        for address in others:
            with contextlib.suppress(OSError):
                return socket.create_connection((address, self._port), timeout=limit_s)
        return socket.create_connection((last, self._port), timeout=limit_s)

    def _ask(self, answers: Queue[list[str] | OSError]) -> None:
        try:
            entries = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as problem:  # the latter: a label that is empty or too long
            answers.put(problem if isinstance(problem, OSError) else OSError(str(problem)))
        else:
            answers.put([str(entry[4][0]) for entry in entries])


def _addresses(name: str, by: Lookup) -> Addresses | Answer:
    try:
        return by(name)
    except OSError as problem:
        return _answer_of(problem)


def _answer_of(problem: OSError) -> Answer:
    return Answer.FAILED if problem.errno is None else _ANSWERS.get(problem.errno, Answer.FAILED)
