"""Huge pages for what the fork server imports: a fork then copies hundreds of page-table entries, not 40,000.

Forking a process with torch takes 7 ms otherwise, nearly all of it for these entries, and a node's workers are
forked one after the other. Where the kernel refuses (Linux before 6.1, sandboxes), everything stays as it is.
"""

from __future__ import annotations

import _thread
import ctypes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_COLLAPSE = 25  # MADV_COLLAPSE
_SIZE = 2 << 20  # of a huge page; where it is another, the kernel refuses
_EVERY_S = 0.1


def collapse_meanwhile() -> Callable[[], None]:
    """Begin, on another CPU than the imports; the result ends it."""
    stop, ended = _thread.allocate_lock(), _thread.allocate_lock()
    stop.acquire()
    ended.acquire()

    def work() -> None:
        try:
            while not stop.acquire(timeout=_EVERY_S):
                collapse()
        finally:
            ended.release()

    def end() -> None:
        stop.release()
        ended.acquire()
        collapse()

    _thread.start_new_thread(work, ())
    return end


def collapse() -> None:
    """Put this process's own memory into huge pages, wherever there is enough of it in one place."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps", "rb") as file:
        lines = [line.split(maxsplit=5) for line in file]
    for words in lines:
        if words[1] != b"rw-p" or words[5:] not in ([], [b"[heap]\n"]):
            continue
        low, high = (int(word, 16) for word in words[0].split(b"-"))
        first = -(-low // _SIZE) * _SIZE
        if high - first >= _SIZE:
            madvise(first, (high - first) // _SIZE * _SIZE, _COLLAPSE)
