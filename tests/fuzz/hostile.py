"""Clients and servers that mean no good, on real sockets: `hostile.py HOST PORT` attacks a port for a while."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tests.fuzz import corpus
from trainer_launch.membership import protocol as msg

FOR_S = 3.0
HUGE = b"9" * 400
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: end with a reset
WORDS = (
    b"",
    b"\n\n\n",
    os.urandom(5000) + b"\n",
    b"{" * 200_000,
    b"[" * 60_000 + b"\n",
    b'{"kind":"time","sent":' + HUGE + b"}\n",
    b'{"kind":' + b"[" * 500 + b"]" * 500 + b"}\n",
    b'{"kind":"status"}\n' * 3000,
    b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 5000,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(500),
    msg.render(msg.Hello(msg.VERSION, "another job", 0, "n", "i")) * 50,
    msg.render(msg.StatusQuery(msg.VERSION, "no such job")) * 50,
)


def attack(port: int, for_s: float = FOR_S, host: str = "127.0.0.1") -> int:
    """Everything at once for some seconds; how many connections were made."""
    there = (host, port)
    chance = random.Random(7)
    lines = [
        data + b"\n" for name in corpus.targets() if name.endswith("_lines") for data in corpus.read(name).values()
    ]
    lasting = [socket.create_connection(there, timeout=5) for _ in range(60)]  # silent, slow, half-open
    for sock in lasting[:20]:
        sock.shutdown(socket.SHUT_WR)
    made, end_s = len(lasting), time.monotonic() + for_s
    while time.monotonic() < end_s:
        for said in (*WORDS, *chance.sample(lines, min(20, len(lines)))):
            with contextlib.suppress(OSError), socket.create_connection(there, timeout=5) as sock:
                made += 1
                sock.settimeout(1.0)
                if chance.random() < 0.5:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                sock.sendall(said)
        for sock in lasting[20:40]:
            with contextlib.suppress(OSError):
                sock.sendall(b"{")
    for sock in lasting:
        sock.close()
    return made


ANSWERS: dict[str, Callable[[socket.socket], None]] = {
    "random bytes": lambda sock: sock.sendall(os.urandom(100_000)),
    "a line without end": lambda sock: sock.sendall(b"SSH-" + b"x" * 1_000_000),
    "lines that are no messages": lambda sock: sock.sendall(b"x\n" * 10_000),
    "a number beyond floats": lambda sock: sock.sendall(
        b'{"kind":"timeis","sent":' + HUGE + b',"heard":1,"answered":1}\n'
    ),
    "a challenge that is no text": lambda sock: sock.sendall(b'{"kind":"challenge","nonce":"\\ud800"}\n' * 3),
    "a deep nest": lambda sock: sock.sendall(b"[" * 60_000 + b"\n"),
    "nothing": lambda sock: time.sleep(0.2),
    "a reset": lambda sock: sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET),
    "a byte now and then": lambda sock: _drip(sock),
}


def _drip(sock: socket.socket) -> None:
    for _ in range(200):
        sock.sendall(b"{")
        time.sleep(0.05)


@contextlib.contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server on loopback that treats everybody so; its port."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:

        def serve(sock: socket.socket) -> None:
            with sock, contextlib.suppress(OSError):
                answer(sock)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


if __name__ == "__main__":
    print(attack(int(sys.argv[2]), host=sys.argv[1]))
