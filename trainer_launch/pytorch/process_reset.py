"""What a forked worker would share with the fork server: reset to what a new process has.

That is its signal handlers, its files, and private state of Python's library and torch. This is the one module that
uses private names; each has its reason. Names that a Python or torch does not have are left out by the functions
that use them.
"""

from __future__ import annotations

import importlib
import io
import itertools
import logging
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing import context, forkserver, process, resource_tracker, util
from typing import Any


def reset(main_process: type, modules: Mapping[str, Any]) -> None:
    """Make this forked process new to its own eyes.

    `main_process` is multiprocessing's class of a main process; `modules` are those that have been imported, of
    which `sys.modules` shows nothing now.
    """
    _reset_multiprocessing(main_process)
    _reset_threading()
    _reset_random(modules)
    _reset_caches()


def _reset_multiprocessing(main_process: type) -> None:
    """A fork keeps what the parent has started, its key, and the start method it has chosen."""
    private: Any = process
    private._current_process = main_process()  # with a key of its own: processes with one key trust each other
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
    modules["torch"].default_generator.seed()
    numpy_random = modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _reset_caches() -> None:
    importlib.invalidate_caches()  # modules that were written since
    tempfile.tempdir = None  # found by the server's TMPDIR
    started: Any = logging
    is_ns = isinstance(started._startTime, int)  # from Python 3.13 on
    started._startTime = (
        time.time_ns() if is_ns else time.time()
    )  # of records: milliseconds since the program began


# -- signals and files -------------------------------------------------------------------------


def restore_signals(handlers: Mapping[int, Any]) -> None:
    """Handlers as the server found them when it was started; all signals are still blocked."""
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def rebuild_streams() -> None:
    """As `python -u` makes them: the server's own may have looked at another file."""
    names: Any = sys
    raw: Any = open(0, "rb", closefd=False)  # noqa: SIM115  it stays open
    raw.raw.name = "<stdin>"
    like = names.__stdin__
    names.stdin = names.__stdin__ = io.TextIOWrapper(raw, like.encoding, like.errors, write_through=True)
    names.stdin.mode = "r"
    names.stdout = names.__stdout__ = _writer(1, "<stdout>", names.__stdout__)
    names.stderr = names.__stderr__ = _writer(2, "<stderr>", names.__stderr__)


def _writer(fd: int, name: str, like: Any) -> Any:
    raw: Any = open(fd, "wb", buffering=0, closefd=False)  # noqa: SIM115  it stays open
    raw.name = name
    made: Any = io.TextIOWrapper(raw, like.encoding, like.errors, newline="\n", write_through=True)
    made.mode = "w"
    return made
