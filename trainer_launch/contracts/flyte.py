"""What Flyte adds to every task's environment, under long and short names, whichever controller runs the task."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from trainer_launch.contracts.source import Source
from trainer_launch.model import Job, Json

MARKS = ("FLYTE_INTERNAL_EXECUTION_ID", "_F_NM", "FLYTE_INTERNAL_WORKER_NAME", "_F_WN")

_PREFIXES = ("FLYTE_INTERNAL_", "_F_")


def is_flyte(source: Source) -> bool:
    """Whether Flyte made the pod."""
    return source.has_prefix(*_PREFIXES)


def reader(read: Callable[[Source], Job]) -> Callable[[Source], Job]:
    """The same, with Flyte's words about this task; None for what it does not say."""

    def with_details(source: Source) -> Job:
        job = read(source)
        details: dict[str, Json] = {
            "flyte_worker_name": _either(source, "FLYTE_INTERNAL_WORKER_NAME", "_F_WN"),
            "flyte_dist_error_strategy": _either(source, "FLYTE_INTERNAL_DIST_ERROR_STRATEGY", "_F_DES"),
        }
        return replace(job, details={**job.details, **details})

    return with_details


def _either(source: Source, long: str, short: str) -> str | None:
    name = long if source.has(long) else short
    return None if source.blank(name) else source.text(name, "")
