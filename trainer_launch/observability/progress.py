"""Read the last `trainer_launch.report()` of each training process of this node."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host.files import LiveFiles
from trainer_launch.host.runtime_directory import PROGRESS, PROGRESS_END
from trainer_launch.model import json_lines
from trainer_launch.model.json_lines import Bound, Count
from trainer_launch.observability.report import MAX_METRICS, MAX_NAME

_MAX_BYTES = 262_144
_MAX_FILES = 1024
_Seconds: TypeAlias = Annotated[float, Bound(0, 1e15)]
_Metric: TypeAlias = Annotated[str, Bound(1, MAX_NAME)]
_Number: TypeAlias = Annotated[float, Bound(-math.inf, math.inf)]


class Progress(Struct, frozen=True, kw_only=True):
    """One process's latest report."""

    rank: Count | None  # None: the process has no rank in a job
    local_rank: Count
    pid: Count
    at_s: _Seconds  # this machine's monotonic clock
    time_s: _Seconds  # since the epoch
    step: Count | None = None  # how many are done; older versions of `report()` say none
    progress: Annotated[float, Bound(0, 1)] | None  # 0.0 to 1.0
    eta_s: _Seconds | None
    metrics: Annotated[Mapping[_Metric, _Number], Bound(0, MAX_METRICS)]
    first_at_s: _Seconds | None = None  # its first report, monotonic
    first_step: Count | None = None  # the first step that it told
    checkpoint_s: _Seconds = 0.0  # in checkpoints so far
    checkpointing: bool = False  # now


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
        found = json_lines.decode(Progress, text, _MAX_BYTES)
    except json_lines.MessageError:
        return None
    # Prometheus takes no lone surrogates.
    metrics = {name.encode(errors="replace").decode(): value for name, value in found.metrics.items()}
    return replace(found, metrics=metrics)


def _order(one: Progress) -> tuple[bool, int, int]:
    return one.rank is None, one.rank or 0, one.local_rank
