"""A node's link to node 0 in the cluster preflight: it reports, tests pairs, and receives the verdict."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host import network
from trainer_launch.host.network import Resolving, free_port, listen, tune
from trainer_launch.membership import candidates, timeouts
from trainer_launch.membership.client import Lines, LostError, ReconnectingClient
from trainer_launch.membership.protocol import JobStatus
from trainer_launch.model import Endpoint, PortRange
from trainer_launch.model.errors import NodeError
from trainer_launch.model.findings import Finding
from trainer_launch.model.value_parsers import is_address
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster import present_nodes
from trainer_launch.preflight.cluster.present_nodes import LEASE_S

_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
_CONNECT_S = 3.0
_NAME_S = 2.0  # less than the resolver's own time to ask again
_ANSWER_S = 5.0
_LATE_S = 4.0  # that a verdict may come after the deadline
_SILENCE_S = 8.0  # of node 0, which says something every two seconds
_COME_BACK_S = 10.0  # for node 0, when it is lost after all were there
_GRACE_S = 2.0  # after the end that node 0 has named
_CLOCK_TRIES = 3
_NO_CLOCK_S = 1e6  # so much may be wrong with an offset that was not measured
_SILENT_KERNEL_S = 10.0
_SEAT_PAUSE_S = 1.0  # before each seat is asked
_SEAT_ANSWER_S = 1.0


class Listener:
    """A node's listener, on which its ends of pair tests accept; nobody else is answered.

    It takes the job's port if that is free, else one `among` those allowed.

    Raises NodeError where none of these is free.
    """

    def __init__(self, port: int | None, among: PortRange | None = None) -> None:
        self._sock = _opened(port, among)
        self.port = int(self._sock.getsockname()[1])
        self._lock = threading.Lock()  # held by who may accept

    def close(self) -> None:
        """Free the port; once is enough."""
        self._sock.close()

    @contextlib.contextmanager
    def lent(self) -> Iterator[socket.socket]:
        """Let a test accept what comes."""
        with self._lock:
            yield self._sock


def _opened(port: int | None, among: PortRange | None) -> socket.socket:
    if port is not None:
        with contextlib.suppress(NodeError):  # with hostNetwork or in a rehearsal another node has it
            return listen(Endpoint("", port))
    return listen(Endpoint("", 0 if among is None else free_port(among)))


class ClusterVerdict(Struct, frozen=True):
    """The end: what was found, the same on every node that node 0 could tell it to."""

    findings: tuple[Finding, ...]


News: TypeAlias = msg.Complete | msg.PreflightWaiting | ClusterVerdict


class NodeLink(ReconnectingClient[msg.Message, msg.FromNode, News]):
    """A daemon thread that finds node 0, stays in touch, and tests pairs.

    `hello` says who this node is; its port and proof are filled in here.
    """

    def __init__(  # noqa: PLR0913
        self,
        home: Endpoint,
        hello: msg.Hello,
        *,
        deadline_s: float,
        port: int | None,
        ports: PortRange | None = None,
        secret: bytes | None = None,
        clock: Callable[[], float] = time.time,
        bench: Callable[[msg.Test, Listener], msg.Result],
    ) -> None:
        super().__init__("node 0", msg.render, _PAUSE_S)
        self._home, self._hello, self._secret = home, hello, secret
        self._clock, self._bench, self._ports = clock, bench, ports
        self._other = f"what listens at {home} is not node 0's preflight"
        self._resolving = Resolving(home.host, home.port)
        self._began_s = time.monotonic()
        self._deadline_at_s = self._began_s + deadline_s
        self._until_s = self._first_until_s = self._deadline_at_s
        self._refused: tuple[float, str] | None = None  # since when node 0 refuses this node for good, and why
        self.stage = "it has just started"
        self.waiting: msg.PreflightWaiting | None = None  # node 0's latest word
        # Node 0's clock minus ours, and how much it may be off.
        self.offset: tuple[float, float] = (0.0, _NO_CLOCK_S)
        self._listener = Listener(port, ports)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where this node listens."""
        return self._listener.port

    def hurry(self) -> None:
        """End without the thread where it hangs, in the resolver for example."""
        now_s = time.monotonic()
        if now_s > max(self._until_s, self._deadline_at_s, self._heard_s + _SILENCE_S) + _LATE_S:
            self.end((present_nodes.cut_off(self._hello.host, self.stage, now_s - self._began_s),))

    def end(self, findings: tuple[Finding, ...]) -> None:
        """End with these findings as the verdict, whatever node 0 may say."""
        self._is_over = True
        self._tell(ClusterVerdict(findings))

    def close(self) -> None:
        """End all, and free the port."""
        super().close()
        self._listener.close()

    def _connect_once(self) -> bool:
        is_good = False
        try:
            self._use_connection()
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
        """Go back to waiting for node 0; the time that it has promised ends with it."""
        self.stage, self.waiting = why, None
        self._until_s = min(self._until_s, max(self._first_until_s, time.monotonic() + _COME_BACK_S))

    def _give_up(self) -> None:
        if self._refused is not None:
            return self.end((present_nodes.refused(self._refused[1]),))
        name = f"node 0 ({self._home.host})"
        return self.end((present_nodes.no_coordinator(name, self.stage, time.monotonic() - self._began_s),))

    def _use_connection(self) -> None:
        with self._connect() as sock:
            tune(sock, _SILENT_KERNEL_S)
            lines = Lines(sock, msg.parse, self._server, self._secret)
            self._greet(sock, lines)
            sock.settimeout(_ANSWER_S)
            self._talk(sock, lines, msg.Renew(), LEASE_S / 3, _SILENCE_S)

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
            self._listener = Listener(None, self._ports)

    def _greet(self, sock: socket.socket, lines: Lines[msg.Message]) -> None:
        until_s = min(time.monotonic() + _ANSWER_S, max(self._until_s, time.monotonic() + 0.2))
        lines.challenged(until_s, self._other)
        sock.settimeout(_ANSWER_S)
        answer = self._introduced(lines, replace(self._hello, listens=self._listener.port), until_s)
        if isinstance(answer, msg.Refused) and not answer.retry:
            self._refuse(answer.reason)
        is_preflight = isinstance(answer, msg.PreflightWaiting | msg.Complete)
        for message in (answer, *(self._learn_time(lines, until_s) if is_preflight else ())):
            self._take(message)

    def _refuse(self, reason: str) -> None:
        """Believe it at once where there is no name that may still lead to another job's pod."""
        now_s, name = time.monotonic(), self._home.host
        since_s, _ = self._refused = (self._refused[0] if self._refused else now_s, reason)
        if is_address(name) or name == "localhost" or now_s >= since_s + timeouts.DNS_CACHE_S:
            self.end((present_nodes.refused(reason),))

    def _take(self, message: msg.Message) -> None:
        match message:
            case JobStatus():  # a coordinator's
                self.end((present_nodes.runs_already(None),))
            case msg.PreflightWaiting(_, _, _, left_s):
                self._refused = None
                self._until_s = max(self._until_s, time.monotonic() + left_s + _GRACE_S)
                self.stage, self.waiting = "it takes part in the cluster preflight", message
                self._tell(message)
            case msg.Complete():
                self._tell(message)
            case msg.Test() as test:

                def take_part() -> None:
                    self.send(self._bench(_findable(test), self._listener))

                threading.Thread(target=take_part, daemon=True).start()
            case msg.Decided(findings):
                self.end(findings)
            case msg.Refused(reason, _):
                raise LostError(f"node 0 refuses for now: {reason}")

    def _learn_time(self, lines: Lines[msg.Message], until_s: float) -> list[msg.Message]:
        """Four timestamps, as NTP has them; the fastest of some exchanges tells most. What else comes meanwhile."""
        others: list[msg.Message] = []
        self.offset = (0.0, _NO_CLOCK_S)
        for _ in range(_CLOCK_TRIES):
            lines.say(msg.render(msg.Time(self._clock())))
            while not isinstance(answer := lines.next(until_s), msg.TimeIs):
                others.append(answer)
                if isinstance(answer, msg.Decided):  # the last word
                    return others
            now = self._clock()
            round_trip_s = max(0.0, (now - answer.sent) - (answer.answered - answer.heard))
            if round_trip_s / 2 < self.offset[1]:
                self.offset = (((answer.heard - answer.sent) + (answer.answered - now)) / 2, round_trip_s / 2)
        return others


def _findable(test: msg.Test) -> msg.Test:
    """With an address for a name that leads there, or nowhere in time: whether it resolves is for the check dns."""
    if test.rank == 0 or not test.address:
        return test
    try:
        addresses = Resolving(test.host, test.port).within(_NAME_S)
    except OSError:
        addresses = [test.address]
    return replace(test, host=test.address) if test.address in addresses else test


def look_out(
    seats: Sequence[Endpoint], job: str, secret: bytes | None, at_work: Callable[[str], None]
) -> threading.Event:
    """Ask in a thread one seat after the other whether the job runs already, until the event is set.

    `at_work` is called with the first host that says so; a standby of a job that has not begun answers, too.
    """
    over = threading.Event()

    def ask() -> None:
        for seat in itertools.cycle(seats):
            if over.wait(_SEAT_PAUSE_S):
                return
            try:
                status = candidates.ask(seat, job, secret, _SEAT_ANSWER_S)
            except NodeError:
                continue
            if status.generation > 0 and status.end is None:
                at_work(seat.host)
                return

    threading.Thread(target=ask, name="lookout", daemon=True).start()
    return over
