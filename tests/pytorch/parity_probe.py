"""Writes what a worker finds around itself, as JSON: under torchrun and under us it has to be the same."""

from __future__ import annotations

import os

DESCRIPTORS = {word: f"/proc/self/fd/{word}" for word in os.listdir("/proc/self/fd")}  # before anything is opened
FOUND = {int(word): os.readlink(link) for word, link in DESCRIPTORS.items() if os.path.lexists(link)}

import ctypes  # noqa: E402
import json  # noqa: E402
import resource  # noqa: E402
import select  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

ENVIRONMENT = dict(os.environ)  # torch changes it
STATUS = dict(
    line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if ":" in line
)
_PR_GET_DUMPABLE, _PR_GET_KEEPCAPS, _PR_GET_TIMERSLACK, _PR_GET_CHILD_SUBREAPER = 3, 7, 30, 37


def process() -> dict[str, object]:
    """What the kernel knows of it."""
    umask = os.umask(0)
    os.umask(umask)
    libc = ctypes.CDLL(None)
    return {
        "leads its session": os.getsid(0) == os.getpid(),
        "leads its group": os.getpgid(0) == os.getpid(),
        "has a terminal": Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[4] != "0",
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "scheduler": os.sched_getscheduler(0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "umask": umask,
        "limits": {
            name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT_" in name
        },
        "cwd": str(Path.cwd()),
        "root": os.readlink("/proc/self/root"),
        "users": [os.getresuid(), os.getresgid(), os.getgroups()],
        "signals": {name: STATUS[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt")},
        "privileges": {name: STATUS[name].strip() for name in ("CapEff", "CapInh", "NoNewPrivs", "Seccomp")},
        "threads": STATUS["Threads"].strip(),
        "dumpable": libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0),
        "keeps capabilities": libc.prctl(_PR_GET_KEEPCAPS, 0, 0, 0, 0),
        "timer slack": Path("/proc/self/timerslack_ns").read_text(encoding="utf-8").strip(),
        "oom": Path("/proc/self/oom_score_adj").read_text(encoding="utf-8").strip(),
        "personality": Path("/proc/self/personality").read_text(encoding="utf-8").strip(),
        "cgroup": Path("/proc/self/cgroup").read_text(encoding="utf-8"),
        "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")},
        "adopts orphans": _flag(libc, _PR_GET_CHILD_SUBREAPER),
    }


def interpreter() -> dict[str, object]:
    """What Python knows."""
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "executable": sys.executable,
        "flags": repr(sys.flags),
        "path": sys.path,
        "buffered": [stream.write_through for stream in (sys.stdout, sys.stderr)],  # type: ignore[union-attr]
        "encodings": [stream.encoding for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "terminals": [os.isatty(fd) for fd in (0, 1, 2)],
    }


def torchs() -> dict[str, object]:
    """What torch says of its launcher."""
    import torch.distributed as dist

    return {"is_torchelastic_launched": dist.is_torchelastic_launched()}


def _flag(libc: ctypes.CDLL, option: int) -> int:
    value = ctypes.c_int(-1)
    libc.prctl(option, ctypes.byref(value), 0, 0, 0)
    return value.value


def _input() -> str:
    ready = select.select([0], [], [], 0.5)[0]
    return repr(os.read(0, 100)) if ready else "nothing to read"


if __name__ == "__main__":
    said = {
        "environment": ENVIRONMENT,
        "descriptors": FOUND,
        "input": _input(),
        "process": process(),
        "interpreter": interpreter(),
        "torch": torchs(),
    }
    path = Path(ENVIRONMENT["PARITY_FOLDER"], f"{ENVIRONMENT['RANK']}.json")
    path.write_text(json.dumps(said), encoding="utf-8")
