"""Signals that the launcher receives: the action for each, and how a user sets it: `--signals USR1=checkpoint`."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from enum import Enum

from trainer_launch.model.errors import UsageError

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP})
RELAYED = frozenset(
    {signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT, signal.SIGALRM, signal.SIGVTALRM}
    | {signal.SIGPROF, signal.SIGURG, signal.SIGIO, signal.SIGPWR}
    | set(range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
)  # the rest are faults, job control and SIGCHLD


class SignalAction(str, Enum):
    """The action for a signal that the launcher receives."""

    FORWARD = "forward"  # the workers get it, and that is all
    CHECKPOINT = "checkpoint"  # the workers get it, and are expected to save and go on
    DRAIN = "drain"  # the workers get it; when they have ended nothing is started again: the pod was stopped
    TERMINATE = "terminate"  # the workers get SIGTERM and the grace: the pod was stopped


def action_of(number: int, given: Mapping[int, SignalAction]) -> SignalAction:
    """The action for a signal, as given, else by default."""
    default = SignalAction.TERMINATE if number in STOP_SIGNALS else SignalAction.FORWARD
    return given.get(number, default)


def stops(number: int, given: Mapping[int, SignalAction]) -> bool:
    """Whether a signal asks the job to stop."""
    return action_of(number, given) in (SignalAction.DRAIN, SignalAction.TERMINATE)


def unheard(name: str, given: Mapping[int, SignalAction]) -> str:
    """A sentence about a pod's stop signal that stops nothing; "": it does."""
    number = number_of(name)
    if number is None or stops(number, given):
        return ""
    has_name = number in RELAYED and number in signal.Signals.__members__.values()
    mapped = f"Set --signals {name_of(number)}=terminate, or remove" if has_name else "Remove"
    return (
        f"lifecycle.stopSignal is {name}, which does not ask it to stop: the kubelet kills the pod at the end of "
        f"its grace period. {mapped} lifecycle.stopSignal"
    )


def number_of(name: str) -> int | None:
    """The number of a signal as a manifest writes it: SIGUSR1, SIGRTMIN+3; None: there is none."""
    base, offset, _ = re.split(r"([+-]\d{1,2}$|$)", name, maxsplit=1)
    first = signal.Signals.__members__.get(base)
    number = None if first is None else first + int(offset or 0)
    return number if number in signal.valid_signals() else None


def stop_signal(given: Mapping[int, SignalAction]) -> int:
    """The signal that asks torchrun to stop, which is one that it does not hand on unchanged.

    Raises:
        UsageError: there is none left.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if action_of(number, given) is SignalAction.TERMINATE:
            return int(number)
    raise UsageError(
        "--signals leaves no signal that stops the job; map at least one of TERM, INT, QUIT and HUP to terminate"
    )


def parse(text: str) -> dict[int, SignalAction]:
    """Read NAME=ACTION[,NAME=ACTION…].

    Raises:
        UsageError: a signal cannot be caught, or a word is none.
    """
    given: dict[int, SignalAction] = {}
    for word in filter(None, text.replace(" ", "").split(",")):
        name, _, action = word.partition("=")
        number = _number(name, "--signals")
        if number in given:
            raise UsageError(f"--signals names {name} twice; give each signal one action")
        try:
            given[number] = SignalAction(action.lower())
        except ValueError:
            words = ", ".join(choice.value for choice in SignalAction)
            raise UsageError(
                f"--signals has {word!r}; expected {name or 'NAME'}=ACTION with one of {words}"
            ) from None
    return given


def numbers(text: str, where: str) -> tuple[int, ...]:
    """Read NAME[,NAME…]; `where` says in messages who wrote it.

    Raises:
        UsageError: a signal cannot be caught, or a word is none.
    """
    return tuple(_number(name, where) for name in filter(None, text.replace(" ", "").split(",")))


def _number(name: str, where: str) -> int:
    full = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
    number = signal.Signals.__members__.get(full)
    if number is None:
        raise UsageError(f"{where} names the unknown signal {name!r}; use names such as TERM, USR1, SIGUSR2")
    if number not in STOP_SIGNALS | RELAYED:
        raise UsageError(
            f"{where} names {full}, which the launcher cannot pass on: no process receives SIGKILL or SIGSTOP, "
            f"and the launcher handles SIGCHLD and fault signals itself; use TERM, INT, HUP, QUIT, USR1 or USR2"
        )
    return int(number)


def name_of(number: int) -> str:
    """`USR1` for SIGUSR1."""
    try:
        return signal.Signals(number).name.removeprefix("SIG")
    except ValueError:
        return str(number)


def signal_name(number: int) -> str:
    """`SIGUSR1`; `SIG40` for one without a name."""
    return f"SIG{name_of(number)}"
