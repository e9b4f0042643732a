"""Why a process could not be started, as an error that says what to do."""

from __future__ import annotations

import errno
import os

from trainer_launch.model import Process
from trainer_launch.model.errors import NodeError, NotRunnableError

_SHOWN_BYTES = 120
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
    found = number not in (errno.ENOENT, errno.ENOTDIR) or ("/" in place and os.path.exists(place))
    text = os.strerror(number) if number else str(error)
    if number == errno.ENOENT and found:
        text = f"its interpreter does not exist: {_first_line(place)}"
    elif number == errno.ENOENT and "/" not in place:
        text = f"not found in PATH ({process.env.get('PATH', 'not set')})"
    return NotRunnableError(f"cannot run {place!r} for {process.name}: {text}", found=found)


def _first_line(path: str) -> str:
    try:
        with open(path, "rb") as file:
            line = file.readline(_SHOWN_BYTES)
    except OSError as problem:
        return str(problem.strerror)
    return (
        repr(line.decode(errors="replace").strip()) if line.startswith(b"#!") else "the dynamic loader of a binary"
    )
