"""Runs a program as process 1 of a PID namespace, as in a pod: `first_process.py PROGRAM ARG...`.

Runs by itself, of the standard library alone. It passes signals on to the program and ends as the program ends.
When it is killed, the kernel kills all processes of the namespace. Exit code 125: the kernel allows no namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

NOT_ALLOWED = 125
_NEW_MOUNTS, _NEW_PIDS = 0x20000, 0x20000000
_PRIVATE, _PARENT_DEATH = 0x44000, 1  # MS_PRIVATE with MS_REC; PR_SET_PDEATHSIG
_libc = ctypes.CDLL(None, use_errno=True)


def main(argv: list[str]) -> None:
    """Start the program, wait for its end, and end in the same way."""
    heard = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an ignored one would never come
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    if _libc.unshare(_NEW_MOUNTS | _NEW_PIDS) or _libc.mount(b"none", b"/", None, _PRIVATE, None):
        sys.exit(NOT_ALLOWED)
    child = os.fork()
    if child == 0:
        _become(argv)
    pid = status = 0
    while not pid:
        received = signal.sigwaitinfo(heard).si_signo
        if received == signal.SIGCHLD:
            pid, status = os.waitpid(child, os.WNOHANG)
        else:
            os.kill(child, received)
    if os.WIFSIGNALED(status):
        ended_by = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no other handler
            signal.signal(ended_by, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {ended_by})
        os.kill(os.getpid(), ended_by)
    os._exit(os.waitstatus_to_exitcode(status))


def _become(argv: list[str]) -> None:
    """In the new namespace: never returns."""
    _libc.prctl(_PARENT_DEATH, signal.SIGKILL, 0, 0, 0)
    if _libc.mount(b"proc", b"/proc", b"proc", 0, None):
        os._exit(NOT_ALLOWED)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and programs inherit that
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvp(argv[0], argv)
    except OSError as problem:
        os.write(2, f"cannot run {argv[0]}: {problem.strerror}\n".encode())
        os._exit(127 if isinstance(problem, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(sys.argv[1:])
