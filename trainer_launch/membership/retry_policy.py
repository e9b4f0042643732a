"""Whether to start the workers again would be in vain: what fails the same way each time. Pure."""

from __future__ import annotations

from trainer_launch.membership import protocol as msg
from trainer_launch.model.typos import is_slip

_UNPARSABLE = frozenset({"SyntaxError", "IndentationError", "TabError"})
_MISSING = frozenset({"ImportError", "ModuleNotFoundError"})  # once may be a volume that was not there yet
_REFUSALS = {
    2: "its arguments are refused (exit code 2)",
    126: "its program cannot be executed (exit code 126)",
    127: "its program cannot be found (exit code 127)",
}


def why(failed: msg.Failed, before: msg.Failed | None) -> str | None:
    """Why not to start again; None when it may help.

    `before` is how the generation before ended, if both failed soon after their start. Which rank was the first to
    tell is chance: at the start all fail alike.
    """
    if failed.error in _UNPARSABLE:
        return f"a {failed.error} is the same each time"
    if before is None or before.generation + 1 != failed.generation:
        return None
    is_of_code = failed.error in _MISSING or is_slip(failed.message)
    if is_of_code and (failed.error, failed.message) == (before.error, before.message):
        return f"the same {failed.error} has ended two starts in a row"
    if failed.error is None and failed.exit_code == before.exit_code and failed.exit_code in _REFUSALS:
        return f"{_REFUSALS[failed.exit_code]}, two starts in a row"
    return None
