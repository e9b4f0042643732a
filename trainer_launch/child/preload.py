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
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainer_launch import run_folder
from trainer_launch.child.places import SERVER_SETTINGS

# torch's own way of starting a worker, which would otherwise be imported by each of them.
_NEEDED = (
    "torch.multiprocessing.spawn",
    "torch.distributed.elastic.multiprocessing.api",
    "trainer_launch.child.worker",
    "trainer_launch.child.program",
)
_SETTLING_S = 0.2  # for the kernel to take the last thread off the list after its end
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
    before = _descriptors()
    state.reason = _import(settings) or _unfit()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # only now: who asks before that wants nothing of this to go on
    state.descriptors = _descriptors() - before
    _tell(settings["status"], state)
    gc.collect()
    gc.freeze()  # workers would otherwise copy what the collector marks
    return state


def _import(settings: dict[str, Any]) -> str | None:
    """Import everything; why that failed."""
    with _script_directory(settings["directory"]):
        for name in ("torch", *_NEEDED, *settings["preload"]):
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
    """What a fork of this process would break."""
    import torch

    for name in ("cuda", "xpu"):
        device = getattr(torch, name, None)
        if device is not None and device.is_initialized():
            return f"importing has initialised {name.upper()}, which does not survive a fork"
    names = _threads_after_fork()
    if names:
        return f"importing has left threads running, which a fork would not have ({', '.join(names)})"
    try:
        multiprocessing.get_context("fork").Lock()  # torch needs such ones for what it forks
    except OSError as problem:
        return f"no semaphore can be made in /dev/shm ({problem})"
    return None


def _threads_after_fork() -> list[str]:
    """Other threads of ours; numpy's linear algebra stops its own whenever a process forks, so fork once."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    end_s = time.monotonic() + _SETTLING_S
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < end_s:
        time.sleep(0.005)
    return [_name(int(word)) for word in os.listdir("/proc/self/task") if int(word) != os.getpid()]


def _name(thread: int) -> str:
    for known in threading.enumerate():
        if known.native_id == thread:
            return known.name
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm", encoding="utf-8") as file:
        return file.read().strip()
    return str(thread)


def _descriptors() -> set[int]:
    return {int(word) for word in os.listdir("/proc/self/fd")}


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


STATE = State(reason="this is no fork-server")
if SERVER_SETTINGS in os.environ:
    STATE = _serve(json.loads(os.environ.pop(SERVER_SETTINGS)))
