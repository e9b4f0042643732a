"""The files that a preflight leaves: tried before it starts, written after its verdict, which they never change."""

from __future__ import annotations

import errno
import functools
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from trainer_launch.host import files, logs
from trainer_launch.model.errors import UsageError

_LIMIT_S = 5.0  # a file server that is gone lets each of its callers wait for ever
# The setting is at fault; what else may happen there is the volume's, of which a check speaks.
_OF_THE_SETTING = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS))


def check(paths: Mapping[str, str | None]) -> None:
    """Find out, for each flag's file, whether it could be written.

    Raises:
        UsageError: its folder is not there or not ours.
    """
    for flag, path in paths.items():
        problem = None if path is None else _within_limit(functools.partial(_try, path))
        if problem is not None and problem.errno in _OF_THE_SETTING:
            raise UsageError(f"{flag} {path} cannot be written: {problem.strerror}; name a writable directory")


def write(flag: str, path: str, text: str, mode: int = 0o644) -> None:
    """Replace a file, whole or not at all, or warn. What is no file is written as it is."""
    problem = _within_limit(functools.partial(_write, path, text, mode))
    if problem is not None:
        logs.warn(f"{flag}: {path} was not written: {problem.strerror}")


def _try(path: str) -> None:
    if not os.path.exists(path) or os.path.isfile(path):
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(os.path.realpath(path)), prefix=".trainer-launch-"):
            pass
    elif os.path.isdir(path):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))


def _write(path: str, text: str, mode: int) -> None:
    if os.path.exists(path) and not os.path.isfile(path):
        Path(path).write_text(text, encoding="utf-8")
    else:
        files.replace(os.path.realpath(path), text.encode(), mode)


def _within_limit(act: Callable[[], None]) -> OSError | None:
    """What an act in a thread of its own came to; one that takes too long is left to itself."""
    problems: list[OSError | None] = []

    def run() -> None:
        try:
            act()
        except OSError as problem:
            problems.append(problem)
        else:
            problems.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_LIMIT_S)
    return problems[0] if problems else OSError(errno.ETIMEDOUT, f"no answer in {_LIMIT_S:g} s")
