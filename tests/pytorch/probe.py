"""Says all that a program can see of itself, as one JSON object: run both ways, it has to say the same."""

from __future__ import annotations

import os
import sys
from types import FrameType


def stack():
    frame: FrameType | None = sys._getframe(1)
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    return found


def descriptors():
    """Before anything is imported; the listing's own is closed by the time that it is looked at."""
    links = {word: f"/proc/self/fd/{word}" for word in os.listdir("/proc/self/fd")}
    return {int(word): os.readlink(link) for word, link in links.items() if os.path.lexists(link)}


SEEN_FIRST = {"stack": stack(), "descriptors": descriptors()}

import faulthandler  # noqa: E402
import json  # noqa: E402
import locale  # noqa: E402
import multiprocessing  # noqa: E402
import random  # noqa: E402
import resource  # noqa: E402
import signal  # noqa: E402
import threading  # noqa: E402
from multiprocessing import forkserver, resource_tracker  # noqa: E402
from pathlib import Path  # noqa: E402


def of_main() -> dict:
    main = sys.modules["__main__"]
    names = ("__name__", "__file__", "__package__", "__cached__", "__doc__", "__annotations__")
    told = {name: repr(getattr(main, name, "missing")) for name in names}
    return told | {
        "is main": main.__dict__ is globals(),
        "__spec__": repr(main.__spec__),
        "__loader__": type(main.__loader__).__name__,
        "loader's path": getattr(main.__loader__, "path", None),
        "__builtins__": repr(main.__builtins__)[:20],
        "names": sorted(name for name in main.__dict__ if name.startswith("__")),
    }


def of_interpreter() -> dict:
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "executable": sys.executable,
        "flags": repr(sys.flags),
        "warnoptions": sys.warnoptions,
        "xoptions": sys._xoptions,
        "dont_write_bytecode": sys.dont_write_bytecode,
        "excepthook": sys.excepthook is sys.__excepthook__,
        "ours": [name for name in sys.modules if name.startswith("trainer_launch")],
        "recursion": sys.getrecursionlimit(),
        "trace": [sys.gettrace(), sys.getprofile()],
        "locale": locale.setlocale(locale.LC_ALL),
        "faulthandler": faulthandler.is_enabled(),
        "threads": [(t.name, t.daemon, type(t).__name__) for t in threading.enumerate()],
        "main thread": threading.current_thread() is threading.main_thread(),
        "native id": threading.main_thread().native_id == os.getpid(),
    }


def of_streams() -> dict:
    told = {}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        told[name] = [
            stream is getattr(sys, f"__{name}__"),
            type(stream.buffer).__name__,
            *(repr(getattr(stream, a)) for a in ("name", "mode", "encoding", "errors", "newlines")),
            *(repr(getattr(stream, a)) for a in ("line_buffering", "write_through")),
            stream.fileno(),
            stream.buffer.name,
            os.readlink(f"/proc/self/fd/{stream.fileno()}").partition(":")[0],
            os.get_blocking(stream.fileno()),
        ]
    return told


def of_multiprocessing() -> dict:
    return {
        "me": repr(multiprocessing.current_process()),
        "parent": repr(multiprocessing.parent_process()),
        "children": multiprocessing.active_children(),
        "method": multiprocessing.get_start_method(allow_none=True),
        "next": multiprocessing.Process(target=print).name,
        "server": {k: v for k, v in vars(getattr(forkserver, "_forkserver")).items() if k != "_lock"},  # noqa: B009
        "inherited": forkserver.get_inherited_fds(),
        "tracker": {n: getattr(resource_tracker._resource_tracker, n) for n in ("_fd", "_pid")},
    }


def of_process() -> dict:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "leads session": os.getsid(0) == os.getpid() == os.getpgid(0),
        "cmdline": Path("/proc/self/cmdline").read_bytes().decode(),
        "comm": Path("/proc/self/comm").read_text(),
        "environ": sorted(Path("/proc/self/environ").read_bytes().decode().split("\0")),
        "exe": os.readlink("/proc/self/exe"),
        "cwd": os.getcwd(),
        "umask": os.umask(0o22),
        "nice": os.nice(0),
        "signals": {name: status[name] for name in ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd", "Threads")},
        "handlers": {int(n): repr(signal.getsignal(n)).partition(" at 0x")[0] for n in signal.valid_signals()},
        "wakeup": signal.set_wakeup_fd(-1),
        "limits": [
            resource.getrlimit(n) for n in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE, resource.RLIMIT_STACK)
        ],
        "affinity": sorted(os.sched_getaffinity(0)),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
    }


def of_torch() -> dict:
    import numpy
    import torch

    return {
        "threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "cuda": torch.cuda.is_initialized(),
        "bad fork": torch.cuda._is_in_bad_fork(),
        "random differs": [random.random(), float(numpy.random.rand())],
    }


if __name__ == "__main__":
    told = {
        "first": SEEN_FIRST,
        "environment": dict(os.environ),
        "order": list(os.environ),
        "main": of_main(),
        "interpreter": of_interpreter(),
        "streams": of_streams(),
        "multiprocessing": of_multiprocessing(),
        "process": of_process(),
        "torch": of_torch(),
    }
    with open(f"{os.environ['PROBE_TO']}.{os.environ['RANK']}", "w") as file:
        json.dump(told, file)
