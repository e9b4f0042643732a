"""Whether torch's workers can be forked from a process that has imported torch, and what that one has to know."""

from __future__ import annotations

import json
from collections.abc import Mapping

from trainer_launch.engines.request import Request
from trainer_launch.errors import UsageError


def settings(request: Request, options: Mapping[str, str], program: str) -> tuple[str | None, str]:
    """What the agent's fork-server has to know, None without one; and why.

    Raises:
        UsageError: it is asked for, but cannot be.
    """
    reason = _obstacle(request, options, program)
    asked = request.start_method
    if asked == "exec" or (reason and asked == "auto"):
        return None, f"workers start without the fork server: {reason or '--start-method is exec'}"
    if reason:
        raise UsageError(f"--start-method is forkserver, but {reason}; set it to auto")
    is_module = "module" in options
    script = None if is_module else program
    words = {"script": script, "preload": request.preload, "required": asked == "forkserver"}
    return json.dumps(words), "the fork server, which has imported torch, forks the workers"


def decision(request: Request, options: Mapping[str, str], program: str) -> tuple[bool, str]:
    """Whether the workers are forked from the fork server, and why or why not.

    Raises:
        UsageError: it is asked for, but cannot be.
    """
    found, why = settings(request, options, program)
    return found is not None, why


def _obstacle(request: Request, options: Mapping[str, str], program: str) -> str | None:
    """Why the program cannot run in a process that is forked from a server."""
    if request.replace_launcher:
        return "with --exec torchrun itself starts them"
    if "no_python" in options:
        return "the program is not a script or module of the launcher's own Python"
    if "run_path" in options:
        return "with --run-path torch runs the program itself"
    if "numa_binding" in options:
        return "--numa-binding starts them with numactl"
    if request.env.get("PYTHON_EXEC", request.python) != request.python:
        return "PYTHON_EXEC names another Python"
    if "module" not in options and not program.endswith(".py"):
        return f"{program!r} is not a .py file"
    return None
