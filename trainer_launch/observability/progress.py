"""Read the last `trainer_launch.report()` of each training process of this node."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from trainer_launch.host.files import LiveFiles
from trainer_launch.host.runtime_directory import PROGRESS, PROGRESS_END
from trainer_launch.model.errors import MALFORMED
from trainer_launch.model.frozen import dataclass
from trainer_launch.observability.report import MAX_METRICS, MAX_NAME

_MAX_BYTES = 262_144
_MAX_FILES = 1024
_BIG = 1e15  # seconds, ranks and pids are far below


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One process's latest report."""

    rank: int | None  # None: the process has no rank in a job
    local_rank: int
    pid: int
    at_s: float  # this machine's monotonic clock
    time_s: float  # since the epoch
    step: int | None = None  # how many are done
    progress: float | None  # 0.0 to 1.0
    eta_s: float | None
    metrics: Mapping[str, float]


def read(folder: str) -> tuple[Progress, ...]:
    """The latest reports of all processes of a run, lowest rank first; invalid files are skipped."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return ()
    files = LiveFiles(_MAX_BYTES)
    chosen = [name for name in names if name.startswith(PROGRESS) and name.endswith(PROGRESS_END)][:_MAX_FILES]
    found = [parse(files.read(f"{folder}/{name}") or b"") for name in chosen]
    return tuple(sorted((one for one in found if one is not None), key=_order))


def first(reports: Sequence[Progress]) -> Progress | None:
    """The report of the lowest rank, which represents the node."""
    return min(reports, key=_order, default=None)


def parse(text: bytes) -> Progress | None:
    """A report file's content; None when it is not one."""
    try:
        values = json.loads(text)
        metrics = values["metrics"]
        if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
            return None
        return Progress(
            rank=None if values["rank"] is None else _whole(values["rank"]),
            local_rank=_whole(values["local_rank"]),
            pid=_whole(values["pid"]),
            at_s=_number(values["at_s"], _BIG),
            time_s=_number(values["time_s"], _BIG),
            step=None if values.get("step") is None else _whole(values["step"]),  # older versions say none
            progress=None if values["progress"] is None else _number(values["progress"], 1.0),
            eta_s=None if values["eta_s"] is None else _number(values["eta_s"], _BIG),
            metrics={_name(name): _any_number(value) for name, value in metrics.items()},
        )
    except MALFORMED:
        return None


def _order(one: Progress) -> tuple[bool, int, int]:
    return one.rank is None, one.rank or 0, one.local_rank


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _BIG:
        raise ValueError
    return value


def _number(value: Any, most: float) -> float:
    if not 0 <= _any_number(value) <= most:
        raise ValueError
    return float(value)


def _any_number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError
    return float(value)


def _name(value: str) -> str:
    if not 0 < len(value) <= MAX_NAME:
        raise ValueError
    return value.encode(errors="replace").decode()  # Prometheus takes no lone surrogates
