"""What a forked worker would share with the fork server: reset to what a new process has.

That is its signal handlers, and private state of Python's library and torch. This is the one module that uses
private names; each has its reason.
"""

from __future__ import annotations

import atexit
import importlib
import itertools
import signal
import tempfile
import threading
import weakref
from collections.abc import Mapping
from multiprocessing import context, forkserver, process, resource_tracker, util
from typing import Any


def reset(modules: Mapping[str, Any]) -> None:
    """Make this forked process new to its own eyes; `modules` are torch, numpy and theirs."""
    _reset_multiprocessing()
    _reset_threading()
    _reset_random(modules)
    _reset_finalizers()
    _reset_caches()


def _reset_multiprocessing() -> None:
    """A fork keeps what the parent has started, its key, and the start method it has chosen."""
    private: Any = process
    private._current_process = type(
        private._current_process
    )()  # with a key of its own: processes with one key trust each other
    private._parent_process = None  # a program that python starts has none
    private._process_counter = itertools.count(1)  # the first process that it starts is Process-1
    private._children = set()
    for module, name in ((forkserver, "_forkserver"), (resource_tracker, "_resource_tracker")):
        getattr(module, name).__init__()  # theirs would be the server's; in place, as others hold their methods
    setattr(getattr(context, "_default_context"), "_actual_context", None)  # noqa: B009, B010  set by who asks for it
    getattr(util, "_finalizer_registry").clear()  # noqa: B009  what ends the server's own processes


def _reset_threading() -> None:
    """Before Python 3.13 a fork leaves the main thread with the parent's native id."""
    main: Any = threading.main_thread()
    main._set_native_id()


def _reset_random(modules: Mapping[str, Any]) -> None:
    """Python seeds its own generator anew in a fork; torch's and numpy's would be alike in all workers."""
    if "torch" in modules:
        modules["torch"].default_generator.seed()
    numpy_random = modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _reset_finalizers() -> None:
    """They run where the program makes its first one, not where torch's import has made some."""
    finalize: Any = weakref.finalize
    atexit.unregister(finalize._exitfunc)
    finalize._registered_with_atexit = False


def register_finalizers() -> None:
    """The program imports torch, which makes some."""
    finalize: Any = weakref.finalize
    if not finalize._registered_with_atexit:
        atexit.register(finalize._exitfunc)
        finalize._registered_with_atexit = True


def register_exit_handler() -> None:
    """The program imports what has multiprocessing join its children at the end, before earlier handlers run."""
    handler = getattr(util, "_exit_function")  # noqa: B009
    atexit.unregister(handler)
    atexit.register(handler)


def _reset_caches() -> None:
    importlib.invalidate_caches()  # modules that were written since
    tempfile.tempdir = None  # found by the server's TMPDIR


def restore_signals(handlers: Mapping[int, Any]) -> None:
    """Handlers as the server found them when it was started; all signals are still blocked."""
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)
