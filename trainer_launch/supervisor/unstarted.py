"""Why a process could not be started, as an error that says what to do."""

from __future__ import annotations

import errno
import os

from trainer_launch.errors import NodeError, NotRunnableError
from trainer_launch.model import Process

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)  # what this machine has run out of


def exhausted(process: Process, error: OSError) -> NodeError:
    """This machine has run out of something."""
    return NodeError(
        f"cannot start {process.name}: {error.strerror}; raise the container's limit (ulimit -n, pids, memory) "
        f"or start fewer processes"
    )


def why(process: Process, error: OSError | ValueError) -> NodeError | NotRunnableError:
    """What the error of a start means."""
    if isinstance(error, OSError) and error.errno in _EXHAUSTED:
        return exhausted(process, error)
    number = error.errno if isinstance(error, OSError) else None
    place = error.filename if isinstance(error, OSError) and error.filename else process.argv[0]
    found = number not in (errno.ENOENT, errno.ENOTDIR) or os.path.exists(place)
    text = os.strerror(number) if number else str(error)
    if found and number == errno.ENOENT:
        text = "the interpreter that its first line names is not there"
    return NotRunnableError(f"cannot run {place!r} for {process.name}: {text}", found=found)
