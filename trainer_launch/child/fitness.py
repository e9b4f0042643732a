"""Whether this process can be forked: what a fork would break is not there. torch has been imported."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

_SETTLING_S = 0.2  # for the kernel to take the last thread off the list after its end


def unfit() -> str | None:
    """Why this process must not be forked."""
    torch = sys.modules["torch"]
    for name in ("cuda", "xpu"):
        device = getattr(torch, name, None)
        if device is not None and (device.is_initialized() or _is_in_bad_fork(device)):
            return f"an import initialised {name.upper()}, which does not survive a fork"
    names = _threads_after_fork()
    if names:
        return f"an import started threads, which a fork does not copy ({', '.join(names)})"
    return None


def _is_in_bad_fork(device: object) -> bool:
    """Whether the process that this one was forked from had initialised it."""
    ask = getattr(device, "_is_in_bad_fork", None)  # no public name tells it
    return bool(ask is not None and ask())


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
