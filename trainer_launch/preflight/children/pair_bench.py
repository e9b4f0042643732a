"""An end of a test of two nodes over a plain socket: each sends for a moment, and the other compares every byte.

Started by path with `-I -S`, with only the standard library: `TOKEN SECONDS HOST PORT [DESCRIPTOR]`. With the
descriptor of a listener it waits for the other end. A busy process such as node 0's launcher would measure itself.
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
LONG_S, FAST = 1.5, 20_000_000  # below so many bytes per second: a long way is slow for many round trips
TOKEN_S = 1.0  # for whoever connects to say that this test is meant; it sends its token at once
_AGAIN_S = 0.02
_LENGTH = struct.Struct("!Q")


class PairTestFailed(Exception):
    """The test failed; says at which step."""


def main() -> None:
    """Do what the command line says."""
    token, until, host, port, *lent = sys.argv[1:]
    limit_s = float(until) - time.monotonic()  # this program's start has taken some time of the test
    signal.setitimer(signal.ITIMER_REAL, max(0.0, limit_s) + 5)  # should our parent die first
    listener = socket.socket(fileno=int(lent[0])) if lent else None
    os.write(1, json.dumps({"rails": [measured(token, limit_s, listener, host, int(port))]}).encode())


def measured(token: str, limit_s: float, listener: socket.socket | None, host: str, port: int) -> tuple[str, int]:
    """Why the test failed, or "", and the bytes per second that came; who has a listener waits for the other."""
    until = time.monotonic() + limit_s
    try:
        if listener is None:
            with dialed(token, until, host, port)[0] as sock:
                send(sock, token, until)
                return "", receive(sock, token, until)
        with accepted(listener, token, until, b"ok\n", "the other end did not connect in time") as sock:
            rate = receive(sock, token, until)
            send(sock, token, until)
            return "", rate
    except PairTestFailed as problem:
        return str(problem), 0


def dialed(token: str, until: float, host: str, port: int) -> tuple[socket.socket, str]:
    """Connect until the other end is at the test; the connection, and what it says besides."""
    where = f"{host}:{port}"
    while True:
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(connected(where, host, port, until))
            with in_time(sock, until, f"no answer from {where}"):
                sock.sendall(token.encode() + b"\n")
            word, _, rest = line(sock, until, f"no answer from {where}").partition(" ")
            if word == "ok":
                undo.pop_all()
                return sock, rest
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


def accepted(listener: socket.socket, token: str, until: float, answer: bytes, late: str) -> socket.socket:
    """Wait for who knows the token, and answer; `late` is the failure when nobody comes in time."""
    while True:
        listener.settimeout(max(0.01, until - time.monotonic()))
        try:
            sock, _ = listener.accept()
        except OSError:
            raise PairTestFailed(late) from None
        with contextlib.ExitStack() as undo, contextlib.suppress(PairTestFailed):
            undo.enter_context(sock)
            if line(sock, min(until, time.monotonic() + TOKEN_S), "no token") == token:
                with in_time(sock, until, "cannot answer"):
                    sock.sendall(answer)
                undo.pop_all()
                return sock
        # It was a probe, or who is late from an earlier test.


def send(sock: socket.socket, token: str, until: float) -> None:
    """Send for a moment, at least one block."""
    block = hashlib.shake_256(token.encode()).digest(BLOCK)
    total, took_s, began = 0, 0.0, time.monotonic()
    while took_s < (SEND_S if total > FAST * took_s else LONG_S):
        with in_time(sock, until, "sending stalls"):
            sock.sendall(_LENGTH.pack(BLOCK) + block)
        total, took_s = total + BLOCK, time.monotonic() - began
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
    text = b""
    while not text.endswith(b"\n") and len(text) < 500:
        with in_time(sock, until, what):
            byte = sock.recv(1)
        if not byte:
            return ""
        text += byte
    return text.decode("ascii", "replace").strip()


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
