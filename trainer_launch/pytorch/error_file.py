"""A worker leaves its error where torch's @record would, for PID 1; tracebacks without our frames."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from types import TracebackType

from trainer_launch.supervisor import error_lines

_CHARS, _LINE_CHARS = 100_000, 2000  # that PID 1 reads: an exception may quote a whole response


def leave_exception(problem: BaseException) -> None:
    """Leave what a program did not catch."""
    name = type(problem).__name__
    if name.lower() == "error":  # struct's, zlib's, binascii's
        name = f"{type(problem).__module__}.{name}"
    try:
        text = f"{name}: {problem}"
    except Exception:  # noqa: BLE001  its own __str__ is at fault; the interpreter bears that, too
        text = f"{name}: <exception str() failed>"
    leave(text, "".join(traceback.format_exception(type(problem), problem, problem.__traceback__)))


def leave(text: str, lines: str, code: int = 1) -> None:
    """Leave a text, the lines of a traceback and an exit code, unless the program has left something itself.

    What a torchrun has left that the program has started is not its own, but may be why that command failed.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or (os.path.exists(path) and os.path.getsize(path) and error_lines.read_own_error(path)):
        return
    if text.startswith("CalledProcessError: ") and (
        inner := error_lines.message_in(error_lines.read_error_file(path))
    ):
        text += f" (from {inner})"
    lines = "\n".join(line[:_LINE_CHARS] for line in lines.split("\n"))[-_CHARS:]
    extra = {"py_callstack": lines, "timestamp": str(int(time.time()))}
    message = {"message": text[:_CHARS], "errorCode": code, "extraInfo": extra, error_lines.OWN: True}
    try:
        os.close(os.dup(2))
    except OSError:  # no descriptor is left; a program that ends reads no more
        with contextlib.suppress(OSError):
            os.close(0)
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8", opener=_opened) as file:
        json.dump({"message": message}, file)


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)  # a FIFO would hold the worker up


def without_frames_of(name: str, trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that a file has at its beginning."""
    while trace is not None and trace.tb_frame.f_code.co_filename == name:
        trace = trace.tb_next
    return trace
