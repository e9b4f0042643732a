"""What engines start in their own place: an agent, which PID 1 starts again when it is killed."""

from __future__ import annotations

RESTARTS = 3  # an hour, when it is killed; it ends by itself with its workers' code, which is final


def code(entry: str) -> str:
    """What Python has to run (`-c`) for the agent that `mpi.agent_start` calls by this name.

    Not -m: it would look for our modules, and for Python's own, in the user's working directory first.
    """
    safe = "import sys; '' in sys.path and sys.path.remove('')"
    return f"{safe}; from trainer_launch.mpi.agent_start import {entry}; {entry}()"
