"""Starts workers and stores for PID 1: by the fork server where that can be, else each as a new interpreter."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from trainer_launch.model import Binding, exit_codes
from trainer_launch.model.codec import MessageError
from trainer_launch.model.errors import LaunchError, NodeError, NotRunnableError, UsageError
from trainer_launch.pytorch import messages
from trainer_launch.pytorch.messages import Forked, ForkWorkers, OpenStore, Ready, RequestFailed, StoreOpen, Unfit
from trainer_launch.supervisor import inherited

if TYPE_CHECKING:
    from trainer_launch.diagnosis.worker_samples import Place
    from trainer_launch.model import Death, PortRange, Process, Workers
    from trainer_launch.pytorch.worker_group import WorkerGroup

_TRIES = 2  # a server that ends before it is ready is started again once
_ANSWER_S = 10.0  # for a request, and for the rest of a message that has begun
_WORKER_S = 1.0  # more for each worker
# glibc asks for huge pages for what imports allocate: a fork then copies half of the page tables.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # where our package is
# Not -m: it would look for our modules, and for Python's own, in the user's working directory first.
_CODE = f"""
import sys
if '' in sys.path: sys.path.remove('')
place = '' if {_ROOT!r} in sys.path else {_ROOT!r}
sys.path += filter(None, [place])
from trainer_launch.pytorch.fork_server_process import main
main(place)
"""
_log = logging.getLogger(__name__)


class ServerError(Exception):
    """The fork server cannot do what it was asked for."""


class UnfitError(ServerError):
    """A worker of this program has found out that it must not be forked."""


class ServerSettings(Struct, frozen=True, kw_only=True):
    """What a fork server has to know when it starts."""

    python: str
    script: str | None = None
    module: str | None = None  # in place of a script; it is looked for in `cwd`
    preload: tuple[str, ...] = ()  # modules to import besides torch
    cwd: str
    forks_workers: bool = True  # False: it only opens stores

    @classmethod
    def of(cls, workers: Workers, *, forks: bool = True) -> ServerSettings:
        """What a plan's workers need; `forks` tells whether they are forked."""
        return cls(
            python=workers.python,
            script=workers.script,
            module=workers.module,
            preload=workers.preload if forks else (),
            cwd=workers.cwd or os.getcwd(),
            forks_workers=forks,
        )

    def command(self, fd: int) -> tuple[str, ...]:
        """The server's command line; `fd` is its end of the connection."""
        folder = self.cwd
        if not self.forks_workers:
            folder = ""  # a store is torch's alone
        elif self.script is not None:
            folder = os.path.dirname(os.path.realpath(os.path.join(self.cwd, self.script)))
        serves = "workers" if self.forks_workers else "stores"
        words = (str(fd), str(os.getpid()), serves, folder)
        return (self.python, "-u", "-c", _CODE, *words, *self.preload)


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
                raise _unexpected(answer)
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
        if isinstance(answer, Forked) and len(answer.pids) == len(request.workers):
            return answer.pids
        raise _unexpected(answer)

    def open_store(self, ports: PortRange | None) -> tuple[int, int]:
        """Start a process with a store, which is our child then; its pid, and the port.

        Raises:
            ServerError: no store was opened.
        """
        request = OpenStore() if ports is None else OpenStore(ports.low, ports.high)
        answer = self._ask(request, (), _ANSWER_S)
        if not isinstance(answer, StoreOpen):
            raise _unexpected(answer)
        return answer.pid, answer.port

    def close(self) -> None:
        """End the server; what it has forked goes on. The caller reaps it."""
        end_child(self.pid)
        self._connection.close()

    def _ask(self, request: ForkWorkers | OpenStore, fds: Sequence[int], within_s: float) -> messages.Message:
        """New processes wait for a byte of ours until we know them: none of them runs on without us."""
        try:
            wait, go = os.pipe()
        except OSError as problem:  # too few descriptors
            raise ServerError(f"the fork server cannot be asked ({problem})") from None
        try:
            try:
                self._connection.settimeout(within_s)
                messages.send(self._connection, request, [*fds, wait])
            finally:
                os.close(wait)
            answer = self._receive(within_s)
            if isinstance(answer, RequestFailed):
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


def _unexpected(answer: messages.Message) -> ServerError:
    return ServerError(f"the fork server sent an unexpected message ({type(answer).__name__})")


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


# -- what is started, and how ------------------------------------------------------------------


class Starter:
    """The fork server, the store process, and the ways to start workers.

    What cannot be started, and never will be, is a LaunchError of any method that tells whether it can be now.
    """

    def __init__(self, group: WorkerGroup, server: ForkServer | None = None) -> None:
        """`server` is the first fork server, where it has been started already."""
        self._group, self._system = group, group.system
        self._workers = workers = group.workers
        self._early = server
        self.forks = workers.forks  # whether workers are forked
        self._caller = workers.caller  # until it is in use
        self._server: ForkServer | None = None
        self._is_ready = False
        self._tries = 0
        self._is_awaited = False  # somebody waits for the server to be ready
        self._store: int | None = None  # its pid

    # -- the fork server ----------------------------------------------------------------------

    def begin(self) -> bool:
        """Start the fork server, which imports torch while all else goes on; False: `answer` will tell."""
        if self.forks or self._group.hosts_store:
            self._start_server()
        self._is_awaited = self._server is not None
        return not self._is_awaited

    def prepare(self) -> bool:
        """Make sure of it; False: `answer` or `server_ended` will tell."""
        if not (self.forks or self._group.hosts_store):
            return True
        why = self._server.changed() if self._server is not None and self._is_ready else None
        if why is not None:
            _log.info("the fork server is restarted: %s", why)
            self._end_server()
        self._is_awaited = not self._is_ready
        if self._server is None:
            self._need_no_caller()
            self._tries = 0
            self._start_server()
        return self._is_ready

    def renew(self) -> bool:
        """Start another server in place of one that has failed; False: `answer` or `server_ended` will tell."""
        self._end_server()
        return self.prepare()

    def answer(self) -> bool:
        """Whether the server has told since the last time that it is ready, and somebody waits for that."""
        if self._server is None or self._is_ready:
            return False
        try:
            said = self._server.answer()
        except ServerError as problem:
            return self._lost(str(problem))
        if isinstance(said, Unfit):
            return self._only_stores(said.reason)
        return said is not None and self._ready()

    def is_server(self, pid: int) -> bool:
        """Whether this process is the present fork server."""
        return self._server is not None and pid == self._server.pid

    def server_ended(self, status: int) -> bool:
        """Start it again for the next generation; whether all can be started without it, and somebody waits."""
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        if not self._is_ready:
            return self._lost(f"the fork server ended during its imports ({how})")
        self._end_server()
        if self._workers.caller is None:  # else the next generation will miss it
            _log.warning("the fork server ended (%s); it is started again", how)
            self._tries = 0
            self._start_server()
        return False

    def _lost(self, why: str) -> bool:
        self._end_server()
        self._need_no_caller()
        if self._tries < _TRIES:
            _log.warning("%s; it is started again", why)
            self._start_server()
            return False
        return self._unfit(why)

    def _need_no_caller(self) -> None:
        """The process of a caller has the state that its workers would inherit: nothing can take its place."""
        if self._workers.caller is not None:
            raise NodeError("the process that was forked from the caller of launch() to start workers has ended")

    def _only_stores(self, reason: str) -> bool:
        """A server from which no worker can be forked has torch for the store all the same."""
        has_torch = not reason.startswith("importing torch")
        if not (self.forks and self._group.hosts_store and has_torch) or self._workers.must_fork:
            return self._unfit(reason)
        _log.info("workers start without the fork server: %s", reason)
        self.forks = False
        return self._ready()

    def _unfit(self, reason: str) -> bool:
        """Workers start without it; a store still needs a process that has torch."""
        self._end_server()
        if not self.forks:
            # An import fails again; a process that ended, perhaps for memory, may not.
            kind = LaunchError if reason.startswith("importing") else NodeError
            raise kind(f"the store cannot be opened: {reason}")
        if self._workers.must_fork:
            raise UsageError(messages.cannot_fork(reason))
        _log.info("workers start without the fork server: %s", reason)
        self.forks = False
        if self._group.hosts_store:
            self._tries = 0
            self._start_server()
            return False
        return self._prepared()

    def _ready(self) -> bool:
        self._is_ready = True
        self._listen(wanted=False)
        return self._prepared()

    def _prepared(self) -> bool:
        was_awaited, self._is_awaited = self._is_awaited, False
        return was_awaited

    def _start_server(self) -> None:
        self._tries += 1
        workers = self._workers
        if self._caller is not None:
            self._take_server(CallerFork(*self._caller))
            self._caller = None
            return
        early, self._early = self._early, None
        settings = ServerSettings.of(workers, forks=self.forks)
        try:
            self._take_server(early or ForkServer(settings, workers.env))
        except ServerError as problem:
            if self._is_awaited:  # else the next generation tries it again
                raise NodeError(str(problem)) from None

    def _take_server(self, server: ForkServer) -> None:
        self._server = server
        self._system.adopt(server.pid, keep=True)
        self._listen(wanted=True)

    def _listen(self, *, wanted: bool) -> None:
        if self._server is not None:
            self._system.listen(self._server.fd, wanted=wanted)

    def _end_server(self) -> None:
        self._listen(wanted=False)
        server, self._server, self._is_ready = self._server, None, False
        if server is not None:
            server.close()
            self._system.forget(server.pid)

    # -- the store ----------------------------------------------------------------------------

    def open_store(self, ports: PortRange | None) -> int:
        """Start the store process of a generation; its port.

        Raises:
            ServerError: it cannot be started.
        """
        self.close_store()
        if self._server is None:
            raise ServerError("the fork server has ended")
        self._store, port = self._server.open_store(ports)
        self._system.adopt(self._store, keep=True)
        return port

    def close_store(self) -> None:
        """End it: its generation is over."""
        store, self._store = self._store, None
        if store is not None:
            end_child(store)

    def is_store(self, pid: int) -> bool:
        """Whether this process is the present store, which nobody has closed."""
        return pid == self._store

    def store_ended(self) -> None:
        """The store process has ended, and not by us."""
        self._store = None

    # -- workers ------------------------------------------------------------------------------

    def start(self, processes: Sequence[Process], places: Mapping[str, Place]) -> list[Death]:
        """Start all workers of a generation; the deaths of those that could not be started.

        Raises:
            NodeError: no worker can be started.
        """
        self._group.processes.begin()
        self._group.recorders.close()
        if not (self.forks and self._server is not None and self._is_ready):
            self._need_no_caller()
            return self._execute(processes)
        try:
            return self._fork(self._server, processes, places)
        except NotRunnableError as problem:
            code, text = problem.exit_code, str(problem)
        except UnfitError as problem:
            code, text = exit_codes.MISCONFIGURED, messages.cannot_fork(str(problem))
            if not self._workers.must_fork:
                _log.info("workers start without the fork server: %s", problem)
                self._end_server()
                self.forks = False
                return self._execute(processes)
        except ServerError as problem:
            code, text = exit_codes.FAILED, str(problem)
            if self._workers.caller is None:
                _log.warning("workers start without the fork server this time: %s", problem)
                self._end_server()
                return self._execute(processes)
        return [self._group.processes.not_started(process, code, text) for process in processes]

    def _fork(self, server: ForkServer, processes: Sequence[Process], places: Mapping[str, Place]) -> list[Death]:
        common, records = self._workers.env, self._workers.records
        bindings = self._workers.bindings or (Binding(()),) * len(processes)
        streams: list[dict[int, int]] = []
        theirs: list[int] = []
        try:
            for process in processes:
                streams.append(self._system.streams(process))  # noqa: PERF401  those that are open are closed below
            request = ForkWorkers(
                argv=processes[0].argv,
                environment=dict(common),
                cwd=self._workers.cwd or os.getcwd(),
                workers=tuple(
                    messages.ForkedWorker(
                        cpus=bindings[local_rank].cpus,
                        memory=bindings[local_rank].node,
                        local_rank=local_rank,
                        environment={k: v for k, v in process.env.items() if common.get(k) != v},
                        streams=tuple(sorted(streams[local_rank])),
                        stacks=places[process.name].stacks,
                        recorder=records,
                    )
                    for local_rank, process in enumerate(processes)
                ),
                must_fork=self._workers.must_fork,
            )
            theirs = self._group.recorders.open([process.name for process in processes] if records else [])
            fds = [[ours[stream] for stream in sorted(ours)] + theirs[n : n + 1] for n, ours in enumerate(streams)]
            pids = server.fork(request, [fd for each in fds for fd in each])
        finally:
            for fd in {*theirs, *(fd for ours in streams for fd in ours.values())}:
                os.close(fd)
        for process, pid in zip(processes, pids, strict=True):
            self._system.adopt(pid)
            self._group.processes.add(process, pid)
        return []

    def _execute(self, processes: Sequence[Process]) -> list[Death]:
        prepare = inherited.dying_with_us()
        deaths, pids = [], []
        for local_rank, process in enumerate(processes):
            try:
                pids.append(self._system.spawn(process, self._bound(local_rank, prepare)))
                self._group.processes.add(process, pids[-1])
            except NotRunnableError as error:  # noqa: PERF203  the others are started, and ended again
                deaths.append(self._group.processes.not_started(process, error.exit_code, str(error)))
        return deaths

    def _bound(self, local_rank: int, prepare: Callable[[], None] | None) -> Callable[[], None] | None:
        """What a new process does before it becomes the worker."""
        if not self._workers.bindings:
            return prepare
        bound = self._workers.bindings[local_rank]
        from trainer_launch.host import process_attributes  # only who binds workers needs ctypes

        bind = process_attributes.binder(local_rank, bound.cpus, bound.node)

        def prepare_and_bind() -> None:
            if prepare is not None:
                prepare()
            bind()

        return prepare_and_bind

    def close(self) -> None:
        """End what is left of ours."""
        self._group.recorders.close()
        self.close_store()
        self._end_server()
