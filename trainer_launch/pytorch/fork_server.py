"""Starts workers and stores for PID 1: by the fork server where that can be, else each as a new interpreter."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from trainer_launch.host import network
from trainer_launch.host.files import check_program
from trainer_launch.host.slow_files import within
from trainer_launch.model.codec import MessageError
from trainer_launch.model.errors import EXHAUSTED, LIMITS, LaunchError, NodeError, explained, tells_of_limit
from trainer_launch.pytorch import messages
from trainer_launch.pytorch.messages import ForkedWorker, ForkWorkers, OpenStore, Ready, RequestFailed, Started
from trainer_launch.supervisor import inherited
from trainer_launch.supervisor.failure import memory

if TYPE_CHECKING:
    from trainer_launch.model import Death, PortRange, Process, Workers
    from trainer_launch.pytorch.worker_group import WorkerGroup

_TRIES = 2  # a server that ends before it is ready is started again once
_RETRY_S, _RETRIES = 1.0, 60  # where this container is at a limit: others of its processes may be about to end
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
_NO_TORCH = ("importing torch failed", "importing torch.distributed failed")  # begin why a server has no torch
T = TypeVar("T", Ready, Started)
_log = logging.getLogger(__name__)


class ServerError(NodeError):
    """The fork server cannot do what it was asked for."""


class ForkServer:
    """A fork server, from its start until its connection is closed; the caller reaps `pid`."""

    def __init__(self, workers: Workers) -> None:
        """Start it; it imports torch and what these workers want while all else goes on.

        Raises:
            OSError: it cannot be started.
        """
        with contextlib.ExitStack() as opened:
            check_program(workers.python, workers.env)
            ours, theirs = (opened.enter_context(end) for end in socket.socketpair())
            self.popen = subprocess.Popen(
                _command(workers, theirs.fileno()),
                env={**_HUGE_PAGES, **workers.env},
                cwd=workers.cwd,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a terminal's Ctrl-C is for the launcher
            )
            self._connection = socket.socket(fileno=ours.detach())
        self.pid = self.popen.pid

    @property
    def fd(self) -> int:
        """Readable when there is an answer, and when the server has exited."""
        return self._connection.fileno()

    def answer(self) -> Ready | None:
        """Return what the server tells of itself when it has imported all; None until then. This never waits.

        Raises:
            ServerError: it has exited.
        """
        look = select.poll()  # select() knows no descriptor from 1024 on
        look.register(self._connection, select.POLLIN)
        if not look.poll(0):
            return None
        return self._receive(Ready, _ANSWER_S)

    def close(self) -> None:
        """End the server; what it has forked goes on. The caller reaps it."""
        end_child(self.pid)
        self._connection.close()

    def start(self, request: ForkWorkers | OpenStore, fds: Sequence[int] = ()) -> Started:
        """Start workers or a store, which are our children then.

        They wait for a byte of ours until we know them: none of them runs on without us.

        Raises:
            ServerError: nothing was started.
        """
        count = len(request.workers) if isinstance(request, ForkWorkers) else 1
        within_s = _ANSWER_S + _WORKER_S * count
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
            answer = self._receive(Started, within_s)
            os.write(go, b"g" * count)
        except OSError as problem:
            raise ServerError(f"the fork server does not take requests ({problem})") from None
        finally:
            os.close(go)
        return answer

    def _receive(self, kind: type[T], within_s: float) -> T:
        try:
            received = messages.receive(self._connection, within_s)
        except TimeoutError:
            raise ServerError(f"the fork server did not answer within {within_s:g} s") from None
        except (OSError, MessageError) as problem:
            raise ServerError(f"the fork server sent no answer ({problem})") from None
        if received is None:
            raise ServerError("the fork server exited")
        answer, _ = received
        if not isinstance(answer, kind):
            why = answer.reason if isinstance(answer, RequestFailed) else f"it answered {type(answer).__name__}"
            raise ServerError(why)
        return answer


def _command(workers: Workers, fd: int) -> tuple[str, ...]:
    """The server's command line; `fd` is its end of the connection."""
    cwd = folder = workers.cwd or os.getcwd()
    if workers.script is not None:
        script = os.path.join(cwd, workers.script)
        folder = os.path.dirname(within(script, script, os.path.realpath, script))
    wanted = (folder, *workers.preload) if workers.forks else ("",)  # a store is torch's alone
    return (workers.python, "-u", "-c", _CODE, str(fd), str(os.getpid()), *wanted)


def end_child(pid: int) -> None:
    """SIGKILL a child of ours, unless it has ended: a number that was collected may be somebody else's by now."""
    with contextlib.suppress(ChildProcessError, ProcessLookupError):  # it has been reaped
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            os.kill(pid, signal.SIGKILL)


class Starter:
    """The fork server, the store process, and the ways to start workers.

    What cannot be started, and never will be, is a LaunchError of whatever finds it out.
    """

    def __init__(self, group: WorkerGroup, server: ForkServer | None = None) -> None:
        """`server` is the first fork server, where it has been started already."""
        self._group, self._system = group, group.system
        self._workers = workers = group.workers
        self._forks = workers.forks  # whether workers are forked
        self._first = server  # until it is in use
        self._server: ForkServer | None = None
        self._has_imported = False  # everything
        self._tries = 0  # starts of servers since one was ready
        self._refusals = 0  # of starts in a row, by the limits of this container
        self.retry_at_s: float | None = None  # when to try another one
        self._store: int | None = None  # its pid
        self._is_store_tried_again = False

    @property
    def _is_needed(self) -> bool:
        """Whether workers or the store wait for the fork server."""
        return self._forks or self._needs_store

    @property
    def is_ready(self) -> bool:
        """Whether workers, and a store, can be started now."""
        return self._has_imported or not self._is_needed

    @property
    def _needs_store(self) -> bool:
        return self._group.hosts_store and not self._workers.serve_store

    def prepare(self) -> None:
        """Have a fork server where one is needed, which imports torch while all else goes on.

        Raises:
            ServerError: it cannot be started, in `_RETRIES` attempts where this container is at a limit.
        """
        if not self._is_needed or self._server is not None or self.retry_at_s is not None:
            return
        first, self._first = self._first, None
        try:
            self._server = first or ForkServer(replace(self._workers, forks=self._forks))
        except OSError as problem:
            text = f"the fork server could not be started ({explained(problem)})"
            self._refusals += 1
            if problem.errno not in EXHAUSTED or self._refusals > _RETRIES:
                raise ServerError(text) from None
            if self._refusals == 1:
                _log.warning("%s; it is tried again for %.0f s", text, _RETRIES * _RETRY_S)
            self.retry_at_s = self._system.now() + _RETRY_S
            return
        self._tries, self._refusals = self._tries + 1, 0
        self._system.keep(self._server.pid)
        self._system.listen(self._server.fd)

    def retry(self, _now_s: float) -> None:
        """It is time for the next attempt, which `prepare` makes where it is needed."""
        self.retry_at_s = None

    def answer(self) -> None:
        """Hear whether the server has imported everything, and can be forked."""
        if self._server is None or self._has_imported:
            return
        try:
            ready = self._server.answer()
        except ServerError as problem:
            self._lost(str(problem))
            return
        if ready is None:
            return
        self._system.listen(self._server.fd, wanted=False)  # whoever asks waits for the answer
        if ready.unfit is None:
            self._has_imported, self._tries = True, 0
        else:
            self._start_without(ready.unfit, has_torch=not ready.unfit.startswith(_NO_TORCH))

    def is_server(self, pid: int) -> bool:
        """Whether this process is the present fork server."""
        return self._server is not None and pid == self._server.pid

    def server_ended(self, status: int) -> None:
        """Start it again, for the next generation."""
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        if not self._has_imported:
            self._lost(f"the fork server ended during its imports ({how})")
            return
        self._end_server()
        _log.warning("the fork server ended (%s); it is started again", how)
        with contextlib.suppress(ServerError):  # nobody waits for it: the next generation tries it again
            self.prepare()

    def _lost(self, why: str) -> None:
        """The server has ended before it was ready."""
        evidence = self._system.look()
        why += f"; {memory(evidence)}: raise the container's memory limit" if evidence.oom_killed is True else ""
        self._end_server()
        if self._tries < _TRIES:
            _log.warning("%s; it is started again", why)
            self.prepare()
        else:
            self._start_without(why)

    def _start_without(self, reason: str, *, has_torch: bool = False) -> None:
        """Workers are not forked; a server that `has_torch` opens stores, else one that preloads nothing."""
        did_preload, self._tries = self._forks and bool(self._workers.preload), 0
        if self._forks:
            _log.info("workers start without the fork server: %s", reason)
            self._forks = False
        if has_torch and self._needs_store:
            self._has_imported = True
            return
        self._end_server()
        if not self._needs_store:
            return
        if did_preload and not reason.startswith(_NO_TORCH):
            self.prepare()
            return
        text, is_limit = f"the store cannot be opened: {reason}", tells_of_limit(reason)
        # An import fails again; a process that ended, perhaps for memory, may not.
        kind = LaunchError if reason.startswith(_NO_TORCH) and not is_limit else NodeError
        raise kind(f"{text}; {LIMITS}" if is_limit else text)

    def _end_server(self) -> None:
        server, self._server, self._has_imported = self._server, None, False
        if server is not None:
            self._system.listen(server.fd, wanted=False)
            server.close()
            self._system.forget(server.pid)

    def open_store(self, ports: PortRange | None) -> int | None:
        """Start the store process of a generation, unless rank 0 serves the store; its port.

        None: the fork server may have been killed just now, and a new one will be asked.

        Raises:
            NodeError: it cannot be started, or all ports are taken.
        """
        if not self._needs_store:
            return network.free_port(ports)
        try:
            if self._server is None:
                raise ServerError("the fork server has ended")
            started = self._server.start(OpenStore(ports))
        except ServerError as problem:
            text = f"the store cannot be opened: {problem}"
            if self._is_store_tried_again:
                raise NodeError(text) from None
            self._is_store_tried_again = True
            _log.warning("%s; a new fork server tries it again", text)
            self._end_server()
            self.prepare()
            return None
        (self._store,) = started.pids
        self._system.keep(self._store)
        return started.port

    def close_store(self) -> None:
        """End it: its generation is over."""
        store, self._store, self._is_store_tried_again = self._store, None, False
        if store is not None:
            end_child(store)

    def lose_store(self, pid: int) -> bool:
        """Forget the present store if it was this process, which has ended; whether it was."""
        was_store = pid == self._store
        if was_store:
            self._store = None
        return was_store

    def start(self, processes: Sequence[Process], store_port: int) -> list[Death]:
        """Begin a generation: survivors of the last one enter it, all others are started; who could not be.

        Raises:
            NodeError: no worker can be started.
        """
        group = self._group
        group.processes.begin()
        # Each in the place that it has on this node, by local rank.
        ranks, waiting = group.places, group.processes.kept.items()
        kept = {pid: (old, processes[ranks[old.name].local_rank]) for pid, old in waiting}
        group.start(processes, store_port, are_forked=self._forks)
        names = {old.name: new.name for old, new in kept.values()}
        group.recorders.close(names)
        group.survivors.close(names)
        self._system.rename({old.name: new for old, new in kept.values() if old.name != new.name})
        lost = [process for process in processes if process.name not in names.values()]
        deaths = self._start(lost) if lost else []
        for pid, (old, process) in kept.items():
            group.processes.take(pid, process)
            # A variable of the pod may have the new value already, while the survivor has another.
            envs = self._workers.env, old.env
            own = {name: value for name, value in process.env.items() if any(e.get(name) != value for e in envs)}
            group.survivors.enter(process.name, own)
        return deaths

    def _start(self, processes: Sequence[Process]) -> list[Death]:
        if self._forks and self._server is not None and self._has_imported:
            try:
                return self._fork(self._server, processes)
            except ServerError as problem:
                _log.warning("workers start without the fork server this time: %s", problem)
                self._end_server()
        return self._group.processes.spawn(processes, inherited.dying_with_us())

    def _fork(self, server: ForkServer, processes: Sequence[Process]) -> list[Death]:
        records, workers, fds = self._workers.records, list[ForkedWorker](), list[int]()
        try:
            for process in processes:
                place, streams = self._group.places[process.name], sorted(self._system.streams(process).items())
                fds += [fd for _, fd in streams]
                fds += [self._group.recorders.open(process.name)] if records else []
                fds.append(self._group.survivors.open(process.name))
                worker = ForkedWorker(
                    local_rank=place.local_rank,
                    environment=process.env,
                    streams=tuple(stream for stream, _ in streams),
                    stacks=place.stacks,
                    recorder=records,
                )
                workers.append(worker)
            argv, cwd = processes[0].argv, self._workers.cwd or os.getcwd()
            request = ForkWorkers(argv=argv, cwd=cwd, workers=tuple(workers), meet_at=self._workers.meet_at)
            pids = server.start(request, fds).pids
        finally:
            for fd in {*fds}:
                os.close(fd)
        for process, pid in zip(processes, pids, strict=True):
            self._system.adopt(pid)
            self._group.processes.add(process, pid)
        return []

    def close(self) -> None:
        """End what is left of ours."""
        self._group.recorders.close()
        self._group.survivors.close()
        self.close_store()
        self._end_server()
