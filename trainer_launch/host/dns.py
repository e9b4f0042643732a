"""Names to addresses by the system's resolver, in threads: a lookup that hangs holds nobody up."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from queue import Empty, Queue
from typing import TypeAlias

from trainer_launch.model.units import listed

Addresses: TypeAlias = frozenset[str]
Lookup: TypeAlias = Callable[[str], Addresses]  # raises OSError while the name does not resolve

_THREADS = 16


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


def lookup(name: str) -> Addresses:
    """All addresses of a name, of both families, as a worker's own getaddrinfo would find them.

    Raises:
        OSError: it does not resolve.
    """
    try:
        found = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except UnicodeError as problem:  # a label that is empty or too long
        raise socket.gaierror(socket.EAI_NONAME, str(problem)) from None
    return frozenset(str(entry[4][0]).partition("%")[0] for entry in found)


def lookup_all(names: Sequence[str], limit_s: float, by: Lookup = lookup) -> Mapping[str, Addresses | Answer]:
    """The addresses of each name, or why there are none: TEMPORARY where nothing came within `limit_s`."""
    answers: Queue[tuple[str, Addresses | Answer]] = Queue()
    until_s = time.monotonic() + limit_s
    left = iter(names)  # one for all threads: a slow name delays no other
    for _ in range(min(_THREADS, len(names))):
        threading.Thread(target=_answer, args=(left, by, answers, until_s), daemon=True).start()
    found: dict[str, Addresses | Answer] = dict.fromkeys(names, Answer.TEMPORARY)
    with contextlib.suppress(Empty):
        for _ in names:
            name, answer = answers.get(timeout=max(0.0, until_s - time.monotonic()))
            found[name] = answer
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


def _answer(
    names: Iterator[str], by: Lookup, answers: Queue[tuple[str, Addresses | Answer]], until_s: float
) -> None:
    for name in names:
        answers.put((name, _addresses(name, by)))
        if time.monotonic() > until_s:
            return  # nobody waits any more


def _addresses(name: str, by: Lookup) -> Addresses | Answer:
    try:
        return by(name)
    except OSError as problem:
        return _ANSWERS.get(problem.errno, Answer.FAILED)


# -- waiting until names resolve ---------------------------------------------------------------


_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_FIRST_SAY_S = 5.0  # between the first and the second message, then doubled
_LONGEST_SAY_S = 60.0
_SHOWN = 5


class PendingNames:
    """Resolves names until all have an address; `fd` is readable when `news` has something to tell."""

    def __init__(self, names: Iterable[str], resolver: Lookup = lookup) -> None:
        self._resolve = resolver
        self._problems = dict.fromkeys(
            names, ""
        )  # by name that does not resolve: why not, "" before it was asked for
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._say_at_s = 0.0
        self._say_every_s = _FIRST_SAY_S
        self.fd, self._post_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def start(self) -> None:
        """Begin; the thread is a daemon, so one that is stuck in the resolver cannot keep us alive."""
        threading.Thread(target=self._run, daemon=True, name="resolver").start()

    def news(self, now_s: float) -> tuple[bool, str | None]:
        """Take in the answers: whether all resolve, and a sentence when it is time to say one."""
        try:
            os.read(self.fd, 65536)
        except BlockingIOError:
            return not self._problems, None
        problems = [f"{name} ({why})" for name, why in self._problems.items()]
        if not problems or now_s < self._say_at_s:
            return not problems, None
        self._say_at_s = now_s + self._say_every_s
        self._say_every_s = min(2 * self._say_every_s, _LONGEST_SAY_S)
        return False, f"not resolved yet: {listed(problems, _SHOWN)}"

    def close(self) -> None:
        """Stop asking. Under the lock: a late answer must not be written into a descriptor used anew."""
        self._closed.set()
        with self._lock:
            os.close(self.fd)
            os.close(self._post_fd)

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while self._problems:
            answers = {name: self._problem(name) for name in self._problems}
            self._problems = {name: why for name, why in answers.items() if why}
            with self._lock, contextlib.suppress(BlockingIOError):  # full: its reader is due to wake up anyway
                if self._closed.is_set():
                    return
                os.write(self._post_fd, b".")
            if self._closed.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _problem(self, name: str) -> str:
        """Why a name does not resolve; "": it does."""
        try:
            self._resolve(name)
        except OSError as problem:
            return getattr(problem, "strerror", None) or str(problem)
        return ""
