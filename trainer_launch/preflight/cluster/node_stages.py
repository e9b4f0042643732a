"""At which stage a node is stuck that should be there and is not, seen from outside in a few seconds."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from queue import Empty, Queue

from trainer_launch.membership.protocol import Challenge
from trainer_launch.model import Endpoint
from trainer_launch.model.json_lines import MAX_LINE_BYTES, MessageError
from trainer_launch.model.units import printable
from trainer_launch.preflight.cluster import protocol as msg

_THREADS = 64


class Stage(str, Enum):
    """How far a node has come, in the order of a pod's life."""

    UNNAMED = "unnamed"
    NO_RECORD = "no DNS record"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    SILENT = "silent"
    RUNS = "cut off"


@dataclass(frozen=True, slots=True)
class Stuck:
    """A stage, and what was seen in words."""

    stage: Stage
    text: str


MEANING: Mapping[Stage, str] = {
    Stage.UNNAMED: "its host name is unknown",
    Stage.NO_RECORD: "its pod is not created, not scheduled, or its Service does not publish addresses of pods "
    "that are not ready (publishNotReadyAddresses)",
    Stage.UNREACHABLE: "there is no route to its network",
    Stage.REFUSED: "its pod has an address, but its preflight is not running: the image is being pulled, an "
    "earlier init container runs, or it has ended",
    Stage.TIMEOUT: "packets to it are lost: a network policy, a firewall, or the machine is gone",
    Stage.SILENT: "its process is stopped or stuck: it accepts connections but does not answer",
    Stage.RUNS: "its preflight runs, but could not reach node 0",
}
_ADVICE: Mapping[Stage, str] = {
    Stage.UNNAMED: "check which pods of the job are not running",
    Stage.NO_RECORD: "check whether its pod is scheduled (kubectl describe pod), and the job's headless Service",
    Stage.UNREACHABLE: "see the routes and the CNI of both machines",
    Stage.REFUSED: "check the events and the init containers of its pod",
    Stage.TIMEOUT: "see network policies, both ways, for the port of node 0",
    Stage.SILENT: "see what its process waits for; the machine may need a reboot",
    Stage.RUNS: "see its own log, and network policies, both ways, for the port of node 0",
}


def advice(stage: Stage) -> str:
    """What to do about it."""
    return _ADVICE[stage]


def look(place: Endpoint | None, limit_s: float) -> Stuck:
    """Look a node up, connect, listen. May hang in the resolver for longer: call it in a thread."""
    if place is None:
        return _stuck(Stage.UNNAMED, "")
    until_s = time.monotonic() + limit_s
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        return _stuck(Stage.NO_RECORD, f"{place.host}: {getattr(problem, 'strerror', None) or problem}")
    worst = _stuck(Stage.NO_RECORD, place.host)
    for family, _, _, _, address in found[:4]:
        at = str(Endpoint(str(address[0]), int(address[1])))
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.settimeout(max(0.05, until_s - time.monotonic()))
                sock.connect(address)
                return _hear(sock, at, until_s)
        except TimeoutError:
            worst = _stuck(Stage.TIMEOUT, at)
        except OSError as problem:
            stage = Stage.REFUSED if problem.errno == errno.ECONNREFUSED else Stage.UNREACHABLE
            worst = _stuck(stage, f"{at}: {problem.strerror}")
    return worst


def _hear(sock: socket.socket, at: str, until_s: float) -> Stuck:
    """Whether somebody to whom there is a connection says anything."""
    data = b""
    while b"\n" not in data:
        sock.settimeout(max(0.05, until_s - time.monotonic()))
        try:
            more = sock.recv(4096)
        except OSError:
            return _stuck(Stage.SILENT, f"{at} accepts connections")
        if not more or len(data) > MAX_LINE_BYTES or time.monotonic() > until_s:
            return _stuck(Stage.SILENT, f"{at} accepts connections, and ends them")
        data += more
    try:
        said = msg.parse(data.partition(b"\n")[0])
    except MessageError:
        return _stuck(Stage.SILENT, f"what listens at {at} is no preflight")
    if isinstance(said, msg.Here):
        return _stuck(Stage.RUNS, f"it says: {printable(said.stage[:300], ' ')}")
    return _stuck(Stage.RUNS, f"{at} is a coordinator" if isinstance(said, Challenge) else at)


def _stuck(stage: Stage, seen: str) -> Stuck:
    return Stuck(stage, f"{stage.value}{f' ({seen})' if seen else ''}: {MEANING[stage]}")


def look_at_all(
    places: Sequence[Endpoint | None], limit_s: float, by: Callable[[Endpoint | None, float], Stuck] = look
) -> list[Stuck]:
    """Many at once; who keeps even the resolver waiting has no DNS record that could be had in time."""
    found: Queue[tuple[int, Stuck]] = Queue()
    until_s = time.monotonic() + limit_s

    def work(start: int) -> None:
        for number in range(start, len(places), _THREADS):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            rounds = 1 + (len(places) - 1 - number) // _THREADS
            found.put((number, by(places[number], left_s / rounds)))

    for start in range(min(_THREADS, len(places))):
        threading.Thread(target=work, args=(start,), daemon=True, name="look").start()
    late = _stuck(Stage.NO_RECORD, "the resolver did not answer in time")
    answers: list[Stuck] = [_stuck(Stage.UNNAMED, "") if place is None else late for place in places]
    for _ in places:
        try:
            number, stuck = found.get(timeout=max(0.0, until_s + 0.3 - time.monotonic()))
        except Empty:
            break
        answers[number] = stuck
    return answers
