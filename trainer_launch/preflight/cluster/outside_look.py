"""How far a node has come, as a look from outside shows it; and the listener by which a node answers one."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum

from msgspec import Struct

from trainer_launch.host.dns import Resolving
from trainer_launch.host.network import free_port, listen
from trainer_launch.membership.client import Lines, LostError
from trainer_launch.membership.protocol import Challenge
from trainer_launch.model import Endpoint, PortRange
from trainer_launch.model.errors import NodeError
from trainer_launch.model.units import printable
from trainer_launch.preflight.check import at_once
from trainer_launch.preflight.cluster import preflight_messages as msg

_SEND_S = 0.5
_WAKE_S = 1.0  # where closing does not end the wait
_AGAIN_S = 0.5  # when the machine had no descriptor for a connection


class NodeStage(str, Enum):
    """How far a node has come, in the order of a pod's life."""

    UNNAMED = "unnamed"
    NO_RECORD = "no DNS record"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    SILENT = "silent"
    RUNS = "cut off"


class Stuck(Struct, frozen=True):
    """A stage, what was seen and what it means in words, and what to do."""

    stage: NodeStage
    text: str
    action: str


_BOTH_WAYS = "check that network policies allow node 0's port in both directions"
_MEANING: Mapping[NodeStage, tuple[str, str]] = {
    NodeStage.UNNAMED: ("its host name is unknown", "check which pods of the job are not running"),
    NodeStage.NO_RECORD: (
        "its pod is not created, not scheduled, or its Service does not publish addresses of pods that are not "
        "ready (publishNotReadyAddresses)",
        "check whether its pod is scheduled (kubectl describe pod), and the job's headless Service",
    ),
    NodeStage.UNREACHABLE: (
        "there is no route to its network",
        "check the routes and the CNI of both machines",
    ),
    NodeStage.REFUSED: (
        "its pod has an address, but its preflight is not running: the image is being pulled, an earlier init "
        "container runs, or it has ended",
        "check the events and the init containers of its pod",
    ),
    NodeStage.TIMEOUT: ("packets to it are lost: a network policy, a firewall, or the machine is gone", _BOTH_WAYS),
    NodeStage.SILENT: (
        "its process is stopped or stuck: it accepts connections but does not answer",
        "check what its process waits for; the machine may need a reboot",
    ),
    NodeStage.RUNS: ("its preflight runs, but could not reach node 0", f"read its log, and {_BOTH_WAYS}"),
}


def stuck_at(stage: NodeStage, evidence: str = "") -> Stuck:
    """With the evidence, and what it means."""
    meaning, action = _MEANING[stage]
    return Stuck(stage, f"{stage.value}{f' ({evidence})' if evidence else ''}: {meaning}", action)


def look(place: Endpoint | None, limit_s: float) -> Stuck:
    """Look a node up, connect, listen; None: nobody knows its name."""
    if place is None:
        return stuck_at(NodeStage.UNNAMED)
    until_s = time.monotonic() + limit_s
    try:
        addresses = Resolving(place.host, place.port).within(limit_s)
    except OSError as problem:
        return stuck_at(NodeStage.NO_RECORD, f"{place.host}: {problem.strerror or problem}")
    worst = stuck_at(NodeStage.NO_RECORD, place.host)
    for address in addresses[:4]:
        at, left_s = str(Endpoint(address, place.port)), max(0.05, until_s - time.monotonic())
        try:
            with socket.create_connection((address, place.port), timeout=left_s) as sock:
                return _hear(sock, at, until_s)
        except TimeoutError:
            worst = stuck_at(NodeStage.TIMEOUT, at)
        except OSError as problem:
            stage = NodeStage.REFUSED if problem.errno == errno.ECONNREFUSED else NodeStage.UNREACHABLE
            worst = stuck_at(stage, f"{at}: {problem.strerror}")
    return worst


def _hear(sock: socket.socket, at: str, until_s: float) -> Stuck:
    """Whether somebody to whom there is a connection says anything."""
    try:
        message = Lines(sock, msg.parse, at).next(until_s)
    except LostError as problem:
        return stuck_at(NodeStage.SILENT, str(problem))
    if isinstance(message, msg.Here):
        return stuck_at(NodeStage.RUNS, f"it says: {printable(message.stage[:300], ' ')}")
    return stuck_at(NodeStage.RUNS, f"{at} is a coordinator" if isinstance(message, Challenge) else at)


def look_at_all(places: Sequence[Endpoint | None], limit_s: float) -> list[Stuck]:
    """A look at each, side by side."""
    stuck = at_once(range(len(places)), lambda number: look(places[number], limit_s), max(1, len(places)))
    return list(stuck.values())


class Listener:
    """A node's listener, on which pair tests accept, too; to all others it says `here`.

    It takes the job's port if that is free, else one `among` those allowed.

    Raises NodeError where none of these is free.
    """

    def __init__(self, port: int | None, here: Callable[[], msg.Here], among: PortRange | None = None) -> None:
        self._here = here
        self._sock = _opened(port, among)
        self.port = int(self._sock.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._sock, selectors.EVENT_READ)
        self._lock = threading.Lock()  # held by who may accept
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Free the port; once is enough."""
        if not self._closing.is_set():
            self._closing.set()
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
            self._thread.join()
            self._selector.close()
            self._sock.close()

    @contextlib.contextmanager
    def lent(self) -> Iterator[socket.socket]:
        """Let somebody else accept what comes."""
        with self._lock:
            try:
                yield self._sock
            finally:
                self._sock.setblocking(False)

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._selector.select(_WAKE_S) and self._lock.acquire(timeout=0.05):  # else it is lent
                try:
                    self._answer()
                finally:
                    self._lock.release()

    def _answer(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:  # out of descriptors or memory, and it would be so again at once
            self._closing.wait(_AGAIN_S)
            return
        with sock, contextlib.suppress(OSError):
            sock.settimeout(_SEND_S)
            sock.sendall(msg.render(self._here()))
            sock.shutdown(socket.SHUT_WR)


def _opened(port: int | None, among: PortRange | None) -> socket.socket:
    if port is not None:
        with contextlib.suppress(NodeError):  # with hostNetwork or in a rehearsal another node has it
            return listen(Endpoint("", port))
    return listen(Endpoint("", 0 if among is None else free_port(among)))
