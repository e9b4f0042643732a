"""Seconds from SIGTERM to SIGKILL: --grace, else what torch was told. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from trainer_launch.planning.command import Command
from trainer_launch.planning.torchrun_options import OPTIONS, check_value

_OPTION = OPTIONS["shutdown_timeout"]
_VARIABLES = (_OPTION.variable, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")


def decide(
    own_s: float, command: Command | None, env: Mapping[str, str], *, is_given: bool
) -> tuple[float, str | None]:
    """`own_s` where the user has set --grace (`is_given`), else torch's shutdown timeout; and a warning, if any.

    Raises:
        UsageError: the timeout is not a whole number.
    """
    typed = command.torchrun.options if command is not None and command.torchrun is not None else {}
    told = _told(typed, env)
    if told is None:
        return own_s, None
    name, timeout_s = told
    if not is_given:
        return timeout_s, None
    if timeout_s <= own_s:
        return own_s, None
    return own_s, (
        f"{name} is {timeout_s:g} s, but workers get SIGKILL after {own_s:g} s, because --grace is set; "
        f"set --grace to {timeout_s:g}, or remove it"
    )


def _told(typed: Mapping[str, str], env: Mapping[str, str]) -> tuple[str, float] | None:
    """The name and value that torchrun would use."""
    found = {_OPTION.flag: typed.get(_OPTION.name), **{name: env.get(name) for name in _VARIABLES}}
    for name, value in found.items():
        if value:
            return name, float(check_value(_OPTION, value, name))
    return None
