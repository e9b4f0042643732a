"""A few threads for what may block: names, programs on other hosts. What they find is taken in by one main loop."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeAlias

Done: TypeAlias = Callable[[], None]  # called in the main loop
Work: TypeAlias = Callable[[], Done]

_STACK_BYTES = 256 * 1024


class Crew:
    """Daemon threads, so that one that hangs keeps nobody alive; `fd` is readable when something was found."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._threads = 0
        self._idle = 0
        self._lock = threading.Lock()
        self._work: SimpleQueue[Work] = SimpleQueue()
        self._found: SimpleQueue[Done] = SimpleQueue()
        self.fd, self._post = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def submit(self, work: Work) -> None:
        """Let a thread do `work`; what it returns is called in the main loop."""
        with self._lock:
            self._idle -= 1
            if self._idle < 0 and self._threads < self._size:
                self._threads += 1
                threading.stack_size(_STACK_BYTES)
                threading.Thread(target=self._labour, daemon=True).start()
        self._work.put(work)

    def post(self, done: Done) -> None:
        """Have `done` called in the main loop; from any thread."""
        self._found.put(done)
        with contextlib.suppress(BlockingIOError):  # full: its reader is due to wake up anyway
            os.write(self._post, b".")

    def settle(self) -> None:
        """In the main loop: call what was found."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 65536)
        while True:
            try:
                done = self._found.get_nowait()
            except Empty:
                return
            done()

    def _labour(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            self.post(self._work.get()())
