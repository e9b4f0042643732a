"""Wait until host names resolve, in threads, because getaddrinfo may block for minutes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue

Resolve = Callable[[str], object]  # raises OSError while the name does not resolve

_THREADS = 16
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_FIRST_SAY_S = 5.0  # between the first and the second message, then doubled
_LONGEST_SAY_S = 60.0


def resolve(name: str) -> object:
    """Ask the system's resolver for any address of `name`."""
    return socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)


class Gate:
    """Resolves names until all have an address; `fd` is readable when `news` has something to tell."""

    def __init__(self, names: Iterable[str], resolver: Resolve = resolve) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._resolve = resolver
        self._pending = dict.fromkeys(self._names, "no answer yet")
        self._answers: SimpleQueue[tuple[str, str | None]] = SimpleQueue()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._say_at_s = 0.0
        self._say_every_s = _FIRST_SAY_S
        self.fd, self._post_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def start(self) -> None:
        """Begin; the threads are daemons, so one that is stuck in the resolver cannot keep us alive."""
        for i in range(min(_THREADS, len(self._names))):
            threading.Thread(target=self._run, args=(self._names[i::_THREADS],), daemon=True).start()

    def news(self, now_s: float) -> tuple[bool, str | None]:
        """Take in the answers: whether all resolve, and a sentence when it is time to say one."""
        self._drain()
        failed = False
        while True:
            try:
                name, error = self._answers.get_nowait()
            except Empty:
                break
            if error is None:
                self._pending.pop(name, None)
            else:
                self._pending[name] = error
                failed = True
        if not failed or not self._pending or now_s < self._say_at_s:
            return not self._pending, None
        self._say_at_s = now_s + self._say_every_s
        self._say_every_s = min(2 * self._say_every_s, _LONGEST_SAY_S)
        return False, self._sentence()

    def close(self) -> None:
        """Stop asking. Under the lock: a late answer must not be written into a descriptor used anew."""
        self._closed.set()
        with self._lock:
            os.close(self.fd)
            os.close(self._post_fd)

    def _sentence(self) -> str:
        shown = [f"{name} ({error})" for name, error in list(self._pending.items())[:5]]
        more = f" and {len(self._pending) - 5} more" if len(self._pending) > 5 else ""
        return f"not resolved yet: {', '.join(shown)}{more}"

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 65536)

    def _run(self, names: Iterable[str]) -> None:
        pending, pause_s = list(names), _FIRST_PAUSE_S
        while pending:
            pending = [name for name in pending if not self._ask(name)]
            if self._closed.wait(pause_s if pending else 0):
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _ask(self, name: str) -> bool:
        error: str | None = None
        try:
            self._resolve(name)
        except (OSError, UnicodeError) as problem:  # UnicodeError: a label that is empty or too long
            error = getattr(problem, "strerror", None) or str(problem)
        self._answers.put((name, error))
        with self._lock:
            if not self._closed.is_set():
                with contextlib.suppress(BlockingIOError):  # full: its reader is due to wake up anyway
                    os.write(self._post_fd, b".")
        return error is None
