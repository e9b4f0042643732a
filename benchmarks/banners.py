"""Banners of many simulated hosts come up in random order; how soon the launcher's wait has seen the last of them.

python -m benchmarks.banners      prints seconds after the last banner, and MB of the process that waits
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import selectors
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from trainer_launch.mpi.host_readiness import Probes, Stage, Threads

HOSTS = 500
WITHIN_S = 3.0


def main() -> None:
    """Serve and watch, each in a process of its own."""
    port = 20_000 + random.randrange(10_000)
    ours, theirs = multiprocessing.Pipe()
    banners = multiprocessing.Process(target=_banners, args=(port, theirs), daemon=True)
    banners.start()
    watcher_end, end = multiprocessing.Pipe()
    watcher = multiprocessing.get_context("spawn").Process(target=_watcher, args=(port, end), daemon=True)
    watcher.start()
    last_s = ours.recv()
    done_s, rss_kb = watcher_end.recv()
    banners.terminate()
    banners.join()
    watcher.join()
    print(done_s - last_s, rss_kb / 1024)


def _addresses() -> Iterator[str]:
    return (f"127.1.{n // 250}.{n % 250 + 1}" for n in range(HOSTS))


def _banners(port: int, told_to: Connection) -> None:
    """Hosts whose sshd come up one after the other."""
    addresses = list(_addresses())
    random.shuffle(addresses)
    selector = selectors.DefaultSelector()
    begun_s = time.monotonic()
    for number, address in enumerate(addresses):
        _serve(selector, begun_s + WITHIN_S * number / HOSTS)
        made = socket.create_server((address, port))
        made.setblocking(False)
        selector.register(made, selectors.EVENT_READ)
    told_to.send(time.monotonic())
    _serve(selector, float("inf"))


def _serve(selector: selectors.BaseSelector, until_s: float) -> None:
    while (left_s := until_s - time.monotonic()) > 0:
        for key, _ in selector.select(min(left_s, 1.0)):
            assert isinstance(key.fileobj, socket.socket)
            met, _ = key.fileobj.accept()
            met.sendall(b"SSH-2.0-benchmark\r\n")
            met.close()


def _watcher(port: int, told_to: Connection) -> None:
    """What the agent does while it waits, and nothing else."""
    selector, threads = selectors.DefaultSelector(), Threads(16)
    selector.register(threads.fd, selectors.EVENT_READ, threads.settle)
    probes = Probes(selector, threads, port, lambda _: None)
    probes.watch(_addresses())
    while any(reached.stage is not Stage.READY for reached in probes.readiness.values()):
        due_s = probes.due_s
        for key, _ in selector.select(None if due_s is None else max(0.0, due_s - time.monotonic())):
            key.data()
        probes.tick(time.monotonic())
    told_to.send((time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    os._exit(0)


if __name__ == "__main__":
    main()
