"""A forked worker: what torch starts, which starts the program, looks after it, and ends as the program did.

torch's own way to run a function knows only exceptions: a program that leaves with os._exit(0) would keep its agent
waiting for ever. So the program is a process of its own, and this one says how it ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import resource
import signal
import sys
import time
from multiprocessing import forkserver
from typing import Any

from trainer_launch.child import places, preload, program, stack
from trainer_launch.host import tree
from trainer_launch.pytorch.kernel import die_with_parent
from trainer_launch.supervisor.inheritance import become_reaper

_ORPHANED = signal.SIGRTMIN + 1  # the kernel tells that the fork-server, and so most likely the agent, is gone
_LEFTOVERS_S = 1.0  # what a failed program has left behind has to end politely
_STUCK_S = 10.0  # after SIGKILL


class Program:
    """The function that torch calls in each forked worker, with the program's command line."""

    def __init__(self, *, is_module: bool, folder: str) -> None:
        self.__name__ = self.__qualname__ = "program"  # as torch's messages call it
        self.environments: dict[int, dict[str, str]] = {}  # what torch gives the workers, by local rank
        self.outputs: dict[int, list[str | None]] = {}  # paths for stdout and stderr that torch does not open
        self._is_module = is_module
        self._folder = folder
        self._agent = os.getpid()
        self._inherited: dict[str, str] = {}
        self._warn_options: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_inherited": dict(os.environ), "_warn_options": list(sys.warnoptions)}

    def __call__(self, local_rank: str, *argv: str) -> None:
        """Run the program to its end; return only if that was 0."""
        number, me, parent = int(local_rank), os.getpid(), os.getppid()
        who = self._identity(number, argv)
        ends: list[tuple[int, bool]] = []

        def begin() -> bool:
            pid = os.fork()
            if pid == 0:
                die_with_parent(signal.SIGKILL)
                if os.getppid() != me:
                    os._exit(1)
                program.become(who)
                return True
            self._note("start", pid)
            ends.append(_look_after(pid, parent, self._agent))
            return False

        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        _let_server_end()
        become_reaper()
        die_with_parent(_ORPHANED)
        script = None if self._is_module else argv[2]
        prepare = program.module_of if self._is_module else program.script_of
        stack.run_above(begin, functools.partial(prepare, who), program.finish, script)
        status, is_closed = ends[0]
        code = os.waitstatus_to_exitcode(status)
        self._note("end", code)
        if code != 0 or is_closed:
            self._note("cleared", _clear())
            _die_like(code)
        # torch keeps us until all workers are done, or ends us when another has failed.
        signal.signal(signal.SIGTERM, _on_term)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    def _identity(self, number: int, argv: tuple[str, ...]) -> program.Identity:
        environment = self.environments[number]
        return program.Identity(
            argv=argv,
            is_module=self._is_module,
            environment={**self._inherited, **environment},
            warn_options=self._warn_options,
            outputs=self.outputs.get(number, [None, None]),
            folder=self._folder,
            rank=int(environment["RANK"]),
            local_rank=number,
            state=preload.STATE,
        )

    def _note(self, word: str, value: int) -> None:
        """The agent looks at its journal when it gets the signal that a child of its own would have caused."""
        with contextlib.suppress(OSError):  # a full disk or a dead agent is no reason to leave the program alone
            places.add_to(places.journal_of(self._folder, self._agent), word, os.getpid(), value)
            os.kill(self._agent, signal.SIGCHLD)


def _let_server_end() -> None:
    """The fork-server ends with the last process that holds this descriptor: that shall be the agent alone."""
    fd = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if fd is not None:
        os.close(fd)


def _look_after(pid: int, parent: int, agent: int) -> tuple[int, bool]:
    """Forward signals until the program ends; its status, and whether the agent has asked this process to end.

    The agent signals the program itself. Only torch, when it closes its workers, signals this process, once.
    """
    is_closed = False
    while True:
        status = _collect(pid)
        if status is not None:
            return status, is_closed
        if os.getppid() != parent:
            _end_orphan(pid, agent)
            parent = os.getppid()
        received = signal.sigwaitinfo(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
        if received.si_signo not in (signal.SIGCHLD, _ORPHANED):
            is_closed |= received.si_pid == agent
            _send(pid, received.si_signo)


def _end_orphan(pid: int, agent: int) -> None:
    """The fork-server is gone: with the agent, or alone, and then the agent takes us for dead and starts others."""
    entry = tree.read(agent)
    if entry is not None and entry.state not in "ZX":
        _kill_all()
        os._exit(1)
    _send(pid, signal.SIGTERM)  # PID 1 sees to the rest


def _send(pid: int, number: int) -> None:
    """What is sent to us is for the whole group, as torch sends it; the agent sends to the leader itself."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:  # it does not lead one yet
        os.kill(pid, number)


def _collect(pid: int) -> int | None:
    """Collect who has ended below us; the program's status, if it is one of them."""
    found = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if ended == 0:
            return found
        if ended == pid:
            found = status


def _clear() -> int:
    """The next attempt starts with nothing of this one: end politely, then by force, what the program left.

    How many that were.
    """
    return max(_end_all(signal.SIGTERM, _LEFTOVERS_S), _kill_all())


def _kill_all() -> int:
    return _end_all(signal.SIGKILL, _STUCK_S)


def _end_all(number: int, wait_s: float) -> int:
    told: set[tuple[int, int]] = set()
    end_s = time.monotonic() + wait_s
    while True:
        _collect(0)
        below = tree.descendants(os.getpid())
        for entry in below:
            if entry.key not in told:
                told.add(entry.key)
                _signal(entry, number)
        if not below or time.monotonic() > end_s:
            return len(told)
        time.sleep(0.005)


def _signal(entry: tree.Entry, number: int) -> None:
    try:
        os.kill(entry.pid, number)
        if entry.state == "T":
            os.kill(entry.pid, signal.SIGCONT)
    except (ProcessLookupError, PermissionError):
        return


def _on_term(_number: int, _frame: object) -> None:
    _clear()
    _die_like(-signal.SIGTERM)


def _die_like(code: int) -> None:
    """End as the program did; a signal's core, if any, is the program's own."""
    if code >= 0:
        os._exit(code)
    faulthandler.disable()  # torch has enabled it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    time.sleep(1)
    os._exit(128 - code)
