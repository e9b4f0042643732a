"""Looks for the launchers of other nodes, and at how a job stands: connections that only ask."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from trainer_launch.host.network import in_threads, is_absent
from trainer_launch.membership import protocol as msg
from trainer_launch.membership import timeouts
from trainer_launch.membership.client import inquire
from trainer_launch.membership.state import Looked
from trainer_launch.model import Endpoint, Seats
from trainer_launch.model.codec import MessageError
from trainer_launch.model.errors import NodeError

_log = logging.getLogger(__name__)
_AT_ONCE = 256  # candidates, each with a thread and a descriptor


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
            jitter = random.uniform(1 - timeouts.LOOK_JITTER, 1 + timeouts.LOOK_JITTER)
            self._change.wait(timeouts.LOOK_EVERY_S * jitter if wanted else None)
            self._change.clear()
            wanted = self._wanted
            if wanted and not self._over and self._seats is not None:
                try:
                    looked = self._look(self._seats, sorted(wanted))
                except Exception as problem:  # noqa: BLE001 - a defect, without which the next look may succeed
                    _log.warning("cannot look for other coordinators: %s: %s", type(problem).__name__, problem)
                    continue
                self._looked(looked)

    def _look(self, seats: Seats, ranks: Sequence[int]) -> Looked:
        """Look at all of them once, but for those that are not wanted any more because they have joined."""
        begun_s = time.monotonic()
        there: set[int] = set()
        absent: set[int] = set()
        for start in range(0, len(ranks), _AT_ONCE):
            batch = self._wanted.intersection(ranks[start : start + _AT_ONCE])
            answering, refusing = look({rank: seats.endpoint(rank) for rank in batch})
            there |= answering
            absent |= refusing
        at_work, ready = self._first_at_work(seats, self._wanted & there)
        return Looked(at_work, self._wanted & absent, time.monotonic() - begun_s, ready)

    def _first_at_work(self, seats: Seats, there: frozenset[int]) -> tuple[frozenset[int], bool]:
        """The lowest of them that is a coordinator, and whether it is ready.

        A preflight begins with the same word, and takes no nodes.
        """
        for rank in sorted(there):
            with contextlib.suppress(NodeError):
                status = ask(seats.endpoint(rank), self._job, self._secret, timeouts.LOOK_ANSWER_S)
                return frozenset({rank}), status.ready
        return frozenset(), True


def look(candidates: Mapping[int, Endpoint]) -> tuple[frozenset[int], frozenset[int]]:
    """The ranks at whose addresses a launcher answers, and those that are absent; silence tells nothing."""
    limit_s = timeouts.LOOK_NAMES_S + timeouts.LOOK_ANSWER_S
    answers = in_threads([*candidates], lambda rank: _is_there(candidates[rank]), limit_s, threads=_AT_ONCE)
    there, absent = (
        frozenset(rank for rank, answer in answers.items() if answer is word) for word in (True, False)
    )
    return there, absent


def _is_there(endpoint: Endpoint) -> bool | None:
    """Whether a launcher answers there; False: no such name, or a kernel that refuses; None: nobody knows."""
    try:
        # The resolver's first address, which a node would connect to.
        family, kind, proto, _, address = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)[
            0
        ]
        with socket.socket(family, kind, proto) as sock:
            sock.settimeout(timeouts.LOOK_ANSWER_S)
            sock.connect(address)
            return isinstance(msg.parse(sock.recv(4096).partition(b"\n")[0]), msg.Challenge) or None
    except ConnectionRefusedError:
        return False
    except socket.gaierror as problem:
        return False if is_absent(problem) else None
    except (OSError, UnicodeError, MessageError):  # silence, no descriptor, an invalid name, another program
        return None


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
