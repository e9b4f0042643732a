"""What can go wrong before a program runs, cut by whose fault it is.

LaunchError
├── UsageError      the user's flags, settings or command
├── ContractError   the platform's variables and files
├── NodeError       this machine or a peer
└── InternalError   ourselves

A message is one sentence: what was expected, what was found, where it came from, what to do.
`cli.main` turns each into one line on stderr and its exit code; nothing else calls `sys.exit`.
"""

from __future__ import annotations

from trainer_launch.model import exit_codes

# What reading somebody else's data raises that is not as it should be: no JSON or other fields, texts for numbers,
# numbers beyond all floats, nests too deep.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
_MAX_CHARS = 2_000  # lists of all names that would fit are the longest


class LaunchError(Exception):
    """Base of the four; `exit_code` is what the pod ends with. Whatever a message repeats, it is one line."""

    exit_code = exit_codes.FAILED

    def __init__(self, message: str) -> None:
        text = message if message.isprintable() else "".join(map(_printable, message))
        super().__init__(text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 1]}…")


class UsageError(LaunchError):
    """The user's flags, settings or command do not fit."""

    exit_code = exit_codes.MISCONFIGURED


class NotRunnableError(UsageError):
    """The program exists but cannot be executed (126), or is not there (127), as the shell has them."""

    def __init__(self, message: str, *, found: bool) -> None:
        super().__init__(message)
        self.exit_code = exit_codes.NOT_EXECUTABLE if found else exit_codes.NOT_FOUND


class ContractError(LaunchError):
    """What the platform injected is missing, contradictory or out of range."""

    exit_code = exit_codes.MISCONFIGURED


class NodeError(LaunchError):
    """This machine or a peer is at fault; another attempt elsewhere may succeed."""

    exit_code = exit_codes.INFRASTRUCTURE


class InternalError(LaunchError):
    """A promise of our own code is broken."""

    exit_code = exit_codes.FAILED


def _printable(sign: str) -> str:
    """A control character would break the line or command a terminal; bytes that are no UTF-8 cannot be written."""
    if sign.isprintable():
        return sign
    return " " if sign.isspace() else sign.encode("unicode_escape").decode()
