"""Calls that Python lacks: death signals, mapped files, and the command line that /proc shows."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.sbrk.restype = ctypes.c_void_p
_PR_SET_PDEATHSIG = 1
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_MADV_DONTNEED = 4


class _MemoryMap(ctypes.Structure):
    """The kernel's struct prctl_mm_map."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk")),
        *((name, ctypes.c_uint64) for name in ("brk", "start_stack", "arg_start", "arg_end", "env_start")),
        *((name, ctypes.c_uint64) for name in ("env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def die_with_parent(number: int) -> None:
    """Get this signal when our parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def allow_many_files() -> None:
    """Have as many descriptors as this process may have."""
    import resource  # which no worker shall find loaded

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def ask_no_name_server() -> None:
    """Look for names and addresses in /etc/hosts alone; where libc cannot be told so, as before."""
    with contextlib.suppress(AttributeError):
        _LIBC.__nss_configure_lookup(b"hosts", b"files")


def drop_mapped_files() -> None:
    """Let go of the pages of loaded libraries that imports have touched; what is used again is mapped again.

    Libraries of torch are 70 MB of this process's memory otherwise. Only mappings that nobody has written to.
    """
    _LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    low = high = 0
    with open("/proc/self/smaps", "rb") as file:
        for line in file:
            words = line.split(maxsplit=5)
            if not words[0].endswith(b":"):
                is_files = words[1] in (b"r-xp", b"r--p") and words[4] != b"0"
                low, high = (int(word, 16) for word in words[0].split(b"-")) if is_files else (0, 0)
            elif words[0] == b"Anonymous:" and words[1] == b"0" and high:
                _LIBC.madvise(low, high - low, _MADV_DONTNEED)


def show_as(argv: list[bytes], environment: list[bytes]) -> mmap.mmap | None:
    """Let /proc/self/cmdline and environ show these; None where the kernel does not let us.

    The kernel reads both from our memory; the result has to be kept as long as it shall.
    """
    arguments, variables = _block(argv), _block(environment)
    size = max(1, len(arguments) + len(variables))
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(arguments + variables)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        fields = ["", "", "", *file.read().rpartition(")")[2].split()]  # so that they have proc(5)'s numbers
    wanted = _MemoryMap(
        *(int(fields[number]) for number in (26, 27, 45, 46, 47)),
        _LIBC.sbrk(ctypes.c_long(0)),
        int(fields[28]),
        *(start, start + len(arguments), start + len(arguments), start + len(arguments) + len(variables)),
        *(0, 0, 0xFFFFFFFF),
    )
    length = ctypes.c_ulong(ctypes.sizeof(wanted))
    done = _LIBC.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(wanted), length, 0)
    return memory if done == 0 else None


def _block(words: list[bytes]) -> bytes:
    return b"".join(word + b"\0" for word in words)
