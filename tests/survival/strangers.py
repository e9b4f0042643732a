"""Everything that may knock at a coordinator's port and is no node of its job: `strangers.py HOST PORT`."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time

from trainer_launch.membership import protocol as msg

FOR_S = 2.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: end with a reset


def main() -> None:
    """For some seconds: silent ones and slow ones that stay, and all others again and again."""
    there = (sys.argv[1], int(sys.argv[2]))
    hello = msg.Hello(msg.VERSION, "another job", 0, "job-node-0-0", "stranger")
    old = msg.render(hello).replace(b'"version":1', b'"version":0')
    says = (
        b"GET / HTTP/1.1\r\nHost: there\r\n\r\n",
        os.urandom(4096),
        b"{" * 100_000,
        msg.render(hello),
        old,
        msg.render(msg.Renew()),
        b"",
    )
    silent = [socket.create_connection(there) for _ in range(100)]
    slow = [socket.create_connection(there) for _ in range(20)]
    end_s, rounds = time.monotonic() + FOR_S, 0
    while time.monotonic() < end_s:
        rounds += 1
        for said in says:
            with contextlib.suppress(OSError), socket.create_connection(there) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                sock.sendall(said)
        for number, sock in enumerate(slow):
            with contextlib.suppress(OSError):
                sock.sendall(msg.render(hello)[rounds : rounds + 1] or b"x")
            if rounds % 50 == 0:
                sock.close()
                slow[number] = socket.create_connection(there)
    for sock in (*silent, *slow):
        sock.close()
    print(f"{rounds * len(says)} strangers came and went")


if __name__ == "__main__":
    main()
