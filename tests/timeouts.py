"""A test that hangs fails, and the next one goes on; hooks for pytest-timeout, whose own ways do not do here.

Its `thread` ends the whole run. Its `signal` takes SIGALRM, which our supervisor, in tests that run it in this very
process, takes for itself. So a thread raises an exception in the main one, and any signal at all makes that look.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import signal
import sys
import threading
from typing import Any

import pytest_timeout  # type: ignore[import-untyped]
from _pytest.outcomes import Failed

_WAKE = signal.SIGRTMIN + 7
_TRIES = 3  # the first may end the test and leave a fixture that hangs
_BETWEEN_S = 30.0
_LAST_STACKS = "timeouts: this test was told to end, and has not; its process ends\n"


class Hung(Failed):
    """A test has taken too long."""

    def __init__(self) -> None:
        super().__init__("the test hung: it took longer than its timeout; all stacks are in its standard error")


def pytest_timeout_set_timer(item: Any, settings: Any) -> bool | None:
    """Watch over a test; the hook of pytest-timeout."""
    if threading.current_thread() is not threading.main_thread():
        return None  # pytest-timeout's own way
    main, over = threading.get_ident(), threading.Event()
    signal.signal(_WAKE, lambda _number, _frame: None)

    def watch() -> None:
        if over.wait(settings.timeout):
            return
        faulthandler.dump_traceback(sys.stderr.fileno(), all_threads=True)
        for _ in range(_TRIES):
            _raise(main, Hung)
            signal.pthread_kill(main, _WAKE)
            if over.wait(_BETWEEN_S):
                return
        sys.__stderr__.write(_LAST_STACKS)  # type: ignore[union-attr]
        pytest_timeout.timeout_timer(item, settings)

    thread = threading.Thread(target=watch, name=f"timeout of {item.nodeid}", daemon=True)

    def cancel() -> None:
        for _ in range(2):  # the exception may come at this very moment
            with contextlib.suppress(Hung):
                over.set()
                thread.join()
                _raise(main, None)

    item.cancel_timeout = cancel
    thread.start()
    return True


def _raise(thread: int, exception: type[BaseException] | None) -> None:
    """In another thread, when it next looks; None takes back what it has not seen yet."""
    what = ctypes.py_object(exception) if exception else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)
