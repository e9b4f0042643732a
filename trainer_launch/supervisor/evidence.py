"""Look at what tells why a process died: the cgroup's OOM kills and /dev/shm. Reads only."""

from __future__ import annotations

from dataclasses import replace

from trainer_launch.host import cgroup, shm
from trainer_launch.model.units import in_units
from trainer_launch.supervisor.death_clues import Evidence

_LARGEST = 3


class Witness:
    """Knows the count of OOM kills from before the last start."""

    def __init__(self, shm: str = "/dev/shm") -> None:
        self._groups = cgroup.own_groups()
        self._before: int | None = None
        self._shm = shm

    def begin(self) -> None:
        """Something is about to start: who was killed before is not what it dies of."""
        self._before = cgroup.oom_kills(self._groups)

    def look(self) -> Evidence:
        """Return what can be seen now."""
        room = shm.room(self._shm)
        seen = Evidence(
            oom_kills_before=self._before,
            oom_kills_after=cgroup.oom_kills(self._groups),
            memory_limit_bytes=cgroup.memory_limit_bytes(self._groups),
            memory_peak_bytes=cgroup.memory_peak_bytes(self._groups),
            shm_free_bytes=None if room is None else room.free_bytes,
            shm_size_bytes=None if room is None else room.size_bytes,
        )
        return replace(seen, shm_largest=_largest(self._shm)) if seen.shm_full else seen


def _largest(folder: str) -> tuple[str, ...]:
    """The three largest segments, and who has them."""
    found = shm.segments(folder)[:_LARGEST]
    users = shm.holders(found)
    return tuple(
        f"{segment.name} ({in_units(segment.size_bytes)}, of {_named(users.get(segment.key, ()))})"
        for segment in found
    )


def _named(pids: tuple[int, ...]) -> str:
    if not pids:
        return "nobody that we can see"
    return ("pid " if len(pids) == 1 else "pids ") + " ".join(map(str, pids[:_LARGEST]))
