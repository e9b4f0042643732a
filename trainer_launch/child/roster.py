"""The agent's workers, however they were started: who lives, who died first, and how.

torch knows a worker by the process that it has started. That is the program itself, a child of ours that leads its
own session; or, under the fork-server, a process that looks after the program and notes both in a journal. `look`
and `living` are called in signal handlers: they only call `os`.
"""

from __future__ import annotations

import logging
import os

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from trainer_launch.child.places import journal_of, note_place, noted
from trainer_launch.host import cgroup
from trainer_launch.pytorch.worker_death import HowItDied, Starts, how_it_died
from trainer_launch.sizes import counted

_log = logging.getLogger(__name__)


class Roster:
    """All workers of the present start; `begin` forgets those before."""

    def __init__(self, folder: str | None) -> None:
        self.deaths: dict[int, HowItDied] = {}  # by torch's pid, in the order they died
        self.environments: dict[int, dict[str, str]] = {}  # by local rank
        self.oom_kills_before: int | None = None  # in this container, when they were started
        self._folder = folder
        self._ranks: dict[int, tuple[int, int]] = {}  # by torch's pid: rank, local rank
        self._programs: dict[int, int] = {}  # by torch's pid, for those under the fork-server
        self._journal = journal_of(folder, os.getpid()) if folder else None
        self._read_bytes = 0
        self._cleared = 0  # processes that dead workers had left
        self._looking = False
        self._look_again = False

    def begin(self, environments: dict[int, dict[str, str]]) -> None:
        """New workers are about to start."""
        self.look()
        if self._cleared:
            _log.info("ended %s left running by dead workers", counted(self._cleared, "process"))
            self._cleared = 0
        self.environments = environments
        self.oom_kills_before = cgroup.oom_kills(cgroup.own_groups())
        self.deaths.clear()  # in place: others look at it
        self._programs, self._ranks = {}, {}

    def listen(self, destination: str) -> None:
        """Learn ranks from torch's events."""
        Starts(destination, self.started)

    def started(self, pid: int, rank: int, local_rank: int) -> None:
        """Torch has started a worker."""
        self._ranks[pid] = rank, local_rank
        if self._folder and pid not in self._programs:
            self.look()
            if pid not in self._programs:
                note_place(self._folder, pid=pid, rank=rank, local_rank=local_rank, stacks=None)

    # -- in signal handlers, too --------------------------------------------------------------

    @property
    def is_looking(self) -> bool:
        """Whether a look was interrupted: until it goes on, `living` may name who has died."""
        return self._looking

    def look(self) -> None:
        """Note who has died since the last look."""
        self._look_again = True
        if self._looking:
            return  # it is seen by the look that was interrupted
        self._looking = True
        try:
            while self._look_again:
                self._look_again = False
                self._read_journal()
                for pid, alive in _children().items():
                    if not alive and pid not in self.deaths:
                        self.deaths[pid] = how_it_died(pid)
                self._note_vanished()
        finally:
            self._looking = False

    def living(self) -> list[int]:
        """The programs that run, as of the last look where they were forked: each leads its session."""
        forked = [program for pid, program in self._programs.items() if pid not in self.deaths]
        return forked + [pid for pid, alive in _children().items() if alive]

    def _read_journal(self) -> None:
        data = _read(self._journal, self._read_bytes) if self._journal else b""
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for word, pid, value in noted(whole):
            if word == b"start":
                self._programs[pid] = value
            elif word == b"cleared":
                self._cleared += value
            elif pid in self._programs:
                self.deaths[pid] = (value, None) if value >= 0 else (None, -value)

    def _note_vanished(self) -> None:
        """A worker whose looking-after process was killed has no last entry; the program died with it."""
        gone = [pid for pid in self._programs if pid not in self.deaths and not _is_alive(pid)]
        if gone:
            self._read_journal()  # it may have been written meanwhile
        for pid in gone:
            self.deaths.setdefault(pid, (None, 9))

    # -- afterwards ---------------------------------------------------------------------------

    def failures(self) -> dict[int, ProcessFailure]:
        """All failures by rank, as torch would list them."""
        self.look()
        found = {}
        for pid, how in self.deaths.items():
            code, number = how or (None, None)
            rank, local_rank = self._ranks.get(pid, (None, None))
            exitcode = -number if number is not None else code
            if exitcode and rank is not None:
                found[rank] = ProcessFailure(local_rank, pid, exitcode, self._error_file(local_rank) or "")
        return found

    def _error_file(self, local_rank: int | None) -> str | None:
        environment = self.environments.get(-1 if local_rank is None else local_rank, {})
        return environment.get("TORCHELASTIC_ERROR_FILE")


def _children() -> dict[int, bool]:
    """Our own children that lead a session and were not collected yet, and whether they are alive."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        for word in _read(f"/proc/self/task/{thread}/children").split():
            fields = _stat(int(word))
            if len(fields) > 3 and int(fields[3]) == int(word):
                found[int(word)] = fields[0] not in (b"Z", b"X")
    return found


def _is_alive(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] not in (b"Z", b"X")


def _stat(pid: int) -> list[bytes]:
    """/proc/PID/stat reads: pid (name) state ppid pgrp session …; the name may hold blanks and brackets."""
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def _read(path: str, offset: int = 0) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        if offset:
            os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, 65536)
    except OSError:
        return b""
    finally:
        os.close(fd)
