"""A DNS server at 127.0.0.1:53 that knows no name, for a network namespace of its own; then the command given."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading


def main() -> None:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 53))
    threading.Thread(target=deny, args=(server,), daemon=True).start()
    sys.exit(subprocess.run(sys.argv[1:]).returncode)


def deny(server: socket.socket) -> None:
    while True:
        query, caller = server.recvfrom(512)
        end = query.index(b"\0", 12) + 5  # the question alone: an EDNS record may follow it
        server.sendto(query[:2] + b"\x81\x83\0\1\0\0\0\0\0\0" + query[12:end], caller)


if __name__ == "__main__":
    main()
