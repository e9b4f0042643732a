"""The launcher's own words: one set-up, one format, on stderr."""

from __future__ import annotations

import contextlib
import logging
import os
import select
from collections.abc import Callable

from trainer_launch.host.slow_files import file_behind, within

NAME = "trainer_launch"
PATIENCE_S = 1.0  # with a reader of our messages that hangs; then they are dropped
_STDERR = 2
_LINE_BYTES = 4096  # PIPE_BUF: never torn, and never blocks where there is room


def set_up(level: str, node: str | None = None) -> None:
    """Send our messages to stderr, each line marked as the launcher's; `node` tells whose in a rehearsal."""
    handler = _LineHandler()
    mark = "trainer-launch" if node is None else f"trainer-launch {node}"
    handler.setFormatter(logging.Formatter(f"[{mark}] %(message)s"))
    logger = logging.getLogger(NAME)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def send_through(write: Callable[[bytes], None]) -> None:
    """Let our lines take the way that the workers' lines take, so that neither lands inside the other."""
    for handler in logging.getLogger(NAME).handlers:
        if isinstance(handler, _LineHandler):
            handler.write = write


def warn(sentence: str) -> None:
    """Say one sentence that someone should act on."""
    logging.getLogger(NAME).warning("%s", sentence)


def say(sentence: str) -> None:
    """Say one sentence of the job's story."""
    logging.getLogger(NAME).info("%s", sentence)


class _LineHandler(logging.Handler):
    """Writes each message in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.write: Callable[[bytes], None] = to_stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message; nobody is left to tell when stderr is gone."""
        with contextlib.suppress(OSError):
            self.write(f"{self.format(record)}\n".encode(errors="replace"))


def to_stderr(line: bytes) -> None:
    """Write, but not to a reader that hangs: a stop must not wait for it. A pipe with room takes 4 KiB at once."""
    if path := file_behind(_STDERR):
        within(path, 0, os.write, _STDERR, line[:_LINE_BYTES], wait_s=PATIENCE_S)
        return
    _, writable, _ = select.select([], [_STDERR], [], PATIENCE_S)
    if writable:
        os.write(_STDERR, line[:_LINE_BYTES])
