"""Whether a failed attempt is repeated: the same rules for torch's generations and for starts of mpirun. Pure."""

from __future__ import annotations

from trainer_launch.model import Death, suggestions
from trainer_launch.model.units import counted

IN_VAIN = frozenset({"ProgramError", "Misconfigured", "NotRunnable"})  # exit reasons of what comes again each time
_MISSING = frozenset({"ImportError", "ModuleNotFoundError"})  # once may be a volume that was not there yet


def why_not_again(failed: Death, before: Death | None, *, is_early: bool) -> str | None:
    """Why a restart cannot help; None when it may.

    Of errors, only what fails soon after its start can be the same each time: a later SyntaxError may be of a torn
    cache file. `before` is how the attempt before ended, if it failed as early. Which rank was the first to tell is
    chance: at the start all fail alike.
    """
    if failed.reason in IN_VAIN:
        return "it would fail in the same way"
    if not is_early:
        return None
    if suggestions.is_unparsable_code(failed.message or ""):
        return f"a {failed.error} is the same each time"
    if before is None or before.attempt + 1 != failed.attempt:
        return None
    is_same = (failed.error, failed.message) == (before.error, before.message)
    if is_same and is_of_code(failed.error, failed.message):
        return f"the same {failed.error or 'missing module'} has ended two starts in a row"
    return None


def is_of_code(error: str | None, message: str | None) -> bool:
    """Whether an error tells of the program itself, which is the same at every start."""
    text = message or ""
    tells = (suggestions.is_unparsable_code, suggestions.is_typo_in_program, suggestions.is_missing_program)
    return error in _MISSING or any(tell(text) for tell in tells)


def why_spent(used: int, allowed: int) -> str | None:
    """Why the restart budget has no room for one more; None when it has."""
    if used < allowed:
        return None
    if allowed == 0:
        return "--max-restarts 0 allows no restart"
    return f"the restart budget is used up ({counted(allowed, 'restart')})"
