"""Our own exit codes, one sentence each. A program's own code passes through unchanged."""

from __future__ import annotations

import signal

SUCCEEDED = 0
FAILED = 1
MISCONFIGURED = 2  # bad contract, flags, settings: trying again cannot help
NOT_EXECUTABLE = 126  # as the shell has it
NOT_FOUND = 127  # as the shell has it
INFRASTRUCTURE = 138  # peers, rendezvous, node or device: in both retryable lists of the v1 ExitCode policy
STOPPED = 143  # this pod was asked to stop; exit 0 would count as success

# Of `preflight`, as Kubeflow's KEP-3416 has them.
PREFLIGHT_RETRYABLE = 20  # this node or what surrounds it
PREFLIGHT_FATAL = 30  # the job itself

_SIGNAL_BASE = 128


def of_signal(number: int) -> int:
    """The exit code of a program that died of signal `number`: 128 + n."""
    return _SIGNAL_BASE + number


def failing(code: int | None) -> int | None:
    """A code that somebody has told, if a process can end with it and it is none of success."""
    return code if code is not None and 0 < code < 256 else None


def deadly(number: int | None) -> int | None:
    """A signal that somebody has told, if there is one of that number."""
    return number if number is not None and 0 < number < signal.NSIG else None


def retryable(code: int) -> bool | None:
    """Whether the v1 operator's ExitCode policy starts the pod again; None when the code means success.

    Permanent are 1 to 127, retryable all above (kubeflow/trainer release-1.9, pkg/util/train/train_util.go).
    """
    return None if code == SUCCEEDED else code >= _SIGNAL_BASE


def cannot_run(code: int | None) -> bool:
    """Whether the code says, as in a shell, that the program could not be run."""
    return code in (NOT_EXECUTABLE, NOT_FOUND)


def describe(code: int) -> str:
    """A phrase for people about an exit code."""
    phrases = {
        SUCCEEDED: "success",
        MISCONFIGURED: "invalid contract, options or settings",
        NOT_EXECUTABLE: "program not executable",
        NOT_FOUND: "program not found",
        INFRASTRUCTURE: "infrastructure failure",
        STOPPED: "stopped on request",
    }
    if code in phrases:
        return phrases[code]
    if code > _SIGNAL_BASE:
        try:
            return f"killed by {signal.Signals(code - _SIGNAL_BASE).name}"
        except ValueError:
            pass
    return "the program's own exit code"
