"""One end of a test of two nodes, started by path with `-I -S`: only the standard library.

`dial TOKEN SECONDS HOST PORT` or `listen TOKEN SECONDS DESCRIPTOR`. Both send for a moment, one after the other,
data that follows from the token; who receives compares every byte and takes the time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator

BLOCK = 1 << 18
SEND_S = 0.12
TOKEN_S = 1.0  # for whoever connects to say that this test is meant: it is said at once
_AGAIN_S = 0.02
_LENGTH = struct.Struct("!Q")


class PairTestFailed(Exception):
    """The test failed; says at which step."""


def main() -> None:
    """Do what the command line says."""
    role, token, limit = sys.argv[1:4]
    signal.setitimer(signal.ITIMER_REAL, float(limit) + 5)  # should our parent die first
    until = time.monotonic() + float(limit)
    rate, why = 0, ""
    try:
        if role == "dial":
            rate = dial(token, until, sys.argv[4], int(sys.argv[5]))
        else:
            rate = answer(token, until, int(sys.argv[4]))
    except PairTestFailed as problem:
        why = str(problem)
    os.write(1, json.dumps({"rails": [[why, rate]]}).encode())


def dial(token: str, until: float, host: str, port: int) -> int:
    """Connect until the other end is at the test, then send first; bytes per second that came back."""
    where = f"{host}:{port}"
    while True:
        sock = connected(where, host, port, until)
        with sock:
            with in_time(sock, until, f"no answer from {where}"):
                sock.sendall(token.encode() + b"\n")
            if line(sock, until, f"no answer from {where}") == "ok":
                send(sock, token, until)
                return receive(sock, token, until)
        if time.monotonic() + _AGAIN_S > until:
            raise PairTestFailed(f"{where} was not ready for the test in time")
        time.sleep(_AGAIN_S)  # it has not begun yet


def connected(where: str, host: str, port: int, until: float) -> socket.socket:
    """Connect, or say why not."""
    try:
        return socket.create_connection((host, port), timeout=max(0.01, until - time.monotonic()))
    except TimeoutError:
        raise PairTestFailed(f"cannot connect to {where}: no answer in time") from None
    except (OSError, UnicodeError) as problem:
        raise PairTestFailed(
            f"cannot connect to {where}: {getattr(problem, 'strerror', None) or problem}"
        ) from None


def answer(token: str, until: float, descriptor: int) -> int:
    """Wait for who knows the token, receive first, then send; bytes per second that came."""
    listener = socket.socket(fileno=descriptor)
    while True:
        listener.settimeout(max(0.01, until - time.monotonic()))
        try:
            sock, _ = listener.accept()
        except OSError:
            raise PairTestFailed("the other end did not connect in time") from None
        with sock:
            try:
                if line(sock, min(until, time.monotonic() + TOKEN_S), "no token") != token:
                    continue  # a probe, or who is late from an earlier test
            except PairTestFailed:
                continue
            with in_time(sock, until, "cannot answer"):
                sock.sendall(b"ok\n")
            rate = receive(sock, token, until)
            send(sock, token, until)
            return rate


def send(sock: socket.socket, token: str, until: float) -> None:
    """Send for a moment, at least one block."""
    block = hashlib.shake_256(token.encode()).digest(BLOCK)
    end = time.monotonic() + SEND_S
    while True:
        with in_time(sock, until, "sending stalls"):
            sock.sendall(_LENGTH.pack(BLOCK) + block)
        if time.monotonic() >= end:
            break
    with in_time(sock, until, "sending stalls"):
        sock.sendall(_LENGTH.pack(0))


def receive(sock: socket.socket, token: str, until: float) -> int:
    """Take all that comes, and compare it; bytes per second."""
    block = hashlib.shake_256(token.encode()).digest(BLOCK)
    buffer = memoryview(bytearray(BLOCK))
    total, began = 0, 0.0
    while True:
        fill(sock, buffer[: _LENGTH.size], until)
        began = began or time.monotonic()
        (size,) = _LENGTH.unpack(buffer[: _LENGTH.size])
        if size == 0:
            return int(total / max(1e-6, time.monotonic() - began))
        if size != BLOCK:
            raise PairTestFailed("the data arrives damaged")
        fill(sock, buffer, until)
        if buffer != block:
            raise PairTestFailed("the data arrives damaged")
        total += size


def fill(sock: socket.socket, buffer: memoryview, until: float) -> None:
    """Read until it is full."""
    at = 0
    while at < len(buffer):
        with in_time(sock, until, "receiving stalls"):
            taken = sock.recv_into(buffer[at:])
        if not taken:
            raise PairTestFailed("the other end has ended the test")
        at += taken


def line(sock: socket.socket, until: float, what: str) -> str:
    """A short line, without its end; empty at the end of the connection."""
    said = b""
    while not said.endswith(b"\n") and len(said) < 500:
        with in_time(sock, until, what):
            byte = sock.recv(1)
        if not byte:
            return ""
        said += byte
    return said.decode("ascii", "replace").strip()


@contextlib.contextmanager
def in_time(sock: socket.socket, until: float, what: str) -> Iterator[None]:
    """Do something with the socket in the time that is left, or fail."""
    sock.settimeout(max(0.01, until - time.monotonic()))
    try:
        yield
    except TimeoutError:
        raise PairTestFailed(f"{what}: out of time") from None
    except OSError as problem:
        raise PairTestFailed(f"{what}: {problem.strerror}") from None


if __name__ == "__main__":
    main()
