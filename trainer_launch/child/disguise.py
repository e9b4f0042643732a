"""The parts of a process that tell a fork from a fresh start, each put right."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import io
import itertools
import os
import resource
import signal
import sys
from multiprocessing import context, forkserver, process, resource_tracker, util
from typing import Any

from trainer_launch import run_folder
from trainer_launch.child import places
from trainer_launch.child.preload import State

_STACKS_SIGNAL = signal.SIGRTMAX - 1  # asks for the stacks of all threads; torch and we use SIGRTMAX otherwise
_HIGH_FD = 1000  # beyond what a program may expect to get for its own files


def close_descriptors(keep: set[int]) -> None:
    """Nothing is open but the three streams and what loaded libraries hold."""
    for word in os.listdir("/proc/self/fd"):
        if int(word) > 2 and int(word) not in keep:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(word))


def redirect(paths: list[str | None]) -> None:
    """Open the files or pipes that stdout and stderr go to."""
    for number, path in enumerate(paths, start=1):
        if path:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            os.dup2(fd, number)
            os.close(fd)


def restore_signals(state: State) -> None:
    """Handlers as the server found them when it was started; all signals are still blocked."""
    if not _wants_faulthandler():
        faulthandler.disable()  # torch enables it in what it starts
    for number, handler in state.handlers.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _wants_faulthandler() -> bool:
    return bool(os.environ.get("PYTHONFAULTHANDLER")) or "faulthandler" in sys._xoptions or sys.flags.dev_mode


def set_environment(variables: dict[str, str]) -> None:
    """The same object, which others have imported, in the order that a fresh process would see."""
    os.environ.clear()
    os.environ.update(variables)


def reset_multiprocessing(state: State) -> None:
    """To its own eyes this is a main process that has started nothing yet."""
    names: Any = process
    names._current_process = state.main_process()
    names._parent_process = None
    names._process_counter = itertools.count(1)
    names._children = set()
    for module, name in ((forkserver, "_forkserver"), (resource_tracker, "_resource_tracker")):
        getattr(module, name).__init__()  # in place: others hold its methods
    setattr(getattr(context, "_default_context"), "_actual_context", None)  # noqa: B009, B010
    getattr(util, "_finalizer_registry").clear()  # noqa: B009


def reset_random() -> None:
    """Python seeds its own generator anew at a fork; numpy's old global one and torch's would be everybody's."""
    sys.modules["torch"].default_generator.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


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


def note(folder: str, *, rank: int, local_rank: int, with_stacks: bool) -> None:
    """Tell PID 1 who trains here; a signal makes Python write where every thread stands."""
    path = f"{folder}/{run_folder.STACKS}{local_rank}" if with_stacks else None
    if path is not None:
        _arm(path)
    places.note_place(folder, pid=os.getpid(), rank=rank, local_rank=local_rank, stacks=path)


def _arm(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    high = min(_HIGH_FD, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1)
    out_of_the_way = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, high)
    os.close(fd)
    faulthandler.register(_STACKS_SIGNAL, file=out_of_the_way, all_threads=True, chain=False)
