"""Which other launchers are there, and how the job of one stands: connections that only ask."""

from __future__ import annotations

import contextlib
import errno
import logging
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from trainer_launch.host.dns import Addresses, Answer, lookup_all
from trainer_launch.membership import protocol as msg
from trainer_launch.membership import timeouts
from trainer_launch.membership.client import inquire
from trainer_launch.membership.state import Looked
from trainer_launch.model import Endpoint, Seats
from trainer_launch.model.codec import MessageError
from trainer_launch.model.errors import NodeError

_log = logging.getLogger(__name__)
_AT_ONCE = 256  # candidates, so that a look at many needs few descriptors


class CandidateWatch:
    """Looks for the candidates that are wanted, again and again; its thread calls `looked` after each look."""

    def __init__(
        self, seats: Seats | None, job: str, secret: bytes | None, looked: Callable[[Looked], None]
    ) -> None:
        self._seats, self._job, self._secret, self._looked = seats, job, secret, looked
        self._wanted: frozenset[int] = frozenset()
        self._change = threading.Event()
        self._over = False

    def start(self) -> None:
        """Be ready to look, where there are others."""
        if self._seats is not None:
            threading.Thread(target=self._run, name="candidates", daemon=True).start()

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
                try:
                    looked = self._look(self._seats, sorted(wanted))
                except Exception as problem:  # noqa: BLE001 - no descriptor, or a defect: the next look may succeed
                    _log.warning("cannot look for other coordinators: %s: %s", type(problem).__name__, problem)
                    continue
                self._looked(looked)

    def _look(self, seats: Seats, ranks: Sequence[int]) -> Looked:
        """One look at all of them; who is not wanted any more, because it has joined, is left out."""
        begun_s = time.monotonic()
        there: set[int] = set()
        absent: set[int] = set()
        for start in range(0, len(ranks), _AT_ONCE):
            batch = self._wanted.intersection(ranks[start : start + _AT_ONCE])
            found = look({rank: seats.endpoint(rank) for rank in batch})
            there |= found[0]
            absent |= found[1]
        at_work = self._first_at_work(seats, self._wanted & there)
        return Looked(at_work, self._wanted & absent, time.monotonic() - begun_s)

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
    names = list({endpoint.host for endpoint in candidates.values()})
    addresses = lookup_all(names, timeouts.LOOK_NAMES_S, _first_address)
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for rank, endpoint in candidates.items():
            sock = _begin(addresses[endpoint.host], endpoint.port)
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


def _first_address(name: str) -> Addresses:
    """The resolver's first, which a node would connect to."""
    try:
        return frozenset({str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])})
    except UnicodeError as problem:  # a label that is empty or too long
        raise socket.gaierror(socket.EAI_FAIL, str(problem)) from None


def _begin(found: Addresses | Answer, port: int) -> socket.socket | bool | None:
    """A connection in the making; None: nobody is there; False: nothing is known."""
    if isinstance(found, Answer):
        return None if found in (Answer.NXDOMAIN, Answer.NO_DATA) else False
    try:
        family, kind, proto, _, address = socket.getaddrinfo(next(iter(found)), port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError:  # we have no descriptor
        return False
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
) -> msg.JobStatus:
    """How the job stands.

    Raises:
        NodeError: nobody answers there, or not to us.
    """
    answer = inquire(endpoint, job, secret, timeout_s)
    if isinstance(answer, msg.Refused):
        raise NodeError(f"the coordinator at {endpoint} does not answer: {answer.reason}")
    if not isinstance(answer, msg.JobStatus):
        raise NodeError(f"what listens at {endpoint} does not answer a question about the job's status")
    return answer
