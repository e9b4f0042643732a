"""The fork server as PID 1 sees it: start it, hear whether it can serve, ask it for workers and stores."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainer_launch.model.frozen import dataclass
from trainer_launch.model.json_lines import MessageError
from trainer_launch.pytorch import messages
from trainer_launch.pytorch.messages import Failed, Forked, ForkWorkers, OpenStore, Ready, StoreOpen, Unfit

if TYPE_CHECKING:
    from trainer_launch.model import PortRange

_ANSWER_S = 10.0  # for a request, and for the rest of a message that has begun
_WORKER_S = 1.0  # more for each worker
# glibc asks for huge pages for what imports allocate: a fork then copies half of the page tables.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # where our package is
# Not -m: it would look for our modules, and for Python's own, in the user's working directory first.
# -S: what `site` executes is for the workers. What the interpreter itself imports has to be known before we import.
_CODE = f"""
import sys
fresh = frozenset(sys.modules)
if '' in sys.path: sys.path.remove('')
path = list(sys.path)
sys.path.append({_ROOT!r})
from trainer_launch.pytorch.recorded_imports import Recorder, Site
recorder = Recorder(fresh)
site = Site(path, {_ROOT!r})
from trainer_launch.pytorch.fork_server_process import main
main(recorder, site)
"""


class ServerError(Exception):
    """The fork server cannot do what it was asked for."""


class UnfitError(ServerError):
    """A worker of this program has found out that it must not be forked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What a fork server has to know when it starts."""

    python: str
    script: str | None = None
    module: str | None = None  # in place of a script; it is looked for in `cwd`
    preload: tuple[str, ...] = ()  # modules to import besides torch
    cwd: str
    forks_workers: bool = True  # False: it only opens stores

    def command(self, fd: int) -> tuple[str, ...]:
        """The server's command line; `fd` is its end of the connection."""
        folder = self.cwd
        if not self.forks_workers:
            folder = ""  # a store is torch's alone
        elif self.script is not None:
            folder = os.path.dirname(os.path.realpath(os.path.join(self.cwd, self.script)))
        serves = "workers" if self.forks_workers else "stores"
        words = (str(fd), str(os.getpid()), serves, folder, self.script or "", self.module or "")
        return (self.python, "-u", "-S", "-c", _CODE, *words, *self.preload)


class ForkServer:
    """One fork server, from its start until its connection is closed; the caller reaps `popen`."""

    def __init__(self, settings: ServerSettings, env: Mapping[str, str]) -> None:
        """Start it; it imports torch meanwhile.

        Raises:
            ServerError: it cannot be started.
        """
        try:
            self._connection, theirs = socket.socketpair()
        except OSError as problem:
            raise ServerError(f"the fork server could not be started ({problem})") from None
        self._told: Ready | Unfit | None = None
        with theirs:
            try:
                self.popen = subprocess.Popen(
                    settings.command(theirs.fileno()),
                    env={**_HUGE_PAGES, **env},
                    cwd=settings.cwd,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # a terminal's Ctrl-C is for the launcher
                )
            except OSError as problem:
                self._connection.close()
                raise ServerError(f"the fork server could not be started ({problem})") from None
        self.pid = self.popen.pid

    @property
    def fd(self) -> int:
        """Readable when there is an answer, and when the server has exited."""
        return self._connection.fileno()

    def answer(self) -> Ready | Unfit | None:
        """What the server has told of itself, None as long as it imports; this never waits.

        Raises:
            ServerError: it has exited.
        """
        look = select.poll()  # select() knows no descriptor from 1024 on
        look.register(self._connection, select.POLLIN)
        if look.poll(0):
            answer = self._receive(_ANSWER_S)
            if self._told is not None or not isinstance(answer, Ready | Unfit):
                raise ServerError(f"the fork server sent an unexpected message ({type(answer).__name__})")
            self._told = answer
        return self._told

    def changed(self) -> str | None:
        """Which file that the server has loaded has changed since; a new server would load it again."""
        for name, (mtime_ns, size) in (self._told.files if isinstance(self._told, Ready) else {}).items():
            try:
                status = os.stat(name)
            except OSError:
                return f"{name} is gone"
            if (status.st_mtime_ns, status.st_size) != (mtime_ns, size):
                return f"{name} has changed"
        return None

    def fork(self, request: ForkWorkers, fds: Sequence[int] = ()) -> tuple[int, ...]:
        """Start workers, which are our children then; their pids in the request's order.

        Raises:
            ServerError: no worker was started.
        """
        answer = self._ask(request, fds, _ANSWER_S + _WORKER_S * len(request.workers))
        if not isinstance(answer, Forked) or len(answer.pids) != len(request.workers):
            raise ServerError(f"the fork server sent an unexpected message ({type(answer).__name__})")
        return answer.pids

    def open_store(self, ports: PortRange | None) -> tuple[int, int]:
        """Start a process with a store, which is our child then; its pid, and the port.

        Raises:
            ServerError: no store was opened.
        """
        request = OpenStore() if ports is None else OpenStore(ports.low, ports.high)
        answer = self._ask(request, (), _ANSWER_S)
        if not isinstance(answer, StoreOpen):
            raise ServerError(f"the fork server sent an unexpected message ({type(answer).__name__})")
        return answer.pid, answer.port

    def close(self) -> None:
        """End the server; what it has forked goes on. The caller reaps it."""
        end_child(self.pid)
        self._connection.close()

    def _ask(self, request: ForkWorkers | OpenStore, fds: Sequence[int], within_s: float) -> messages.Message:
        """New processes wait for a byte of ours until we know them: none of them runs on without us."""
        wait, go = os.pipe()
        try:
            try:
                self._connection.settimeout(within_s)
                messages.send(self._connection, request, [*fds, wait])
            finally:
                os.close(wait)
            answer = self._receive(within_s)
            if isinstance(answer, Failed):
                raise ServerError(answer.reason)
            if isinstance(answer, Unfit):
                raise UnfitError(answer.reason)
            os.write(go, b"g" * (len(answer.pids) if isinstance(answer, Forked) else 1))
        except OSError as problem:
            raise ServerError(f"the fork server does not take requests ({problem})") from None
        finally:
            os.close(go)
        return answer

    def _receive(self, within_s: float) -> messages.Message:
        try:
            received = messages.receive(self._connection, within_s)
        except TimeoutError:
            raise ServerError(f"the fork server did not answer within {within_s:g} s") from None
        except (OSError, MessageError) as problem:
            raise ServerError(f"the fork server sent no answer ({problem})") from None
        if received is None:
            raise ServerError("the fork server exited")
        return received[0]


def end_child(pid: int) -> None:
    """SIGKILL a child of ours, unless it has ended: a number that was collected may be somebody else's by now."""
    with contextlib.suppress(ChildProcessError, ProcessLookupError):  # it has been reaped
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            os.kill(pid, signal.SIGKILL)


class CallerFork(ForkServer):
    """A fork of the process that called `launch`: it serves likewise, and is there only once."""

    def __init__(self, fd: int, pid: int) -> None:
        """Take over its connection; it is our child already."""
        self._connection = socket.socket(fileno=fd)
        self._connection.set_inheritable(False)
        self._told, self.pid = None, pid
