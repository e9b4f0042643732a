"""Look at what tells why a process died: the cgroup's OOM kills and /dev/shm. Reads only."""

from __future__ import annotations

import os

from trainer_launch.host import cgroup
from trainer_launch.supervisor.clues import Evidence


class Witness:
    """Knows the count of OOM kills from before the run."""

    def __init__(self, shm: str = "/dev/shm") -> None:
        self._groups = cgroup.own_groups()
        self._before = cgroup.oom_kills(self._groups)
        self._shm = shm

    def look(self) -> Evidence:
        """Return what can be seen now."""
        free_bytes, size_bytes = self._room()
        return Evidence(
            oom_kills_before=self._before,
            oom_kills_after=cgroup.oom_kills(self._groups),
            memory_limit_bytes=cgroup.memory_limit_bytes(self._groups),
            memory_peak_bytes=cgroup.memory_peak_bytes(self._groups),
            shm_free_bytes=free_bytes,
            shm_size_bytes=size_bytes,
        )

    def _room(self) -> tuple[int | None, int | None]:
        try:
            stat = os.statvfs(self._shm)
        except OSError:
            return None, None
        return stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
