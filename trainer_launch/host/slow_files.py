"""Access to files that may never return: a file server that is gone holds each of its callers for ever.

PID 1 has to hear signals meanwhile. So its loop touches the files that a user or TMPDIR names by `within` only.
Little is imported: training scripts load this with `report()`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

WAIT_S = 2.0  # for an answer; a healthy file server needs milliseconds
T = TypeVar("T")
_waiting: dict[threading.Thread, str] = {}  # calls that have not returned in time, and on which mount


def within(path: str, default: T, call: Callable[..., T], *args: object, wait_s: float = WAIT_S) -> T:
    """What `call(*args)` returns, or `default` if that takes too long.

    `path` is what the call touches. While a call still hangs, others on the same mount are not tried.

    Raises:
        Exception: what the call raises.
    """
    if _hangs(path):
        return default
    answer: list[Any] = []  # (value, None) or (None, problem)

    def work() -> None:
        try:
            answer.append((call(*args), None))
        except Exception as problem:  # noqa: BLE001 - the caller's
            answer.append((None, problem))

    thread = threading.Thread(target=work, name="files", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads are allowed
        return call(*args)
    thread.join(wait_s)
    if not answer:
        _waiting[thread] = mount_of(path)
        return default
    value, problem = answer[0]
    if problem is not None:
        raise problem
    return value  # type: ignore[no-any-return]


def _hangs(path: str) -> bool:
    if not _waiting:  # what holds nearly always
        return False
    for thread in [thread for thread in _waiting if not thread.is_alive()]:
        del _waiting[thread]
    return mount_of(path) in _waiting.values()


def mount_of(path: str) -> str:
    """Where the file system of an absolute path is mounted, by the path alone: no file server is asked."""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
            places = [line.split(" ")[1].replace("\\040", " ") for line in file]
    except OSError:
        places = []
    return max((place for place in places if f"{path}/".startswith(f"{place.rstrip('/')}/")), key=len, default="/")
