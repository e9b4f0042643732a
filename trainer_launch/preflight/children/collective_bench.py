"""Tests of nodes with torch's gloo or NCCL, started by path in the program's own Python.

Imports torch once, then takes orders as JSON lines from the socket that is its input. For each rail of an order a
process is forked, which never outlives the order's time: this one touches no GPU, so it cannot hang in a driver.
Who is first in a test opens a store for each rail and tells the ports to whoever comes with the token.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

pair_bench: Any = importlib.import_module("pair_bench")  # beside this file
reduction: Any = importlib.import_module("reduction")
sys.path.pop(0)  # this folder's names are no modules of torch's or the user's

_AGAIN_S = 0.02
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the other end of the socket is gone."""
    orders = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import torch.distributed as dist

        can = {"gloo": dist.is_available() and dist.is_gloo_available(), "gpus": _gpus(dist), "why": ""}
        if not can["gloo"]:
            can["why"] = "this torch has no gloo"
    except Exception as problem:  # noqa: BLE001  a broken torch raises whatever it likes
        can = {
            "gloo": False,
            "gpus": 0,
            "why": f"torch cannot be imported: {type(problem).__name__}: {problem}"[:300],
        }
    _tell(orders, can)
    buffer = b""
    while True:
        data, descriptors, _, _ = socket.recv_fds(orders, 1 << 16, 1)
        if not data:
            return
        buffer += data
        if buffer.endswith(b"\n"):
            listener = socket.socket(fileno=descriptors[0]) if descriptors else None
            _tell(orders, {"rails": serve(json.loads(buffer), listener, orders)})
            buffer = b""


def _tell(orders: socket.socket, said: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        orders.sendall(json.dumps(said).encode() + b"\n")


def _gpus(dist: Any) -> int:
    """How many GPUs NCCL could use; asked by a child, since asking may open the driver."""
    if not dist.is_nccl_available():
        return 0

    def count(tell: Callable[[object], None]) -> None:
        import torch

        tell(torch.cuda.device_count())

    child = Child(count)
    told = child.line(time.monotonic() + 20.0)
    child.end()
    return told if isinstance(told, int) else 0


class Child:
    """A forked process that tells one JSON value or two, on lines, and is killed when it is not wanted any more."""

    def __init__(self, work: Callable[[Callable[[object], None]], None]) -> None:
        self.reader, writer = os.pipe()
        self._buffer = b""
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid:
            os.close(writer)
            return
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == parent:
                work(lambda said: _write(writer, said))
        finally:
            os._exit(0)

    def line(self, until: float) -> object:
        """Its next word; None: none came in time, or it has ended."""
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self.reader], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self.reader, 1 << 16) if ready else b""
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def end(self) -> bool:
        """Kill it; whether it went."""
        os.close(self.reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        until = time.monotonic() + 0.5
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        return True


def _write(writer: int, said: object) -> None:
    os.write(writer, json.dumps(said).encode() + b"\n")


# -- one order --------------------------------------------------------------------------------


def serve(order: Mapping[str, Any], listener: socket.socket | None, orders: socket.socket) -> list[tuple[str, int]]:
    """Why each rail failed, or "", and its bytes per second."""
    until = time.monotonic() + float(order["limit_s"])
    n_rails = int(order["rails"])
    children: list[Child] = []
    try:
        if listener is None:
            ports = dial(order, until)
            children += [_started(order, rail, until, ports[rail % len(ports)]) for rail in range(n_rails)]
        else:
            n_stores = 1 if order["is_whole"] else n_rails
            children += [_started(order, rail, until, None) for rail in range(n_stores)]
            ports = [_port(child.line(until)) for child in children]
            children += [_started(order, rail, until, ports[0]) for rail in range(n_stores, n_rails)]
            welcome(order, listener, until, ports, orders)
        seen = [_seen(child.line(until)) for child in children]
    except pair_bench.Failed as problem:
        seen = [(str(problem), 0)] * n_rails
    gone = [child.end() for child in children] + [True] * (n_rails - len(children))
    stuck = ("its test hangs in the kernel: not even SIGKILL ends it", 0)
    return [one if is_gone else stuck for one, is_gone in zip(seen, gone)]  # noqa: B905  Python may be an old one


def _started(order: Mapping[str, Any], rail: int, until: float, port: int | None) -> Child:
    return Child(lambda tell: reduction.work(order, rail, until, port, tell))


def _port(said: object) -> int:
    if isinstance(said, int):
        return said
    raise pair_bench.Failed(f"its store could not be opened: {_seen(said)[0]}")


def _seen(said: object) -> tuple[str, int]:
    if isinstance(said, list) and len(said) == 2:
        return str(said[0]), int(said[1])
    return "its test hung and was killed, or died", 0


def welcome(
    order: Mapping[str, Any], listener: socket.socket, until: float, ports: Sequence[int], orders: socket.socket
) -> None:
    """Tell all others where the stores are."""
    answer = f"ok {','.join(map(str, ports))}\n".encode()
    left = int(order["size"]) - 1
    while left:
        ready, _, _ = select.select([listener, orders], [], [], max(0.0, until - time.monotonic()))
        if not ready or orders in ready:  # who gave the order is gone
            raise pair_bench.Failed(f"{left} of {int(order['size']) - 1} others did not connect in time")
        try:
            sock, _ = listener.accept()
        except OSError:
            continue
        with sock, contextlib.suppress(pair_bench.Failed):
            sock.setblocking(True)
            said = pair_bench.line(sock, min(until, time.monotonic() + pair_bench.TOKEN_S), "no token")
            if said == order["token"]:  # else a probe, or who is late from an earlier test
                with pair_bench.in_time(sock, until, "cannot answer"):
                    sock.sendall(answer)
                left -= 1


def dial(order: Mapping[str, Any], until: float) -> list[int]:
    """Connect until the first node is at this test; the ports of its stores."""
    host, port = str(order["host"]), int(order["port"])
    where = f"{host}:{port}"
    while True:
        with pair_bench.connected(where, host, port, until) as sock:
            with pair_bench.in_time(sock, until, f"no answer from {where}"):
                sock.sendall(str(order["token"]).encode() + b"\n")
            word, _, ports = pair_bench.line(sock, until, f"no answer from {where}").partition(" ")
        numbers = [int(one) for one in ports.split(",") if one.isascii() and one.isdigit() and len(one) < 6]
        if word == "ok" and numbers:
            return numbers
        if time.monotonic() + _AGAIN_S > until:
            raise pair_bench.Failed(f"{where} was not ready for the test in time")
        time.sleep(_AGAIN_S)  # it has not begun yet


if __name__ == "__main__":
    main()
    os._exit(0)  # torch takes its time
