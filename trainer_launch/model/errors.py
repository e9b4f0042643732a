"""Errors before a program runs, cut by whose fault they are.

LaunchError
├── UsageError      the user's flags, settings or command
├── ContractError   the platform's variables and files
├── NodeError       this machine or a peer
└── InternalError   ourselves

A message is one sentence: what was expected, what was found, where it came from, what to do.
`cli.main` turns each into one line on stderr and its exit code; nothing else calls `sys.exit`.
"""

from __future__ import annotations

import errno
import os

from trainer_launch.model import exit_codes
from trainer_launch.model.redaction import redact_text

# What reading somebody else's data raises that is not as it should be: no JSON or other fields, texts for numbers,
# numbers beyond all floats, nests too deep.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)  # what this machine has run out of
# The same where an exception has no number: of threads, and of what imports load.
_EXHAUSTED_WORDS = (
    *("can't start new thread", "failed to map segment", "MemoryError"),
    *(os.strerror(number) for number in (errno.EMFILE, errno.ENOMEM)),
)
LIMITS = "raise the container's limit (ulimit -n, pids, memory)"
_MAX_CHARS = 2_000  # lists of all names that would fit are the longest


class LaunchError(Exception):
    """Base of the four; `exit_code` is what the pod ends with. A message is one line, and repeats no secrets."""

    exit_code = exit_codes.FAILED

    def __init__(self, message: str) -> None:
        text = message if message.isprintable() else "".join(map(_printable, message))
        text = " ".join(map(redact_text, text.split(" ")))  # each word alone: prose may say "a password: usermod …"
        super().__init__(text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 1]}…")


class UsageError(LaunchError):
    """The user's flags, settings or command do not fit."""

    exit_code = exit_codes.MISCONFIGURED


class NotRunnableError(UsageError):
    """The program exists but cannot be executed (126), or is not there (127), as the shell has them."""

    def __init__(self, message: str, *, exists: bool) -> None:
        super().__init__(message)
        self.exit_code = exit_codes.NOT_EXECUTABLE if exists else exit_codes.NOT_FOUND


class ContractError(LaunchError):
    """The platform's variables or files are missing, contradictory or out of range."""

    exit_code = exit_codes.MISCONFIGURED


class NodeError(LaunchError):
    """The machine or a peer is at fault; another attempt elsewhere may succeed."""

    exit_code = exit_codes.INFRASTRUCTURE


class InternalError(LaunchError):
    """A promise of our own code is broken."""

    exit_code = exit_codes.FAILED


def tells_of_limit(text: str) -> bool:
    """Whether the text of an exception says that this machine has run out of something."""
    return any(word in text for word in _EXHAUSTED_WORDS)


def explained(cause: BaseException) -> LaunchError | None:
    """The error for people about a machine that lacks something; None: it lacks nothing, the exception is a defect.

    What was raised while a limit's own exception was handled, such as of a thread that never began, comes of it.
    """
    if isinstance(cause, LaunchError):
        return cause
    before: BaseException | None = cause
    while before is not None:
        number, text = getattr(before, "errno", None), str(before) or "out of memory"
        if number in EXHAUSTED or isinstance(before, MemoryError) or tells_of_limit(text):
            what = os.strerror(number) if number else text
            return NodeError(f"this container has reached a limit: {what}; {LIMITS}")
        before = before.__cause__ or before.__context__
    if not isinstance(cause, OSError):
        return None
    try:
        os.getcwd()
    except FileNotFoundError:
        return UsageError("the working directory does not exist any more; start in one that does")
    return LaunchError(str(cause))


def _printable(sign: str) -> str:
    """A control character would break the line or command a terminal; bytes that are no UTF-8 cannot be written."""
    if sign.isprintable():
        return sign
    return " " if sign.isspace() else sign.encode("unicode_escape").decode()
