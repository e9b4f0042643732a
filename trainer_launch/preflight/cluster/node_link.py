"""A node's link to node 0 in the cluster preflight, its own listener, and a look at nodes from outside."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, Queue
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host import network
from trainer_launch.host.dns import Resolving
from trainer_launch.host.network import free_port, listen, tune
from trainer_launch.membership import candidates
from trainer_launch.membership.client import Lines, LostError, ReconnectingClient, UnprovenError
from trainer_launch.membership.protocol import Challenge
from trainer_launch.model import Endpoint, PortRange
from trainer_launch.model.errors import NodeError
from trainer_launch.model.findings import Finding
from trainer_launch.model.json_lines import MAX_LINE_BYTES, MessageError
from trainer_launch.model.units import printable
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster import present_nodes
from trainer_launch.preflight.cluster.nodes import LEASE_S, Stage, Stuck, stuck_at
from trainer_launch.preflight.cluster.pair_tests import run

_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
_CONNECT_S = 3.0
_NAME_S = 2.0  # less than the resolver's own time to ask again
_ANSWER_S = 5.0
_LATE_S = 4.0  # that a verdict may come after the deadline
_SILENCE_S = 8.0  # of node 0, which says something every two seconds
_LOOK_S = 3.0
_COME_BACK_S = 10.0  # for node 0, when it is lost after all were there
_GRACE_S = 2.0  # after the end that node 0 has named
_CLOCK_TRIES = 3
_NO_CLOCK_S = 1e6  # so much may be wrong with an offset that was not measured
_SILENT_KERNEL_S = 10.0


class Verdict(Struct, frozen=True):
    """The end: what was found, the same on every node that node 0 could tell it to."""

    findings: tuple[Finding, ...]
    is_shared: bool = False  # node 0 has decided it, and tells it in its own log, too


News: TypeAlias = msg.Complete | msg.Waiting | Verdict


class NodeLink(ReconnectingClient[msg.Message, msg.FromNode, News]):
    """A daemon thread that finds node 0, stays in touch, and tests pairs.

    `present` says who this node is; its port and proof are filled in here.
    """

    def __init__(  # noqa: PLR0913
        self,
        home: Endpoint,
        present: msg.Present,
        *,
        deadline_s: float,
        port: int | None,
        ports: PortRange | None = None,
        secret: bytes | None = None,
        clock: Callable[[], float] = time.time,
        bench: Callable[[msg.Test, Listener], msg.Result] = run,
    ) -> None:
        self._home = home
        self._other = f"what listens at {home} is not node 0's preflight"
        self._resolving = Resolving(home.host, home.port)
        self._secret = secret
        self._clock = clock
        self._bench = bench
        # The last seconds are for a look at node 0 from outside.
        self._until_s = self._first_until_s = time.monotonic() + deadline_s - min(_LOOK_S, deadline_s / 3)
        self._began_s = time.monotonic()
        self._deadline_at_s = self._began_s + deadline_s
        self.stage = "it has just started"
        self.waiting: msg.Waiting | None = None  # node 0's latest word
        self._host = present.host
        self._ports = ports
        self._listener = Listener(port, self._here, ports)
        super().__init__("node 0", msg.render, _PAUSE_S)
        self._present = present
        # Node 0's clock minus ours, and how much it may be off.
        self.offset: tuple[float, float] = (0.0, _NO_CLOCK_S)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where this node listens."""
        return self._listener.port

    def hurry(self) -> None:
        """End without the thread where it hangs, in the resolver for example."""
        now_s = time.monotonic()
        if now_s > max(self._until_s, self._deadline_at_s, self._heard_s + _SILENCE_S) + _LATE_S:
            self.end((present_nodes.cut_off(self._host, self.stage, now_s - self._began_s),))

    def close(self) -> None:
        """End all, and free the port."""
        super().close()
        self._listener.close()

    def _here(self) -> msg.Here:
        return msg.Here(self.stage)

    # -- the thread ---------------------------------------------------------------------------

    def _connect_once(self) -> bool:
        is_good = False
        try:
            self._use_one_connection()
            is_good = True
        except (LostError, NodeError) as problem:
            self._lose(str(problem))
        except OSError as problem:  # no descriptor for it
            self._lose(f"cannot communicate with node 0: {problem.strerror}")
        if not self._is_over and time.monotonic() >= self._until_s:
            self._give_up()
        return is_good

    def _next_pause_s(self, before_s: float) -> float:
        return min(2 * before_s, _LONGEST_PAUSE_S, max(_PAUSE_S, self._until_s - time.monotonic()))

    def _lose(self, why: str) -> None:
        """What node 0 has promised, such as time for records, is over with it."""
        self.stage, self.waiting = why, None
        self._until_s = min(self._until_s, max(self._first_until_s, time.monotonic() + _COME_BACK_S))

    def _give_up(self) -> None:
        stuck = look_at_all([self._home], _LOOK_S)[0]
        name = f"node 0 ({self._home.host})"
        # Until then node 0 may look at this node from outside, and learn from it that it is only cut off.
        self._closing.wait(self._deadline_at_s - time.monotonic())
        self.end((present_nodes.no_coordinator(name, stuck, time.monotonic() - self._began_s),))

    def end(self, findings: tuple[Finding, ...], *, is_shared: bool = False) -> None:
        """This is the verdict, whatever node 0 may say."""
        self._is_over = True
        self._tell(Verdict(findings, is_shared))

    def _use_one_connection(self) -> None:
        with self._connect() as sock:
            tune(sock, _SILENT_KERNEL_S)
            lines = Lines(sock, msg.parse, self._server, self._secret)
            self._greet(sock, lines)
            sock.settimeout(_ANSWER_S)
            self._talk(sock, lines, msg.Alive(), LEASE_S / 3, _SILENCE_S)

    def _connect(self) -> socket.socket:
        """Look the name up each time: a pod that is made again has another address."""
        left_s = max(0.1, min(_CONNECT_S, self._until_s - time.monotonic()))
        try:
            sock = self._resolving.connected(left_s)
        except TimeoutError:
            raise LostError(f"no answer from node 0 at {self._home} in time") from None
        except socket.gaierror as problem:
            raise LostError(f"no DNS record of node 0 ({self._home.host}): {problem.strerror}") from None
        except OSError as problem:
            self._make_room()
            why = problem.strerror or problem
            raise LostError(f"cannot connect to node 0 at {self._home}: {why}") from None
        here, there = sock.getsockname(), sock.getpeername()
        # With hostNetwork node 0 may be on the same machine, and this may be this node's own listener.
        if there == here or (here[0] == there[0] and there[1] == self._listener.port):
            sock.close()
            self._make_room()
            raise LostError(f"node 0 is on this machine, but does not listen at {self._home} yet")
        return sock

    def _make_room(self) -> None:
        """Leave the job's port to node 0 where both are on one machine, and it has not come yet."""
        if self._listener.port == self._home.port and network.is_here(self._home.host):
            self._listener.close()
            self._listener = Listener(None, self._here, self._ports)

    def _greet(self, sock: socket.socket, lines: Lines[msg.Message]) -> None:
        until_s = min(time.monotonic() + _ANSWER_S, max(self._until_s, time.monotonic() + 0.2))
        lines.challenged(until_s, self._other)
        sock.settimeout(_ANSWER_S)
        try:
            self._learn_time(lines, until_s)
            lines.introduce(replace(self._present, port=self._listener.port), self._render)
            answer = lines.next(until_s)
        except UnprovenError as problem:  # nobody has let this node in before
            if problem.refused is None:
                raise
            answer = problem.refused
        except LostError:
            # A coordinator of a job at work speaks as we do up to here, and does not know these words.
            if self._runs_already():
                return self.end((present_nodes.runs_already(None),))
            raise
        if isinstance(answer, msg.Refused) and not answer.retry:
            return self.end((present_nodes.refused(answer.reason),))
        if isinstance(answer, msg.Refused):
            raise LostError(f"node 0 refuses for now: {answer.reason}")
        self._take(answer)
        return None

    def _runs_already(self) -> bool:
        try:
            candidates.ask(self._home, self._present.job, self._secret)
        except NodeError:
            return False
        return True

    def _take(self, message: msg.Message) -> None:
        match message:
            case msg.Waiting(_, _, _, left_s):
                self._until_s = max(self._until_s, time.monotonic() + left_s + _GRACE_S)
                self.stage, self.waiting = "it takes part in the cluster preflight", message
                self._tell(message)
            case msg.Complete():
                self._tell(message)
            case msg.Test():
                threading.Thread(target=self._take_part, args=(message,), daemon=True).start()
            case msg.Decided(findings):
                try:
                    self.end(tuple(msg.load_findings(findings)), is_shared=True)
                except ValueError as problem:
                    raise LostError(f"node 0's verdict cannot be read: {problem}") from None
            case msg.Refused(reason, _):
                raise LostError(f"node 0 refuses: {reason}")

    def _take_part(self, test: msg.Test) -> None:
        self.send(self._bench(_findable(test), self._listener))

    def _learn_time(self, lines: Lines[msg.Message], until_s: float) -> None:
        """Four timestamps, as NTP has them; the fastest of some exchanges tells most."""
        self.offset = (0.0, _NO_CLOCK_S)
        for _ in range(_CLOCK_TRIES):
            self._write(lines, msg.Time(self._clock()))
            told = lines.next(until_s)
            now = self._clock()
            if not isinstance(told, msg.TimeIs):
                raise LostError(self._other)
            round_trip_s = max(0.0, (now - told.sent) - (told.answered - told.heard))
            if round_trip_s / 2 < self.offset[1]:
                self.offset = (((told.heard - told.sent) + (told.answered - now)) / 2, round_trip_s / 2)


def _findable(test: msg.Test) -> msg.Test:
    """With an address for a name that leads there, or nowhere in time: whether it resolves is for the check dns."""
    if test.rank == 0 or not test.address:
        return test
    try:
        found = Resolving(test.host, test.port).within(_NAME_S)
    except OSError:
        found = [test.address]
    return replace(test, host=test.address) if test.address in found else test


# -- where others look for this node, and lend its socket ---------------------------------------


_SEND_S = 0.5
_AGAIN_S = 0.5  # when the machine had no descriptor for a connection


class Listener:
    """Listens on the job's port if it is free here, else on one `among` those allowed; `here` says what to tell.

    Raises NodeError where none of these is free.
    """

    def __init__(self, port: int | None, here: Callable[[], msg.Here], among: PortRange | None = None) -> None:
        self._here = here
        self._sock = _opened(port, among)
        self.port = int(self._sock.getsockname()[1])
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for listened in (self._sock, self._wake):
            self._selector.register(listened, selectors.EVENT_READ)
        self._lock = threading.Lock()  # held by who may accept
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Free the port; once is enough."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._waker.send(b".")
        self._thread.join()
        for closed in (self._selector, self._sock, self._wake, self._waker):
            closed.close()

    @contextlib.contextmanager
    def lent(self) -> Iterator[int]:
        """Let somebody else accept what comes: yields the socket's descriptor."""
        with self._lock:
            yield self._sock.fileno()

    def _run(self) -> None:
        while not self._closing.is_set():
            ready = [key.fileobj for key, _ in self._selector.select()]
            if self._sock in ready and self._lock.acquire(timeout=0.05):  # else it is lent
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


# -- a look at nodes from outside ---------------------------------------------------------------


_THREADS = 64


def look(place: Endpoint | None, limit_s: float) -> Stuck:
    """Look a node up, connect, listen. May hang in the resolver for longer: call it in a thread."""
    if place is None:
        return stuck_at(Stage.UNNAMED, "")
    until_s = time.monotonic() + limit_s
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        return stuck_at(Stage.NO_RECORD, f"{place.host}: {getattr(problem, 'strerror', None) or problem}")
    worst = stuck_at(Stage.NO_RECORD, place.host)
    for family, _, _, _, address in found[:4]:
        at = str(Endpoint(str(address[0]), int(address[1])))
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.settimeout(max(0.05, until_s - time.monotonic()))
                sock.connect(address)
                return _hear(sock, at, until_s)
        except TimeoutError:
            worst = stuck_at(Stage.TIMEOUT, at)
        except OSError as problem:
            stage = Stage.REFUSED if problem.errno == errno.ECONNREFUSED else Stage.UNREACHABLE
            worst = stuck_at(stage, f"{at}: {problem.strerror}")
    return worst


def _hear(sock: socket.socket, at: str, until_s: float) -> Stuck:
    """Whether somebody to whom there is a connection says anything."""
    data = b""
    while b"\n" not in data:
        sock.settimeout(max(0.05, until_s - time.monotonic()))
        try:
            more = sock.recv(4096)
        except OSError:
            return stuck_at(Stage.SILENT, f"{at} accepts connections")
        if not more or len(data) > MAX_LINE_BYTES or time.monotonic() > until_s:
            return stuck_at(Stage.SILENT, f"{at} accepts connections, and ends them")
        data += more
    try:
        said = msg.parse(data.partition(b"\n")[0])
    except MessageError:
        return stuck_at(Stage.SILENT, f"what listens at {at} is no preflight")
    if isinstance(said, msg.Here):
        return stuck_at(Stage.RUNS, f"it says: {printable(said.stage[:300], ' ')}")
    return stuck_at(Stage.RUNS, f"{at} is a coordinator" if isinstance(said, Challenge) else at)


def look_at_all(places: Sequence[Endpoint | None], limit_s: float) -> list[Stuck]:
    """Many at once; who keeps even the resolver waiting has no DNS record that could be had in time."""
    found: Queue[tuple[int, Stuck]] = Queue()
    until_s = time.monotonic() + limit_s

    def work(start: int) -> None:
        for number in range(start, len(places), _THREADS):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            rounds = 1 + (len(places) - 1 - number) // _THREADS
            found.put((number, look(places[number], left_s / rounds)))

    for start in range(min(_THREADS, len(places))):
        threading.Thread(target=work, args=(start,), daemon=True, name="look").start()
    late = stuck_at(Stage.NO_RECORD, "the resolver did not answer in time")
    answers: list[Stuck] = [stuck_at(Stage.UNNAMED, "") if place is None else late for place in places]
    for _ in places:
        try:
            number, stuck = found.get(timeout=max(0.0, until_s + 0.3 - time.monotonic()))
        except Empty:
            break
        answers[number] = stuck
    return answers
