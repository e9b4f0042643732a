"""The note that PID 1 leaves when it has killed this node's workers because they hang."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass, replace

from trainer_launch import run_folder
from trainer_launch.errors import MALFORMED
from trainer_launch.host.files import LiveFiles
from trainer_launch.pytorch.worker_death import WorkerDeath

REASON = "Hung"
_MAX_BYTES = 1_048_576
_MOST_RANKS = 2**31  # as the coordinator has it
_FRESH_S = 60.0  # the workers die at once; a later SIGKILL is somebody else's


@dataclass(frozen=True, slots=True)
class Note:
    """Who hung, in PID 1's words."""

    rank: int | None
    local_rank: int | None
    message: str
    lines: tuple[str, ...]  # where its threads were


def about(number: int | None) -> Note | None:
    """The note about workers that have just died of this signal, if it was PID 1 who killed them; None: unknown."""
    folder = os.environ.get(run_folder.VARIABLE)
    if number not in (None, signal.SIGKILL) or not folder:
        return None
    return read(LiveFiles(_MAX_BYTES).read(f"{folder}/{run_folder.HANG}") or b"", time.monotonic())


def forget(_environments: object) -> None:
    """Before each start of the workers: what they die of is another matter."""
    folder = os.environ.get(run_folder.VARIABLE)
    if folder:
        with contextlib.suppress(OSError):  # there is none, most often
            os.unlink(f"{folder}/{run_folder.HANG}")


def read(data: bytes, now_s: float) -> Note | None:
    """The note, if it is one, and as fresh as the deaths are."""
    try:
        told = json.loads(data)
        note = Note(
            _index(told["rank"]), _index(told["local_rank"]), str(told["message"]), tuple(map(str, told["lines"]))
        )
        return note if now_s - float(told["at_s"]) <= _FRESH_S else None
    except MALFORMED:
        return None


def _index(value: object) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value < _MOST_RANKS):
        raise ValueError(f"{value!r} is no rank")
    return value


def named(death: WorkerDeath | None) -> WorkerDeath | None:
    """The first death, with the hang as its cause when it was one, and the faulty rank in place of the first."""
    if death is None or death.exit_code is not None:
        return death
    note = about(death.signal)
    if note is None:
        return death
    place = {"rank": note.rank, "local_rank": note.local_rank}
    return replace(death, **place, signal=signal.SIGKILL, reason=REASON, message=note.message, lines=note.lines)
