"""A slow or damaging way between hosts: their TCP goes through a program with a token bucket that may flip a bit.

Not every kernel can shape traffic, but nftables' redirect is everywhere. Started by path inside a host:
`middleman.py PORT BYTES_PER_SECOND FLIP_AT`; 0: as fast as it can, nothing is flipped.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

PORT = 7799
_MARK = 7  # of the middleman's own connections, which are not to come back to it
_SO_MARK, _SO_ORIGINAL_DST = 36, 80
_CHUNK = 1 << 14
_BUFFER = 1 << 16

_RULES = """
table ip middleman {{
  chain incoming {{ type nat hook prerouting priority -100;
    ip saddr {{ {peers} }} meta l4proto tcp redirect to :{port}; }}
  chain outgoing {{ type nat hook output priority -100;
    ip daddr {{ {peers} }} meta mark != {mark} meta l4proto tcp redirect to :{port}; }}
}}
"""


@contextlib.contextmanager
def between(enter: Sequence[str], peers: Sequence[str], *, rate: int = 0, flip_at: int = 0) -> Iterator[None]:
    """All TCP of a host with these addresses goes through a middleman, which `enter` runs there."""
    argv = (sys.executable, "-I", "-S", __file__, str(PORT), str(rate), str(flip_at))
    with subprocess.Popen((*enter, *argv), stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            rules = _RULES.format(peers=", ".join(peers), port=PORT, mark=_MARK)
            subprocess.run((*enter, "nft", "-f", "-"), input=rules, text=True, check=True)
            yield
        finally:
            program.kill()


def missing() -> str | None:
    """What this needs and the machine does not give."""
    return None if shutil.which("nft") else "needs nftables"


def main() -> None:
    """Pass on what comes."""
    port, rate, flip_at = map(int, sys.argv[1:])
    with socket.create_server(("", port), backlog=64) as listener:
        print("ready", flush=True)
        while True:
            theirs, _ = listener.accept()
            threading.Thread(target=serve, args=(theirs, rate, flip_at), daemon=True).start()


def serve(theirs: socket.socket, rate: int, flip_at: int) -> None:
    """One connection, both ways."""
    found = theirs.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
    port, address = struct.unpack("!2xH4s8x", found)
    ours = socket.socket()
    with theirs, ours:
        ours.setsockopt(socket.SOL_SOCKET, _SO_MARK, _MARK)
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        with contextlib.suppress(OSError):
            ours.connect((socket.inet_ntoa(address), port))
            back = threading.Thread(target=copy, args=(ours, theirs, rate, flip_at), daemon=True)
            back.start()
            copy(theirs, ours, rate, flip_at)
            back.join()


def copy(source: socket.socket, sink: socket.socket, rate: int, flip_at: int) -> None:
    """Pass bytes on, so many in a second, one of them damaged."""
    began, passed = time.monotonic(), 0
    with contextlib.suppress(OSError):
        while data := bytearray(source.recv(_CHUNK)):
            if passed <= flip_at < passed + len(data) and flip_at:
                data[flip_at - passed] ^= 1
            passed += len(data)
            if rate:
                # An empty bucket to begin with; what was not used is not saved up.
                began = max(began, time.monotonic() - (passed - len(data)) / rate)
                time.sleep(max(0.0, began + passed / rate - time.monotonic()))
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main()
