"""Which other launchers are there, and how the job of one stands: connections that only ask."""

from __future__ import annotations

import contextlib
import errno
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from trainer_launch.membership import protocol as msg
from trainer_launch.membership import timeouts
from trainer_launch.membership.client import inquire
from trainer_launch.membership.state import Looked
from trainer_launch.model import Endpoint, Seats
from trainer_launch.model.errors import NodeError
from trainer_launch.model.json_lines import MessageError

_AT_ONCE = 256  # candidates of one look
_NO_SUCH_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


class CandidateWatch:
    """Looks for the candidates that are wanted, again and again; `wake` is called when something was found."""

    def __init__(self, seats: Seats | None, job: str, secret: bytes | None, wake: Callable[[], None]) -> None:
        self._seats, self._job, self._secret, self._wake = seats, job, secret, wake
        self._found: SimpleQueue[Looked] = SimpleQueue()
        self._wanted: frozenset[int] = frozenset()
        self._change = threading.Event()
        self._over = False

    def start(self) -> None:
        """Be ready to look, where there are others."""
        if self._seats is not None:
            threading.Thread(target=self._run, name="candidates", daemon=True).start()

    def found(self) -> Iterator[Looked]:
        """What was found since the last time."""
        while not self._found.empty():
            yield self._found.get()

    def want(self, ranks: frozenset[int]) -> None:
        """Look for these from now on."""
        if ranks != self._wanted:
            self._wanted = ranks
            self._change.set()

    def close(self) -> None:
        """Look no more."""
        self._over = True
        self._change.set()

    def _run(self) -> None:
        while not self._over:
            wanted = self._wanted
            self._change.wait(_pause_s() if wanted else None)
            self._change.clear()
            wanted = self._wanted
            if wanted and not self._over and self._seats is not None:
                there, absent = look({rank: self._seats.endpoint(rank) for rank in sorted(wanted)[:_AT_ONCE]})
                there = self._first_at_work(self._seats, there)
                if wanted == self._wanted:
                    self._found.put(Looked(there, absent))
                    self._wake()

    def _first_at_work(self, seats: Seats, there: frozenset[int]) -> frozenset[int]:
        """The lowest of them that is a coordinator: a preflight begins with the same word, and takes no nodes."""
        for rank in sorted(there):
            with contextlib.suppress(NodeError):
                ask(seats.endpoint(rank), self._job, self._secret, timeouts.LOOK_ANSWER_S)
                return frozenset({rank})
        return frozenset()


def _pause_s() -> float:
    return timeouts.LOOK_EVERY_S * random.uniform(1 - timeouts.LOOK_JITTER, 1 + timeouts.LOOK_JITTER)


def look(candidates: dict[int, Endpoint]) -> tuple[frozenset[int], frozenset[int]]:
    """Who is there, and who seems not to be: no such name, or a kernel that refuses. Silence tells nothing."""
    there: set[int] = set()
    absent: set[int] = set()
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for rank, endpoint in candidates.items():
            sock = _begin(endpoint)
            if sock is None:
                absent.add(rank)
            elif isinstance(sock, socket.socket):
                stack.enter_context(sock)
                selector.register(sock, selectors.EVENT_WRITE, rank)
        end_s = time.monotonic() + timeouts.LOOK_ANSWER_S
        while selector.get_map() and time.monotonic() < end_s:
            for key, mask in selector.select(max(0.0, end_s - time.monotonic())):
                _go_on(selector, key, mask, there, absent)
    return frozenset(there), frozenset(absent)


def _begin(endpoint: Endpoint) -> socket.socket | bool | None:
    """A connection in the making; None: nobody is there; False: nothing is known."""
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except socket.gaierror as problem:
        return None if problem.errno in _NO_SUCH_NAME else False
    except (OSError, UnicodeError):
        return False
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    sock.setblocking(False)
    number = sock.connect_ex(address)
    if number in (0, errno.EINPROGRESS):
        return sock
    sock.close()
    return None if number == errno.ECONNREFUSED else False


def _go_on(
    selector: selectors.BaseSelector, key: selectors.SelectorKey, mask: int, there: set[int], absent: set[int]
) -> None:
    sock = key.fileobj
    assert isinstance(sock, socket.socket)
    if mask & selectors.EVENT_WRITE:
        number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number == 0:
            selector.modify(sock, selectors.EVENT_READ, key.data)
            return
        if number == errno.ECONNREFUSED:
            absent.add(key.data)
    elif _is_challenge(sock):
        there.add(key.data)
    selector.unregister(sock)


def _is_challenge(sock: socket.socket) -> bool:
    try:
        return isinstance(msg.parse(sock.recv(4096).partition(b"\n")[0]), msg.Challenge)
    except (OSError, MessageError):
        return False


# -- how a job stands --------------------------------------------------------------------------


def ask(
    endpoint: Endpoint, job: str, secret: bytes | None = None, timeout_s: float = timeouts.STATUS_S
) -> msg.Status:
    """How the job stands.

    Raises:
        NodeError: nobody answers there, or not to us.
    """
    answer = inquire(endpoint, job, secret, timeout_s)
    if isinstance(answer, msg.Refused):
        raise NodeError(f"the coordinator at {endpoint} does not answer: {answer.reason}")
    if not isinstance(answer, msg.Status):
        raise NodeError(f"what listens at {endpoint} does not answer a question about the job's status")
    return answer
