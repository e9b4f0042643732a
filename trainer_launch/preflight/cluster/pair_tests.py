"""One node's part in tests of pairs of nodes, in children that are killed when their time is up."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from trainer_launch.host import deadline_subprocess
from trainer_launch.model import PortRange
from trainer_launch.model.errors import MALFORMED
from trainer_launch.preflight.cluster import pair_rounds
from trainer_launch.preflight.cluster import preflight_messages as msg

if TYPE_CHECKING:
    from trainer_launch.preflight.cluster.node_listener import Listener

CHILD = Path(__file__).parents[1] / "children" / "collective_bench.py"
IMPORT_S = 45.0  # for torch, on a cold disk
_MARGIN_S = 1.5  # it gives up by itself before that, and says where it was
_REAP_S = 0.5
_MAX_BYTES = 1 << 16


class Collectives:
    """The child, and what it can do; `python` has the program's torch, its stores listen on `ports`."""

    def __init__(self, python: Sequence[str], env: Mapping[str, str], ports: PortRange | None = None) -> None:
        self._argv = (*python, str(CHILD))
        self._ports = ports
        self._env = dict(env)
        self._lock = threading.Lock()
        self._closing = False
        self._start()

    def _start(self) -> None:
        self._buffer = b""
        self._told: Mapping[str, Any] | None = None  # its first words
        self._problem = ""
        self._sock, theirs = socket.socketpair()
        with theirs:
            try:
                self._child: subprocess.Popen[bytes] | None = subprocess.Popen(
                    self._argv,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=self._env,
                    start_new_session=True,
                )
            except OSError as problem:
                self._child = None
                self._problem = f"its process could not be started: {problem.strerror}"

    def ability(self) -> str:
        """What this node can do, in the words of `ways`; waits until torch is imported."""
        with self._lock:
            told = self._ready(IMPORT_S)
        if told is None:
            return pair_rounds.means_told(False, 0, self._problem)
        gpus = told.get("gpus", 0)
        return pair_rounds.means_told(
            told.get("gloo") is True, gpus if type(gpus) is int else 0, str(told.get("why", ""))[:200]
        )

    def _ready(self, limit_s: float) -> Mapping[str, Any] | None:
        if self._told is None and not self._problem:
            self._told = self._line(time.monotonic() + limit_s)
            if self._told is None:
                self._problem = self._problem or f"torch was not imported within {limit_s:g} s"
        return self._told

    def run(self, test: msg.Test, listener: Listener) -> tuple[msg.Seen, ...]:
        """Play this node's part; always comes back in time."""
        until_s = time.monotonic() + test.limit_s
        with self._lock:
            if self._ready(test.limit_s) is None:
                return _failed(test, self._problem)
            told = self._asked(test, listener, until_s) if test.rank == 0 else self._ask(test, until_s, [])
            if told is None and not self._closing:
                self._end()
                self._start()
                return _failed(test, f"its test hung and was killed after {test.limit_s:g} s")
        return _read(test, told or {})

    def _asked(self, test: msg.Test, listener: Listener, until_s: float) -> Mapping[str, Any] | None:
        with listener.lent() as descriptor:
            return self._ask(test, until_s, [descriptor])

    def _ask(self, test: msg.Test, until_s: float, descriptors: list[int]) -> Mapping[str, Any] | None:
        ports = None if self._ports is None else [self._ports.low, self._ports.high]
        order = to_builtins(test) | {"limit_s": max(0.1, until_s - time.monotonic()), "ports": ports}
        try:
            self._sock.settimeout(1.0)
            socket.send_fds(self._sock, [json.dumps(order).encode() + b"\n"], descriptors)
        except OSError:
            return None
        return self._line(until_s + _MARGIN_S)

    def _line(self, until_s: float) -> Mapping[str, Any] | None:
        while b"\n" not in self._buffer and len(self._buffer) < _MAX_BYTES:
            try:
                self._sock.settimeout(max(0.01, until_s - time.monotonic()))
                got = self._sock.recv(_MAX_BYTES)
            except OSError:
                return None
            if not got:
                status = self._child.wait() if self._child is not None else None
                self._problem = f"its process ended with {status}"
                return None
            self._buffer += got
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            told = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return told if isinstance(told, dict) else None

    def close(self) -> None:
        """End the child and all that it has started."""
        self._closing = True
        self._end()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # the child kills what it has started
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_REAP_S)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                self._child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_REAP_S)
        self._sock.close()


def _read(test: msg.Test, told: Mapping[str, Any]) -> tuple[msg.Seen, ...]:
    rails = told.get("rails")
    try:
        seen = [_seen(why, rate) for why, rate in rails or ()]
    except MALFORMED:
        seen = []
    return tuple(seen) if len(seen) == test.rails else _failed(test, "its test said nothing of use")


def _seen(why: object, rate: Any) -> msg.Seen:
    return msg.Seen(str(why)[:300], max(0, min(int(rate), 2**52)))


def _failed(test: msg.Test, why: str) -> tuple[msg.Seen, ...]:
    return (msg.Seen(why, 0),) * test.rails


# -- one end of a pair test --------------------------------------------------------------------


PAIR_TEST_CHILD = (sys.executable, "-I", "-S", str(Path(__file__).parents[1] / "children" / "pair_bench.py"))
_PAIR_TEST_MARGIN_S = 0.5  # it gives up by itself before that, and says where it was


class Bench:
    """This node's part in tests of any kind."""

    def __init__(self, collectives: Collectives | None = None) -> None:
        self._collectives = collectives

    def __call__(self, test: msg.Test, listener: Listener) -> msg.Result:
        """Play this node's part; always comes back in time."""
        if test.way == pair_rounds.SOCKET:
            return run(test, listener)
        if self._collectives is None:
            return msg.Result(test.round, _failed(test, f"this node has no {test.way}"))
        return msg.Result(test.round, self._collectives.run(test, listener))


def run(test: msg.Test, listener: Listener, child: Sequence[str] = PAIR_TEST_CHILD) -> msg.Result:
    """A test over plain sockets."""
    limit = str(test.limit_s)
    if test.rank:
        seen = _of_child(test, (*child, "dial", test.token, limit, test.host, str(test.port)), ())
    else:
        with listener.lent() as descriptor:
            seen = _of_child(test, (*child, "listen", test.token, limit, str(descriptor)), (descriptor,))
    return msg.Result(test.round, seen)


def _of_child(test: msg.Test, argv: Sequence[str], descriptors: Sequence[int]) -> tuple[msg.Seen, ...]:
    limit_s = test.limit_s + _PAIR_TEST_MARGIN_S
    streams = deadline_subprocess.Streams(pass_fds=descriptors)
    child = deadline_subprocess.run(argv, None, limit_s, streams, reap_s=_REAP_S)
    if child.problem is not None:
        return _failed(test, f"its test could not be started: {child.problem.strerror}")
    if child.status is None:
        return _failed(test, "its test hangs in the kernel: not even SIGKILL ends it")
    if child.timed_out:
        return _failed(test, f"its test hung and was killed after {test.limit_s:g} s")
    return _pair_test_read(test, child.stdout, child.status)


def _pair_test_read(test: msg.Test, said: bytes, status: int) -> tuple[msg.Seen, ...]:
    try:
        told = json.loads(said)
        return (_seen(told["why"], told["rate"]),)
    except MALFORMED:
        return _failed(test, f"its test ended with {status} and said nothing")
