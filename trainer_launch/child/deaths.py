"""Who of the workers died, in which order and how, seen without a signal handler of ours.

torch collects its workers seldom and forgets how they ended. The kernel tells a descriptor of a process at once.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator

from trainer_launch.pytorch.worker_death import HowItDied, how_it_died


class Deaths:
    """Looks at processes from a thread that sleeps until one of them ends."""

    def __init__(self, seen: dict[int, HowItDied]) -> None:
        self._seen = seen  # gets pids in the order they died
        self._ends = select.epoll()
        self._pids: dict[int, int] = {}  # by descriptor
        self._wake, self._waker = os.pipe()
        self._ends.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._look, name="deaths", daemon=True)
        self._thread.start()

    def watch(self, pid: int) -> None:
        """Note the end of a process; where the kernel does not offer it, nothing will be known of it."""
        try:
            fd = os.pidfd_open(pid)
        except (AttributeError, OSError):  # an old kernel or a sandbox; or it was collected already
            return
        self._pids[fd] = pid
        self._ends.register(fd, select.EPOLLIN)

    def close(self) -> None:
        """Look no more."""
        os.write(self._waker, b".")
        self._thread.join()
        for fd in (*self._pids, self._wake, self._waker):
            os.close(fd)
        self._ends.close()

    def _look(self) -> None:
        for fd in self._ended():
            pid = self._pids.pop(fd)
            self._seen[pid] = how_it_died(pid)
            os.close(fd)

    def _ended(self) -> Iterator[int]:
        while True:
            ended = [fd for fd, _ in self._ends.poll()]
            if self._wake in ended:
                return
            yield from ended
