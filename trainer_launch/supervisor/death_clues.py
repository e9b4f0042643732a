"""What is known about a death beside its exit code: values, and how the agent's note becomes one. Pure."""

from __future__ import annotations

import json
from typing import Any

from trainer_launch.model import FailureRecord, exit_codes
from trainer_launch.model.frozen import dataclass
from trainer_launch.supervisor import error_lines

_MOST_RANKS = 2**31  # as the coordinator has it
_MAX_NAME = 253  # as in DNS


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What else is known about a death. None: could not be read."""

    oom_kills_before: int | None = None
    oom_kills_after: int | None = None
    memory_limit_bytes: int | None = None  # of the cgroup
    memory_peak_bytes: int | None = None
    shm_free_bytes: int | None = None
    shm_size_bytes: int | None = None
    shm_largest: tuple[str, ...] = ()  # what fills it, and who has that
    agent: FailureRecord | None = None
    last_lines: tuple[str, ...] = ()  # what it wrote last
    stopped: bool = False  # we were asked to stop first
    handed_on: frozenset[int] = frozenset()  # signals that we got and handed on unchanged
    text: str = ""  # what exec said, when it did not even start

    @property
    def oom_killed(self) -> bool:
        """Whether the kernel killed for memory in our cgroup since what died was started."""
        before, after = self.oom_kills_before, self.oom_kills_after
        return before is not None and after is not None and after > before

    @property
    def shm_full(self) -> bool:
        """Whether /dev/shm has no room worth the name: under 2 %, or under 1 MiB."""
        free, size = self.shm_free_bytes, self.shm_size_bytes
        return free is not None and size is not None and free < max(1 << 20, size // 50)


def parse_agent_failure(text: str) -> FailureRecord | None:
    """Parse an agent's note, or torchrun's error file; None when it is neither: it must not hide the failure."""
    try:
        note = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(note, dict):
        return None
    if isinstance(note.get("message"), dict):
        words = {"message": error_lines.message_in(note), "lines": error_lines.traceback_in(note)}
        note = {**note, **error_lines.ended_in(note), **words}
    lines = note.get("lines")
    return FailureRecord(
        **{key: _of_type(note.get(key), str) for key in ("reason", "message", "why_not_again")},
        hostname=_name(note.get("hostname")),
        rank=_index(note.get("rank")),
        local_rank=_index(note.get("local_rank")),
        exit_code=exit_codes.failing(_of_type(note.get("exit_code"), int)),
        signal=exit_codes.deadly(_of_type(note.get("signal"), int)),
        timestamp=_of_type(note.get("timestamp"), (int, float)),
        oom_kills_before=_index(note.get("oom_kills_before")),
        lines=tuple(str(line) for line in lines) if isinstance(lines, list) else (),
    )


def _name(value: object) -> str | None:
    """One that stands in a line of termination message."""
    return value if isinstance(value, str) and value.isprintable() and len(value) <= _MAX_NAME else None


def _index(value: object) -> int | None:
    number: int | None = _of_type(value, int)
    return number if number is not None and 0 <= number < _MOST_RANKS else None


def _of_type(value: object, kind: type | tuple[type, ...]) -> Any:
    return value if isinstance(value, kind) and not isinstance(value, bool) else None
