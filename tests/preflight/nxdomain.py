"""A DNS server at 127.0.0.1:53 that knows no name, for a network namespace of its own; then the command given.

    nxdomain.py CODE COMMAND…

CODE is what it answers for names of the first suffix, team.svc.cluster.local: 3 for NXDOMAIN, 2 for SERVFAIL. All
other names are NXDOMAIN.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading


def main() -> None:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 53))
    threading.Thread(target=deny, args=(server, int(sys.argv[1])), daemon=True).start()
    sys.exit(subprocess.run(sys.argv[2:]).returncode)


def deny(server: socket.socket, code: int) -> None:
    while True:
        query, caller = server.recvfrom(512)
        end = query.index(b"\0", 12) + 5  # the question alone: an EDNS record may follow it
        flags = bytes([0x81, 0x80 | (code if b"\4team\3svc" in query else 3)])
        server.sendto(query[:2] + flags + b"\0\1\0\0\0\0\0\0" + query[12:end], caller)


if __name__ == "__main__":
    main()
