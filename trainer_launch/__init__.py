"""ENTRYPOINT and init container of a training pod: checks nodes, runs the job as PID 1, reports why it ended."""

from __future__ import annotations

__version__ = "0.3.0"
__all__ = ["Elastic", "RunPolicy", "WorkerFailedError", "generations", "launch", "report", "stopping"]

TYPE_CHECKING = False  # typing itself would be the dearest import of this file
if TYPE_CHECKING:
    from trainer_launch.observability.report import report, stopping
    from trainer_launch.pytorch.function_launch import Elastic, RunPolicy, WorkerFailedError, launch
    from trainer_launch.pytorch.generations import generations

_HOMES = {
    "Elastic": "pytorch.function_launch",
    "RunPolicy": "pytorch.function_launch",
    "WorkerFailedError": "pytorch.function_launch",
    "generations": "pytorch.generations",
    "launch": "pytorch.function_launch",
    "report": "observability.report",
    "stopping": "observability.report",
}


def __getattr__(name: str) -> object:
    """Load what a training script uses when it does: `import trainer_launch` alone costs nothing."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
