"""trainer_launch owns a training pod: reads what was injected, runs it as PID 1, says how it ended."""

__version__ = "0.1.0.dev0"
