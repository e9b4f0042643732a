"""Writes what a worker can notice of itself, as JSON: under torchrun and under us it has to be the same.

What its handlers of atexit say is written line by line beside that, as the process ends.
"""

from __future__ import annotations

import os
import sys


def descriptors() -> dict[int, str]:
    links = {word: f"/proc/self/fd/{word}" for word in os.listdir("/proc/self/fd")}
    return {int(word): os.readlink(link) for word, link in links.items() if os.path.lexists(link)}


def status() -> dict[str, str]:
    with open("/proc/self/status", encoding="utf-8") as file:
        lines = [line.split(":", 1) for line in file if ":" in line]
    return {name: text.strip() for name, text in lines}


# Before anything else is imported.
ENVIRONMENT = dict(os.environ)
FIRST = {
    "descriptors": descriptors(),
    "threads": status()["Threads"],
    "hidden": [name for name in ("torch", "numpy", "torch.distributed") if name in sys.modules],
    "environment": ENVIRONMENT,
}

import atexit  # noqa: E402
import faulthandler  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import locale  # noqa: E402
import logging  # noqa: E402
import multiprocessing  # noqa: E402
import pickle  # noqa: E402
import random  # noqa: E402
import resource  # noqa: E402
import select  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
import weakref  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

RANK = os.environ.get("RANK", "")


class Point:
    """What the main module defines is found in processes that it starts."""

    def __init__(self, x: int) -> None:
        self.x = x


def double(point: Point) -> Point:
    return Point(2 * point.x)


def of_main() -> dict[str, Any]:
    main = sys.modules["__main__"]
    names = ("__name__", "__file__", "__package__", "__cached__", "__doc__", "__annotations__")
    return {name: repr(getattr(main, name, "missing")) for name in names} | {
        "is this": main.__dict__ is globals(),
        "__spec__": repr(main.__spec__ and (main.__spec__.name, main.__spec__.origin)),
        "__loader__": [type(main.__loader__).__name__, getattr(main.__loader__, "path", None)],
        "__builtins__": repr(globals()["__builtins__"])[:20],
        "names": sorted(name for name in main.__dict__ if name.startswith("__")),
        "pickled": pickle.loads(pickle.dumps(Point(3))).x,
        "old pickle": repr(pickle.loads(b"ccollections\nOrderedDict\n.")),
    }


def of_interpreter() -> dict[str, Any]:
    names = ("argv", "orig_argv", "path", "executable", "prefix", "exec_prefix", "warnoptions", "_xoptions")
    return {name: getattr(sys, name) for name in names} | {
        "flags": repr(sys.flags),
        "for children": getattr(subprocess, "_args_from_interpreter_flags")(),  # noqa: B009
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
        "locale": locale.setlocale(locale.LC_ALL),
        "faulthandler": faulthandler.is_enabled(),
        "threads": [(t.name, t.daemon, type(t).__name__) for t in threading.enumerate()],
        "main thread": [threading.current_thread() is threading.main_thread(), threading.get_native_id()]
        == [True, os.getpid()],
        "garbage": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)],
        "hash": hash("a") if os.environ.get("PYTHONHASHSEED") else None,
    }


def of_streams() -> dict[str, Any]:
    told = {}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        told[name] = [
            stream is getattr(sys, f"__{name}__"),
            type(stream.buffer).__name__,
            *(repr(getattr(stream, a)) for a in ("name", "mode", "encoding", "errors", "newlines")),
            *(repr(getattr(stream, a)) for a in ("line_buffering", "write_through")),
            stream.fileno(),
            os.isatty(stream.fileno()),
            os.get_blocking(stream.fileno()),
        ]
    ready = select.select([0], [], [], 0.5)[0]
    return told | {"input": repr(os.read(0, 100)) if ready else "nothing to read"}


def of_process() -> dict[str, Any]:
    """What the kernel knows of it."""
    umask = os.umask(0)
    os.umask(umask)
    mine = status()
    return {
        "leads its session": os.getsid(0) == os.getpid(),
        "leads its group": os.getpgid(0) == os.getpid(),
        "has a terminal": Path("/proc/self/stat").read_text().rpartition(")")[2].split()[4] != "0",
        "name": [Path("/proc/self/comm").read_text(), os.readlink("/proc/self/exe")],
        "cmdline": Path("/proc/self/cmdline").read_text().split("\0"),
        "environ": sorted(
            word.partition("=")[0] for word in Path("/proc/self/environ").read_bytes().decode().split("\0")
        ),
        "nice": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
        "umask": umask,
        "limits": {
            name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT_" in name
        },
        "cwd": [str(Path.cwd()), os.readlink("/proc/self/root")],
        "users": [os.getresuid(), os.getresgid(), os.getgroups()],
        "signals": {name: mine[name] for name in ("SigBlk", "SigIgn", "SigPnd", "ShdPnd", "SigCgt")},
        "handlers": {int(n): repr(signal.getsignal(n)).partition(" at 0x")[0] for n in signal.valid_signals()},
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")},
    }


def of_multiprocessing() -> dict[str, Any]:
    from multiprocessing import forkserver, resource_tracker

    before = {
        "me": repr(multiprocessing.current_process()),
        "parent": repr(multiprocessing.parent_process()),
        "method": multiprocessing.get_start_method(allow_none=True),
        "next": multiprocessing.Process(target=print).name,
        "inherited": forkserver.get_inherited_fds(),
        "tracker": {n: getattr(resource_tracker._resource_tracker, n) for n in ("_fd", "_pid")},
    }
    pools = {}
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            pools[method] = [point.x for point in pool.map(double, [Point(1), Point(2)])]
            pool.close()
            pool.join()
    return {**before, "pools": pools, "loose descriptors": _inherited()}


def _inherited() -> str:
    """What a child sees that closes nothing."""
    code = "import os; print([fd for fd in range(3, 4096) if os.path.lexists(f'/proc/self/fd/{fd}')])"
    return subprocess.run([sys.executable, "-c", code], close_fds=False, capture_output=True, text=True).stdout


def _traceback() -> str:
    try:
        [double(None) for _ in range(1)]  # type: ignore[arg-type]
    except AttributeError:
        return traceback.format_exc()
    return ""


def of_torch() -> dict[str, Any]:
    import numpy
    import torch
    import torch.distributed as dist

    named = Path("/proc/self/comm").read_text()
    imported = [status()["Threads"], torch.get_num_threads(), torch.get_num_interop_threads()]
    product = (torch.ones(700, 700) @ torch.ones(700, 700)).sum().item()
    told = {
        "name": named,
        "is_torchelastic_launched": dist.is_torchelastic_launched(),
        "threads": [*imported, status()["Threads"], product],
        "loggers": sorted(name for name in logging.root.manager.loggerDict if name.startswith("torch")),
        "cuda": [torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()],
        "pickled": repr(pickle.loads(pickle.dumps([torch.nn.ReLU(), torch.arange(3), numpy.arange(3)]))),
        "finders": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
        "set": sorted(os.environ.keys() - ENVIRONMENT.keys()),
    }
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    told["group"] = [total.item() == dist.get_world_size(), int(status()["Threads"]) > 1]
    dist.destroy_process_group()
    return told


def randomness() -> list[float]:
    """What differs between workers."""
    import numpy
    import torch

    return [random.random(), float(numpy.random.rand()), torch.rand(1).item(), torch.initial_seed()]


def at_exit(text: str) -> None:
    with open(os.path.join(ENVIRONMENT["PARITY_FOLDER"], f"{RANK}.exits"), "a") as file:
        file.write(f"{text}\n")


def write_late(folder: str) -> None:
    time.sleep(0.2)
    Path(folder, "part").touch()  # the folder is removed after its writer has ended
    at_exit("a child wrote")


def say_at_exit() -> None:
    """Handlers from before and after the import of torch; the order is the reverse of theirs."""
    atexit.register(at_exit, "registered before torch")
    holder, kept = Point(1), tempfile.TemporaryDirectory()
    weakref.finalize(holder, at_exit, "finalised before torch")
    import torch  # noqa: F401

    atexit.register(at_exit, "registered after torch")
    weakref.finalize(kept, at_exit, "finalised after torch")
    multiprocessing.get_context("fork").Process(target=write_late, args=(kept.name,)).start()
    FIRST["kept"] = [holder, kept]


if __name__ == "__main__":
    said: dict[str, Any] = {
        "first": dict(FIRST),
        "main": of_main(),
        "interpreter": of_interpreter(),
        "streams": of_streams(),
        "process": of_process(),
        "traceback": _traceback(),
        "temporary folder": tempfile.gettempdir(),
    }
    say_at_exit()
    said["torch"] = of_torch()
    said["random"] = randomness()
    said["multiprocessing"] = of_multiprocessing()
    said["modules"] = sorted({name.partition(".")[0] for name in sys.modules})
    path = Path(os.environ["PARITY_FOLDER"], f"{RANK}.json")
    path.write_text(json.dumps(said), encoding="utf-8")
