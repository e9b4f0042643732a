"""Who of the workers died, in which order and how, seen without a signal handler of ours.

torch collects its workers seldom and forgets how they ended. The kernel tells a descriptor of a process at once.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainer_launch.host import process_tree
from trainer_launch.pytorch.worker_death import HowItDied, Starts, WorkerDeath, how_it_died
from trainer_launch.supervisor import error_file


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


class FirstDeath:
    """Which worker of this node failed first, since the last time it was asked; ranks are torch's own events'."""

    def __init__(
        self,
        deaths: Mapping[int, HowItDied],
        destination: str,
        watch: Callable[[int], None] = lambda pid: None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._look = look
        self._deaths = deaths
        self._watch = watch
        self.environments: dict[int, dict[str, str]] = {}  # of the workers by local rank
        self._ranks: dict[int, tuple[int, int]] = {}  # by pid: rank, local rank
        self._seen = 0  # deaths that were told
        self._first = 0  # deaths of workers before the present ones
        self._starts = Starts(destination, self._started)

    def close(self) -> None:
        """Listen to torch no more."""
        self._starts.close()

    def begin(self, environments: dict[int, dict[str, str]]) -> None:
        """New workers are about to start; whoever died before is no failure of theirs."""
        self.environments = environments
        self._seen = self._first = len(self._deaths)

    def _started(self, pid: int, rank: int, local_rank: int) -> None:
        self._ranks[pid] = rank, local_rank
        if local_rank not in self.environments:
            self.environments[local_rank] = process_tree.environment(pid) or {}
        self._watch(pid)

    def living(self) -> list[int]:
        """Workers that have not been seen to end."""
        return [pid for pid in self._ranks if pid not in self._deaths]

    def __call__(self) -> WorkerDeath | None:
        """The first death that has not been told yet, None when there is none."""
        self._look()
        deaths = list(self._deaths.items())[self._seen :]
        self._seen += len(deaths)
        return next((self._death(pid, how) for pid, how in deaths if how is None or how[0] != 0), None)

    def all(self) -> list[WorkerDeath]:
        """All deaths of the present workers, in their order."""
        self._look()
        return [self._death(pid, how) for pid, how in list(self._deaths.items())[self._first :]]

    def _death(self, pid: int, how: HowItDied) -> WorkerDeath:
        code, number = how or (None, None)
        rank, local_rank = self._ranks.get(pid, (None, None))
        said = self._last_words(local_rank)
        return WorkerDeath(
            rank=rank,
            local_rank=local_rank,
            exit_code=code,
            signal=number,
            message=error_file.message_in(said),
            lines=tuple(error_file.traceback_in(said)),
        )

    def _last_words(self, local_rank: int | None) -> dict[str, Any]:
        environment = self.environments.get(-1 if local_rank is None else local_rank, {})
        return error_file.read_error_file(environment.get("TORCHELASTIC_ERROR_FILE"))
