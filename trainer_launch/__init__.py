"""trainer_launch owns a training pod: reads what was injected, runs it as PID 1, says how it ended."""

from __future__ import annotations

__version__ = "0.1.0.dev0"
__all__ = ["report"]

TYPE_CHECKING = False  # typing itself would be the dearest import of this file
if TYPE_CHECKING:
    from trainer_launch.reporting import report


def __getattr__(name: str) -> object:
    """Load what a training script uses when it does: `import trainer_launch` alone costs nothing."""
    if name == "report":
        from trainer_launch.reporting import report

        return report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
