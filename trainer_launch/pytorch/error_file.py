"""What a worker leaves of its failure where torch's @record would, for PID 1; tracebacks without our frames."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
import traceback
from types import TracebackType
from typing import TextIO

_reserved: list[tuple[int, tuple[int, int]]] = []  # a descriptor for the error of who has none left, and what it is


def reserve_descriptor(fd: int) -> None:
    """Keep this descriptor until an error has to be left and there is no other: that may be the error."""
    _reserved[:] = [(fd, _identity(fd))]


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _free_descriptor() -> None:
    """Give the reserved descriptor back, unless the program has closed it: the number may be a file of its own."""
    fd, identity = _reserved.pop()
    if _identity(fd) == identity:
        os.close(fd)


def leave_exception(problem: BaseException) -> None:
    """Leave what a program did not catch."""
    try:
        text = f"{type(problem).__name__}: {problem}"
    except Exception:  # noqa: BLE001  its own __str__ is at fault; the interpreter bears that, too
        text = f"{type(problem).__name__}: <exception str() failed>"
    leave(text, "".join(traceback.format_exception(type(problem), problem, problem.__traceback__)))


def leave(text: str, lines: str, code: int = 1) -> None:
    """Leave a text, the lines of a traceback and an exit code, unless the program has left something itself."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or (os.path.exists(path) and os.path.getsize(path)):
        return
    extra = {"py_callstack": lines, "timestamp": str(int(time.time()))}
    message = {"message": text, "errorCode": code, "extraInfo": extra}
    with contextlib.suppress(OSError), _opened(path) as file:
        json.dump({"message": message}, file)


def _opened(path: str) -> TextIO:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as problem:
        if problem.errno != errno.EMFILE or not _reserved:
            raise
    _free_descriptor()
    return open(path, "w", encoding="utf-8")


def without_frames_of(name: str, trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that a file has at its beginning."""
    while trace is not None and trace.tb_frame.f_code.co_filename == name:
        trace = trace.tb_next
    return trace
