"""How a generation's store takes all ranks at once: connections that are refused or lost, and the time to the last.

Run: python benchmarks/store.py [ranks]
"""

from __future__ import annotations

import errno
import multiprocessing
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection

from trainer_launch.host import process_attributes

LATEST_S = 10.0
_VALIDATE, _PING = 0, 13  # what a TCPStore's client says first
_GREETING = struct.pack("=BIBI", _VALIDATE, 0x3C85F7CE, _PING, 7)


def serve(pipe: Connection, libuv: bool, is_ours: bool) -> None:
    """The store, in a process of its own as the fork server starts it or as torch does."""
    from torch.distributed import TCPStore

    if is_ours:
        process_attributes.allow_many_files()
        process_attributes.ask_no_name_server()
    wait_s = timedelta(seconds=LATEST_S)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait_s, use_libuv=libuv)
    pipe.send(store.port)
    signal.pause()


def connect(port: int, ranks: int) -> tuple[int, int, float]:
    """All at once: how many were answered, how many refused or reset, and the seconds to the last answer."""
    answered = refused = 0
    began_s = last_s = time.monotonic()
    socks = []
    with selectors.DefaultSelector() as selector:
        for _ in range(ranks):
            sock = socket.socket()
            sock.setblocking(False)
            if sock.connect_ex(("127.0.0.1", port)) not in (0, errno.EINPROGRESS):
                refused += 1
                continue
            socks.append(sock)
            selector.register(sock, selectors.EVENT_WRITE, sock)
        while selector.get_map() and time.monotonic() < began_s + LATEST_S:
            for key, mask in selector.select(1.0):
                sock = key.data
                try:
                    if mask & selectors.EVENT_WRITE:
                        sock.sendall(_GREETING)
                        selector.modify(sock, selectors.EVENT_READ, sock)
                        continue
                    if sock.recv(4) != _GREETING[-4:]:
                        raise ConnectionResetError
                    answered, last_s = answered + 1, time.monotonic()
                except OSError:
                    refused += 1
                selector.unregister(sock)
    for sock in socks:
        sock.close()
    return answered, refused, last_s - began_s


def overflows() -> int:
    """How often the kernel has dropped a connection because a queue was full."""
    with open("/proc/net/netstat", encoding="ascii") as lines:
        names, values = (line.split() for line in list(lines)[:2])
    return int(dict(zip(names, values, strict=True))["ListenOverflows"])


def measure(ranks: int, *, libuv: bool, is_ours: bool) -> str:
    """One store, as the fork server opens it or as torch does: what came of it."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve, args=(theirs, libuv, is_ours))
    process.start()
    port, before = ours.recv(), overflows()
    answered, refused, took_s = connect(port, ranks)
    dropped = overflows() - before
    process.kill()
    process.join()
    refusals = f"{refused} refused or reset, {dropped} dropped by the kernel"
    return f"{answered} of {ranks} answered in {took_s:.2f} s, {refusals}"


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for is_ours in (True, False):
        for libuv in (True, False):
            words = measure(ranks, libuv=libuv, is_ours=is_ours)
            print(f"{'trainer_launch' if is_ours else 'torch'}, {'libuv' if libuv else 'threads'}: {words}")


if __name__ == "__main__":
    main()
