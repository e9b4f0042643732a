"""In multiprocessing's fork-server: import what the workers need, then prove that they can be forked from it.

Importing this module does it, because that is all that the server does for those who start it. `STATE` is what the
forked workers have to restore; the agent reads the same result from a file.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainer_launch import run_folder
from trainer_launch.child import fitness, stem
from trainer_launch.child.places import SERVER_SETTINGS

_OURS = ("trainer_launch.child.worker", "trainer_launch.child.program")
_OURS_ALONE = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class State:
    """What the server was before it served, and what came of the proof."""

    reason: str | None = None  # why nobody can be forked
    path: list[str] = field(default_factory=list)  # sys.path without a script's directory
    descriptors: set[int] = field(default_factory=set)  # those that loaded libraries hold open
    handlers: dict[int, Any] = field(default_factory=dict)
    mask: set[Any] = field(default_factory=set)
    main_process: Any = None  # multiprocessing's class of a process that it has not started
    pid: int = 0


def _serve(settings: dict[str, Any]) -> State:
    """Become ready, or say why not."""
    os.chdir(settings["cwd"])  # started elsewhere, so that no file there passes for a module of Python's own
    sys.path[:] = [entry for entry in sys.path if entry]
    state = State(
        path=list(sys.path),
        handlers={number: signal.getsignal(number) for number in signal.valid_signals()},
        mask=signal.pthread_sigmask(signal.SIG_BLOCK, []),
        main_process=type(multiprocessing.current_process()),
        pid=os.getpid(),
    )
    for number in _OURS_ALONE:
        signal.signal(number, signal.SIG_IGN)  # those are for the agent and the workers
    before = stem.descriptors() - set(settings["held"])
    state.reason = _import(settings) or _unfit()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # only now: who asks before that wants nothing of this to go on
    state.descriptors = stem.descriptors() - before
    _tell(settings["status"], state)
    gc.collect()
    gc.freeze()  # workers would otherwise copy what the collector marks
    return state


def _import(settings: dict[str, Any]) -> str | None:
    """Import everything; why that failed."""
    with _script_directory(settings["directory"]):
        for name in (*stem.NEEDED, *_OURS, *settings["preload"]):
            try:
                importlib.import_module(name)
            except BaseException as problem:  # noqa: BLE001, PERF203  a module may do anything when imported
                return f"importing {name} failed ({type(problem).__name__}: {problem})"
    return None


@contextlib.contextmanager
def _script_directory(directory: str) -> Iterator[None]:
    """Modules are found as the script itself would find them."""
    if sys.flags.safe_path if hasattr(sys.flags, "safe_path") else False:
        yield
        return
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(directory)


def _unfit() -> str | None:
    """What a fork of this process would break, or lack."""
    reason = fitness.unfit()
    if reason is None:
        try:
            multiprocessing.get_context("fork").Lock()  # torch needs such ones for what it forks
        except OSError as problem:
            reason = f"a semaphore cannot be created in /dev/shm ({problem})"
    return reason


def _tell(path: str, state: State) -> None:
    """Tell the agent, who alone can speak of it and see which files change."""
    files = {}
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if isinstance(name, str) and os.path.isabs(name):
            with contextlib.suppress(OSError):
                status = os.stat(name)
                files[name] = [status.st_mtime_ns, status.st_size]
    run_folder.replace(path, {"pid": state.pid, "reason": state.reason, "files": files})


STATE = State(reason="this is not a fork server")
if SERVER_SETTINGS in os.environ:
    STATE = _serve(json.loads(os.environ.pop(SERVER_SETTINGS)))
