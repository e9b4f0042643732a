"""What every thread of a process is doing, as /proc tells it, for people. Reads only.

The kernel's side is all there is of a process that writes no stacks of its own: where it sleeps, in which call.
"""

from __future__ import annotations

import os
import re

from trainer_launch.model.units import counted

_THREADS = 64  # shown of each process
_LINES = 8  # of a kernel stack
_CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)", re.MULTILINE)


def describe(pid: int, proc: str = "/proc") -> str:
    """All threads of a process, one line each, with their kernel stacks where those may be read."""
    folder = f"{proc}/{pid}/task"
    try:
        threads = sorted(map(int, os.listdir(folder)))
    except OSError:
        return "  gone\n"
    shown = [_thread(f"{folder}/{tid}", tid) for tid in threads[:_THREADS]]
    more = f"  and {counted(len(threads) - _THREADS, 'more thread')}\n" if len(threads) > _THREADS else ""
    return "".join(shown) + more


def sleeps_in(pid: int, proc: str = "/proc") -> str:
    """The kernel's function that the main thread sleeps in, "" when it runs or that may not be read."""
    return _read(f"{proc}/{pid}/wchan").strip().strip("0")


def catches(pid: int, number: int, proc: str = "/proc") -> bool:
    """Whether a process has a handler for a signal; who has none may die of it."""
    caught = _CAUGHT.search(_read(f"{proc}/{pid}/status"))
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _thread(folder: str, tid: int) -> str:
    name = _read(f"{folder}/comm").strip()
    state = (_read(f"{folder}/stat").rpartition(")")[2].split() or ["?"])[0]
    call = _read(f"{folder}/syscall").split()
    words = [f"  thread {tid} ({name}) state {state}", _read(f"{folder}/wchan").strip().strip("0")]
    if call[:1] and call[0].lstrip("-").isdigit():
        words.append(f"system call {call[0]}")
    kernel = [f"      {line}\n" for line in _read(f"{folder}/stack").splitlines()[:_LINES]]
    return " ".join(word for word in words if word) + "\n" + "".join(kernel)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
