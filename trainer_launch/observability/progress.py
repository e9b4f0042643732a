"""Read the last `trainer_launch.report()` of each training process of this node."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from trainer_launch.host.files import LiveFiles
from trainer_launch.host.runtime_directory import PROGRESS, PROGRESS_END
from trainer_launch.host.slow_files import within
from trainer_launch.model import codec
from trainer_launch.model.codec import Count
from trainer_launch.observability.report import MAX_METRICS, MAX_NAME

_MAX_BYTES = 262_144
_MAX_FILES = 1024
_Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e15)]
_Metric: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]


class Progress(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One process's latest report."""

    rank: Count | None  # None: the process has no rank in a job
    local_rank: Count
    pid: Count
    at_s: _Seconds  # this machine's monotonic clock
    time_s: _Seconds  # since the epoch
    step: Count | None = None  # how many are done; older versions of `report()` say none
    progress: Annotated[float, Meta(ge=0, le=1)] | None  # 0.0 to 1.0
    eta_s: _Seconds | None
    metrics: Annotated[Mapping[_Metric, float], Meta(max_length=MAX_METRICS)]
    not_finite: Mapping[_Metric, Literal["nan", "inf", "-inf"]] = field(
        default_factory=dict
    )  # JSON has no such numbers
    first_at_s: _Seconds | None = None  # its first report, monotonic
    first_step: Count | None = None  # the first step that it told
    checkpoint_s: _Seconds = 0.0  # in checkpoints so far
    checkpointing: bool = False  # now


def read(folder: str) -> tuple[Progress, ...]:
    """The latest reports of all processes of a run, lowest rank first; invalid files are skipped."""
    none: list[str] = []
    try:
        names = sorted(within(folder, none, os.listdir, folder))
    except OSError:
        return ()
    files = LiveFiles(_MAX_BYTES)
    chosen = [name for name in names if name.startswith(PROGRESS) and name.endswith(PROGRESS_END)][:_MAX_FILES]
    reports = [parse(files.read(f"{folder}/{name}") or b"") for name in chosen]
    return tuple(sorted((report for report in reports if report is not None), key=_order))


def first(reports: Sequence[Progress]) -> Progress | None:
    """The report of the lowest rank, which represents the node."""
    return min(reports, key=_order, default=None)


def parse(text: bytes) -> Progress | None:
    """A report file's content; None when it is not one."""
    try:
        report: Progress = codec.decode(Progress, text, _MAX_BYTES)
    except codec.MessageError:
        return None
    # Prometheus takes no lone surrogates.
    values = {**report.metrics, **{name: float(word) for name, word in report.not_finite.items()}}
    metrics = {name.encode(errors="replace").decode(): value for name, value in values.items()}
    return replace(report, metrics=metrics, not_finite={})


def _order(report: Progress) -> tuple[bool, int, int]:
    return report.rank is None, report.rank or 0, report.local_rank
