"""The parent's legacy in this process, put right: streams, signals, orphans, the user."""

from __future__ import annotations

import io
import logging
import os
import pwd
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from types import FrameType

from trainer_launch.model import exit_codes
from trainer_launch.model.signal_policy import STOP_SIGNALS

log = logging.getLogger(__name__)

Handler = Callable[[int, FrameType | None], object] | int | None

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37


def fill_standard_streams() -> None:
    """Put /dev/null where 0, 1 or 2 is closed, or a pipe of ours would become somebody's stdout."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:  # noqa: PERF203  it is closed
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def hear(numbers: Collection[int]) -> dict[int, Handler]:
    """Take these signals but those that stay ignored; return the handlers there were.

    Children inherit the mask and what is ignored, as torchrun's do; nothing blocks a request to stop.
    """
    old: dict[int, Handler] = {}
    for number in numbers:
        if not stays_ignored(number):
            old[number] = signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS | {signal.SIGCHLD})
    return old


def stays_ignored(number: int) -> bool:
    """Whether our parent wants a signal ignored, here and in all that we start, as nohup and a shell's `&` do.

    Without SIGTERM no controller could stop a pod, and without SIGCHLD nobody hears of a child's end.
    """
    return number not in (signal.SIGTERM, signal.SIGCHLD) and signal.getsignal(number) is signal.SIG_IGN


def adopt_orphans(yes: bool = True) -> bool:
    """Have orphans below us handed to us, as PID 1 has by nature, or no longer; return whether they were before."""
    if os.getpid() == 1:
        return True
    import ctypes  # 10 ms, and PID 1 needs it never

    prctl, before = ctypes.CDLL(None, use_errno=True).prctl, ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    if prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0) != 0:
        log.warning("cannot become a sub-reaper: %s; orphans may outlive us", os.strerror(ctypes.get_errno()))
    return bool(before.value)


def dying_with_us() -> Callable[[], None] | None:
    """The call by which a new process dies of SIGKILL to us, too; None: PID 1 takes all of its container along."""
    if os.getpid() == 1:
        return None
    import ctypes

    me, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def die_with_us() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != me:
            os._exit(1)

    return die_with_us


def with_user(env: Mapping[str, str], home: str) -> dict[str, str]:
    """Add USER, LOGNAME and HOME where programs would fail without, as for the uids that OpenShift makes up.

    Without them getpass finds no user, and torch no place for its caches. `home` is made where the present one can
    neither be written nor holds a user's files.
    """
    uid, added, own = os.geteuid(), {}, "/"
    try:
        own = pwd.getpwuid(uid).pw_dir
    except KeyError:
        name = env.get("LOGNAME") or env.get("USER") or "trainer-launch"
        added = {variable: name for variable in ("LOGNAME", "USER") if not env.get(variable)}
    own = env.get("HOME") or own
    if not os.access(own, os.W_OK) and (own == "/" or not os.access(own, os.R_OK | os.X_OK)):
        os.makedirs(home, mode=0o700, exist_ok=True)
        added["HOME"] = home
    if added:
        words = " ".join(f"{variable}={value}" for variable, value in added.items())
        log.info("uid %d has no user or no home in this image: its programs get %s", uid, words)
    return {**env, **added}


def _note(number: int, frame: FrameType | None) -> None:
    """Do nothing: that a handler exists makes the interpreter write the number into the wake-up descriptor."""


_leaving: list[bool] = []  # not empty once the termination message is written


def end_on_stop(numbers: Iterable[int] = STOP_SIGNALS) -> None:
    """End at once when asked to stop: as PID 1 the kernel drops every signal that has no handler."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nobody can ask how a child has ended
    for number in numbers:
        if not stays_ignored(number):
            signal.signal(number, _end)


def open_streams() -> None:
    """Give Python the standard streams that were closed when we started; what cannot be encoded is escaped."""
    fill_standard_streams()
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def leave() -> None:
    """Keep to the exit code that the termination message tells, also when asked to stop while the process ends."""
    _leaving.append(True)


def is_leaving() -> bool:
    """Whether the termination message is written."""
    return bool(_leaving)


def _end(number: int, _frame: FrameType | None) -> None:
    if _leaving:
        return
    # Nothing was started, so there is nothing to stop and nobody to tell; os._exit, as an import may be half done.
    os._exit(exit_codes.of_signal(number) if number == signal.SIGINT else exit_codes.STOPPED)
