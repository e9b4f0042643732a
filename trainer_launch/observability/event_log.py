"""Write `--events` from a daemon thread: a full disk or a hanging reader never delays the job."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, Queue

from trainer_launch.observability import events
from trainer_launch.observability.runtime_events import News

LOOK_S = 1.0  # between two looks at what training processes and the worker group have left
_log = logging.getLogger(__name__)


class Journal:
    """Lines as things happened; `look` brings what PID 1 is not told by itself, the last look all of it."""

    def __init__(
        self, write: Callable[[bytes], None], node: int | None, look: Callable[[bool], Sequence[News]]
    ) -> None:
        self._write = write
        self._node = node
        self._look = look
        self._queue: Queue[News | None] = Queue()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def add(self, event: events.Event) -> None:
        """Take an event; never waits."""
        self._queue.put(News(time.time(), event))

    def close(self, wait_s: float, last: events.Event | None = None) -> None:
        """Write what is left, then `last`; a reader that hangs is left after `wait_s`."""
        closing = None if last is None else News(time.time(), last)
        self._queue.put(None)
        if closing is not None:
            self._queue.put(closing)
        self._queue.put(None)
        self._thread.join(wait_s)

    def _run(self) -> None:
        look_s = time.monotonic() + LOOK_S
        ends = 0  # marks seen: before the last event, and after it
        while ends < 2:
            news = self._next(look_s)
            if isinstance(news, News):
                self._put(news)
                continue
            ends += news is None
            for one in self._look(ends > 0) if ends < 2 else ():
                self._put(one)
            look_s = time.monotonic() + LOOK_S

    def _next(self, look_s: float) -> News | str | None:
        """The next event, None for a mark, a word when it is time to look."""
        try:
            return self._queue.get(timeout=max(0.0, look_s - time.monotonic()))
        except Empty:
            return "look"

    def _put(self, news: News) -> None:
        self._write(events.line(news.time_s, self._node, news.event))


class File:
    """A file that lines are added to; what cannot be written is dropped, and said once."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._is_said = False
        self._is_torn = False  # the last line was not written whole
        self._fd: int | None = None
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
        try:
            self._fd = os.open(path, flags, 0o644)
        except OSError as problem:
            self._say(problem)

    def write(self, line: bytes) -> None:
        """Add a line in one write: several may add to one file."""
        if self._fd is None:
            return
        data = b"\n" + line if self._is_torn else line
        try:
            self._is_torn = os.write(self._fd, data) < len(data)
        except OSError as problem:
            self._say(problem)
            if problem.errno == errno.EPIPE:
                self.close()

    def close(self) -> None:
        """Nothing more is written."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _say(self, problem: OSError) -> None:
        if not self._is_said:
            self._is_said = True
            _log.warning(
                "--events: cannot write %s: %s; the job continues without an event log",
                self._path,
                problem.strerror,
            )
