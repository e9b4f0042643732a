"""Starts workers and stores for PID 1: by the fork server where that can be, else each as a new interpreter."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from trainer_launch.model import Exit, PortRange, Process, Workers, exit_codes
from trainer_launch.model.errors import NotRunnableError
from trainer_launch.model.units import counted
from trainer_launch.pytorch import early_fork_server, worker_processes
from trainer_launch.pytorch import group_events as ge
from trainer_launch.pytorch.fork_server import (
    CallerFork,
    ForkServer,
    ServerError,
    ServerSettings,
    UnfitError,
    end_child,
)
from trainer_launch.pytorch.messages import ForkedWorker, ForkWorkers, Ready, Unfit, cannot_fork
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor import inherited
from trainer_launch.supervisor.system import System

SERVER = "fork server "  # and its pid
STORE = "store "  # and its generation
_TRIES = 2  # a server that ends before it is ready is started again once
_log = logging.getLogger(__name__)


class Starter:
    """The fork server, the store process, and the ways to start workers."""

    def __init__(self, workers: Workers, system: System) -> None:
        self._workers = workers
        self._system = system
        self._forks = workers.forks
        self._caller = workers.caller  # until it is in use
        self._server: ForkServer | None = None
        self._is_ready = False
        self._tries = 0
        self._is_awaited = False  # somebody waits for Prepared
        self._broken: str | None = None  # why not even a server can be started
        self._store: tuple[str, int] | None = None  # name and pid

    @property
    def forks(self) -> bool:
        """Whether workers are forked."""
        return self._forks

    # -- the fork server ----------------------------------------------------------------------

    def begin(self, *, hosts_store: bool) -> None:
        """Start the fork server, so that it imports torch while everything else goes on."""
        if self._forks or hosts_store:
            self._start_server()

    def prepare(self, at_s: float, *, hosts_store: bool) -> ge.Prepared | ge.CannotStart | None:
        """Make sure of it; None: `answer` will tell."""
        if not (self._forks or hosts_store):
            return ge.Prepared(at_s)
        why = self._server.changed() if self._server is not None and self._is_ready else None
        if why is not None:
            _log.info("the fork server is restarted: %s", why)
            self._end_server()
        if self._server is None and self._workers.caller is not None:
            return _caller_lost(at_s)
        if self._server is None:
            self._tries = 0
            self._start_server()
        if self._broken is not None:
            return ge.CannotStart(at_s, self._broken, exit_codes.INFRASTRUCTURE)
        if self._is_ready:
            return ge.Prepared(at_s)
        self._is_awaited = True
        return None

    def renew(self, at_s: float, *, hosts_store: bool) -> ge.Prepared | ge.CannotStart | None:
        """Start another server in place of one that has failed; None: `answer` will tell."""
        self._end_server()
        return self.prepare(at_s, hosts_store=hosts_store)

    def answer(self, at_s: float, *, hosts_store: bool) -> ge.Prepared | ge.CannotStart | None:
        """What the server has told of itself since the last time."""
        if self._server is None or self._is_ready:
            return None
        try:
            said = self._server.answer()
        except ServerError as problem:
            return self._lost(str(problem), at_s, hosts_store=hosts_store)
        match said:
            case Ready():
                self._is_ready = True
                self._listen(wanted=False)
                return self._prepared(at_s)
            case Unfit(reason=reason):
                return self._only_stores(reason, at_s, hosts_store=hosts_store)
        return None

    def server_ended(self, end: Exit, at_s: float, *, hosts_store: bool) -> ge.Prepared | ge.CannotStart | None:
        """Start it again for the next generation; workers that run are not concerned."""
        how = f"signal {end.signal}" if end.signal is not None else f"exit code {end.code}"
        if self._server is None or end.process != f"{SERVER}{self._server.pid}":
            return None  # of one that was ended
        was_ready, self._is_ready = self._is_ready, False
        if not was_ready:
            return self._lost(f"the fork server ended during its imports ({how})", at_s, hosts_store=hosts_store)
        self._end_server()
        if self._workers.caller is not None:
            return None  # the next generation will miss it
        _log.warning("the fork server ended (%s); it is started again", how)
        self._tries = 0
        self._start_server()
        return None

    def _lost(self, why: str, at_s: float, *, hosts_store: bool) -> ge.Prepared | ge.CannotStart | None:
        self._end_server()
        if self._workers.caller is not None:
            return _caller_lost(at_s)
        if self._tries < _TRIES:
            _log.warning("%s; it is started again", why)
            self._start_server()
            return None
        return self._unfit(why, at_s, hosts_store=hosts_store)

    def _only_stores(self, reason: str, at_s: float, *, hosts_store: bool) -> ge.Prepared | ge.CannotStart | None:
        """A server from which no worker can be forked has torch for the store all the same."""
        has_torch = not reason.startswith("importing torch")
        if not (self._forks and hosts_store and has_torch) or self._workers.must_fork:
            return self._unfit(reason, at_s, hosts_store=hosts_store)
        _log.info("workers start without the fork server: %s", reason)
        self._forks, self._is_ready = False, True
        self._listen(wanted=False)
        return self._prepared(at_s)

    def _unfit(self, reason: str, at_s: float, *, hosts_store: bool) -> ge.Prepared | ge.CannotStart | None:
        """Workers start without it; a store still needs a process that has torch."""
        self._end_server()
        if not self._forks:
            return ge.CannotStart(at_s, f"the store cannot be opened: {reason}", exit_codes.FAILED)
        if self._workers.must_fork:
            return ge.CannotStart(at_s, cannot_fork(reason), exit_codes.MISCONFIGURED)
        _log.info("workers start without the fork server: %s", reason)
        self._forks = False
        if hosts_store:
            self._tries = 0
            self._start_server()
            return None
        return self._prepared(at_s)

    def _prepared(self, at_s: float) -> ge.Prepared | None:
        was_awaited, self._is_awaited = self._is_awaited, False
        return ge.Prepared(at_s) if was_awaited else None

    def _start_server(self) -> None:
        self._tries += 1
        workers = self._workers
        if self._caller is not None:
            self._take_server(CallerFork(*self._caller))
            self._caller = None
            return
        settings = ServerSettings(
            python=workers.python,
            script=workers.script,
            module=workers.module,
            preload=workers.preload if self._forks else (),
            cwd=workers.cwd or os.getcwd(),
            forks_workers=self._forks,
        )
        try:
            server = early_fork_server.take(settings, workers.env) or ForkServer(settings, workers.env)
        except ServerError as problem:
            self._broken = str(problem)
        else:
            self._take_server(server)

    def _take_server(self, server: ForkServer) -> None:
        self._server = server
        self._system.adopt(f"{SERVER}{server.pid}", server.pid, keep=True)
        self._listen(wanted=True)

    def _listen(self, *, wanted: bool) -> None:
        if self._server is not None:
            self._system.listen(self._server.fd, wanted=wanted)

    def _end_server(self) -> None:
        server, self._server, self._is_ready = self._server, None, False
        if server is not None:
            self._system.listen(server.fd, wanted=False)
            server.close()
            self._system.forget(server.pid)

    # -- the store ----------------------------------------------------------------------------

    def open_store(self, generation: int, ports: PortRange | None) -> int:
        """Start the store process of a generation; its port.

        Raises:
            ServerError: it cannot be started.
        """
        self.close_store()
        if self._server is None:
            raise ServerError("the fork server has ended")
        pid, port = self._server.open_store(ports)
        self._store = f"{STORE}{generation}", pid
        self._system.adopt(self._store[0], pid, keep=True)
        return port

    def close_store(self) -> None:
        """End it: its generation is over."""
        store, self._store = self._store, None
        if store is not None:
            end_child(store[1])

    def store_ended(self, name: str) -> bool:
        """Whether a store process that has ended is the present one, which nobody has closed."""
        is_present = self._store is not None and self._store[0] == name
        if is_present:
            self._store = None
        return is_present

    # -- workers ------------------------------------------------------------------------------

    def start(self, processes: Sequence[Process], now: Callable[[], float]) -> list[ev.SpawnFailed]:
        """Start all workers of a generation; those that could not be."""
        self._system.begin_start()
        if self._forks and self._server is not None and self._is_ready:
            try:
                return self._fork(self._server, processes)
            except NotRunnableError as error:
                return [ev.SpawnFailed(now(), process.name, error.exit_code, str(error)) for process in processes]
            except UnfitError as problem:
                if self._workers.must_fork:
                    text = cannot_fork(str(problem))
                    return [ev.SpawnFailed(now(), one.name, exit_codes.MISCONFIGURED, text) for one in processes]
                _log.info("workers start without the fork server: %s", problem)
                self._end_server()
                self._forks = False
            except ServerError as problem:
                if self._workers.caller is not None:
                    return [
                        ev.SpawnFailed(now(), process.name, exit_codes.FAILED, str(problem))
                        for process in processes
                    ]
                _log.warning("workers start without the fork server this time: %s", problem)
                self._end_server()
        return self._execute(processes, now)

    def _fork(self, server: ForkServer, processes: Sequence[Process]) -> list[ev.SpawnFailed]:
        common = self._workers.env
        streams: list[dict[int, int]] = []
        try:
            for process in processes:
                streams.append(self._system.streams(process))  # noqa: PERF401  those that are open are closed below
            request = ForkWorkers(
                argv=processes[0].argv,
                environment=dict(common),
                cwd=self._workers.cwd or os.getcwd(),
                workers=tuple(
                    ForkedWorker(
                        local_rank=local_rank,
                        environment={k: v for k, v in process.env.items() if common.get(k) != v},
                        streams=tuple(sorted(streams[local_rank])),
                        stacks=worker_processes.stacks_file(self._workers.run_dir, local_rank),
                    )
                    for local_rank, process in enumerate(processes)
                ),
                must_fork=self._workers.must_fork,
            )
            pids = server.fork(request, [ours[stream] for ours in streams for stream in sorted(ours)])
        finally:
            for fd in {fd for ours in streams for fd in ours.values()}:
                os.close(fd)
        for process, pid in zip(processes, pids, strict=True):
            self._system.adopt(process.name, pid)
        _say_started(pids)
        return []

    def _execute(self, processes: Sequence[Process], now: Callable[[], float]) -> list[ev.SpawnFailed]:
        prepare = inherited.dying_with_us()
        failed, pids = [], []
        for process in processes:
            try:
                pids.append(self._system.spawn(process, prepare))
            except NotRunnableError as error:  # noqa: PERF203  the others are started, and ended again
                failed.append(ev.SpawnFailed(now(), process.name, error.exit_code, str(error)))
        _say_started(pids)
        return failed

    def close(self) -> None:
        """End what is left of ours."""
        self.close_store()
        self._end_server()


def _caller_lost(at_s: float) -> ge.CannotStart:
    """It has the state that its workers would inherit: nothing can take its place."""
    text = "the process that was forked from the caller of launch() to start workers has ended"
    return ge.CannotStart(at_s, text, exit_codes.INFRASTRUCTURE)


def _say_started(pids: Sequence[int]) -> None:
    if pids:
        _log.info("started %s (pids %s)", counted(len(pids), "worker"), ", ".join(map(str, pids)))
