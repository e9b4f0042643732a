"""How a worker of this node died, and what the others are told of it."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_launch.coordinator import protocol as say
from trainer_launch.supervisor.symptoms import error_name


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDeath:
    """How the first worker of this node failed, as far as it is known."""

    rank: int | None = None  # in the job
    local_rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    message: str | None = None  # what it said itself, in torch's error file
    lines: tuple[str, ...] = ()  # its traceback, likewise
    reason: str | None = None  # where more is known than how it ended

    def failed(self, generation: int) -> say.Failed:
        """Tell it to the coordinator, which decides whether to start again can help."""
        said = self.message or ""
        return say.Failed(generation, self.rank, self.exit_code, self.signal, said, error_name(said))
