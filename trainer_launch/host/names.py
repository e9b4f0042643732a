"""Names to addresses by the system's resolver, many at once, in threads that may hang without holding us up."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, Queue
from typing import TypeAlias

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


def _answer(names: Sequence[str], by: Lookup, answers: Queue[tuple[str, Addresses | None]]) -> None:
    for name in names:
        answers.put((name, _addresses(name, by)))


def _addresses(name: str, by: Lookup) -> Addresses | None:
    try:
        return by(name)
    except OSError:
        return None
