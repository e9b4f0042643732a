"""A node's part in tests of pairs of nodes: its listener, and children that are killed when their time is up."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, to_builtins

from trainer_launch.host import deadline_subprocess
from trainer_launch.host.deadline_subprocess import RunningCommand, Streams
from trainer_launch.host.network import free_port, listen
from trainer_launch.model import Endpoint, PortRange
from trainer_launch.model.codec import Count, Text, decoded
from trainer_launch.model.errors import NodeError
from trainer_launch.preflight.cluster import pairs
from trainer_launch.preflight.cluster import preflight_messages as msg

CHILD = Path(__file__).parents[1] / "children" / "collective_bench.py"
PAIR_TEST_CHILD = (sys.executable, "-I", "-S", str(CHILD.with_name("pair_bench.py")))
IMPORT_S = 45.0  # for torch, on a cold disk
# A child gives up by itself before these have passed, too, and says where it was.
_MARGIN_S = 1.5
_PAIR_TEST_MARGIN_S = 0.5
_REAP_S = 0.5
_MAX_BYTES = 1 << 16


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
        with contextlib.suppress(NodeError):  # another program may have it
            return listen(Endpoint("", port))
    return listen(Endpoint("", 0 if among is None else free_port(among)))


class BenchAnswer(Struct, frozen=True):
    """Output of a child: at first what it can do, then how each rail of a test went."""

    gpus: Count = 0
    why: Text = ""  # it cannot do more
    rails: tuple[msg.RailResult, ...] = ()


def read_answer(test: msg.Test, line: bytes, otherwise: str) -> tuple[msg.RailResult, ...]:
    """How each rail of a test went; `otherwise` is why all failed where the child has not said it."""
    answer = decoded(BenchAnswer, line)
    return answer.rails if answer is not None and len(answer.rails) == test.rails else failed(test, otherwise)


def failed(test: msg.Test, why: str) -> tuple[msg.RailResult, ...]:
    """All rails failed for one reason."""
    return (msg.RailResult(why, 0),) * test.rails


def run(test: msg.Test, listener: Listener, child: Sequence[str] = PAIR_TEST_CHILD) -> msg.Result:
    """A test over plain sockets."""
    with contextlib.nullcontext() if test.rank else listener.lent() as lent:
        descriptors = () if lent is None else (lent.fileno(),)
        until_s = time.monotonic() + test.limit_s
        argv = (*child, test.token, str(until_s), test.host, str(test.port), *map(str, descriptors))
        streams, limit_s = Streams(pass_fds=descriptors), test.limit_s + _PAIR_TEST_MARGIN_S
        ended = deadline_subprocess.run(argv, None, limit_s, streams, reap_s=_REAP_S)
    why = f"its test ended with {ended.status} without a result"
    if ended.problem is not None:
        why = f"its test could not be started: {ended.problem.strerror}"
    elif ended.timed_out or ended.is_stuck:
        why = f"its test hung and was killed after {test.limit_s:g} s"
    return msg.Result(test.round, read_answer(test, ended.stdout, why))


def bench(collectives: Collectives | None, test: msg.Test, listener: Listener) -> msg.Result:
    """Play this node's part in a test of any kind; always comes back in time."""
    if test.way == pairs.SOCKET:
        return run(test, listener)
    if collectives is None:
        return msg.Result(test.round, failed(test, f"this node has no {test.way}"))
    return msg.Result(test.round, collectives.run(test, listener))


class Collectives:
    """The child that has imported torch; `python` has the program's torch, its stores listen on `ports`."""

    def __init__(self, python: Sequence[str], env: Mapping[str, str], ports: PortRange | None = None) -> None:
        self._argv = (*python, str(CHILD))
        self._ports = None if ports is None else [ports.low, ports.high]
        self._env = dict(env)
        self._lock = threading.Lock()
        self._closing = False
        self._start()

    def _start(self) -> None:
        self._can: BenchAnswer | None = None  # its first words
        self._problem = ""
        self._child: RunningCommand | None = None
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            streams = Streams(stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                self._child = RunningCommand(self._argv, self._env, streams)
            except OSError as problem:
                self._problem = f"its process could not be started: {problem.strerror}"

    def ability(self) -> str:
        """Say what this node can test with, as `means_fact` does; waits until torch is imported."""
        with self._lock:
            can = self._ready(IMPORT_S) or BenchAnswer(why=self._problem)
        return pairs.means_fact(can.gpus, can.why[:200])

    def _ready(self, limit_s: float) -> BenchAnswer | None:
        if self._can is None and not self._problem:
            self._can = decoded(BenchAnswer, self._line(time.monotonic() + limit_s))
            if self._can is None:
                self._problem = self._problem or f"torch was not imported within {limit_s:g} s"
        return self._can

    def run(self, test: msg.Test, listener: Listener) -> tuple[msg.RailResult, ...]:
        """Play this node's part; always comes back in time."""
        until_s = time.monotonic() + test.limit_s
        with self._lock:
            if self._ready(test.limit_s) is None:
                return failed(test, self._problem)
            with contextlib.nullcontext() if test.rank else listener.lent() as lent:
                line = self._ask(test, until_s, [] if lent is None else [lent.fileno()])
            if line is None and not self._closing:
                self._end()
                self._start()
                return failed(test, f"its test hung and was killed after {test.limit_s:g} s")
        return read_answer(test, line or b"", "its test gave no usable result")

    def _ask(self, test: msg.Test, until_s: float, descriptors: list[int]) -> bytes | None:
        order = to_builtins(test) | {"limit_s": max(0.1, until_s - time.monotonic()), "ports": self._ports}
        try:
            self._sock.settimeout(1.0)
            socket.send_fds(self._sock, [json.dumps(order).encode()], descriptors)
        except OSError:
            return None
        return self._line(until_s + _MARGIN_S)

    def _line(self, until_s: float) -> bytes | None:
        try:
            self._sock.settimeout(max(0.01, until_s - time.monotonic()))
            line = self._sock.recv(_MAX_BYTES)
        except OSError:
            return None
        if not line and self._child is not None:
            self._problem = f"its process ended with {self._child.end(_REAP_S).status}"
        return line or None

    def close(self) -> None:
        """End the child and all that it has started."""
        self._closing = True
        self._end()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # the child kills what it has started
        if self._child is not None:
            self._child.stop(_REAP_S)
            self._child.end(_REAP_S)
        self._sock.close()
