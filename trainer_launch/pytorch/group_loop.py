"""Run this node's torch workers to the end of the job: wait, step, act. `worker_group` decides what happens."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trainer_launch.host import runtime_directory
from trainer_launch.membership import protocol as say
from trainer_launch.membership.client import Client, Connected, Disconnected
from trainer_launch.model import FailureRecord, Membership, Outcome, Plan, Process, Workers, exit_codes
from trainer_launch.model.errors import InternalError, UsageError
from trainer_launch.model.signal_policy import signal_name
from trainer_launch.model.units import counted
from trainer_launch.planning import torchrun_options
from trainer_launch.pytorch import group_ending, worker_group, worker_processes
from trainer_launch.pytorch import group_events as ge
from trainer_launch.pytorch.fork_server import ServerError
from trainer_launch.pytorch.worker_group import Phase, State
from trainer_launch.pytorch.worker_starter import SERVER, STORE, Starter
from trainer_launch.supervisor import error_lines, loop
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor import events as supervisor
from trainer_launch.supervisor.death_clues import Evidence
from trainer_launch.supervisor.system import System
from trainer_launch.supervisor.worker_samples import Place

_OWN_DESCRIPTORS = 16  # for the fork server, the coordinator's client, and what is opened for a moment
_log = logging.getLogger(__name__)


def run(
    plan: Plan,
    system: System,
    secret: bytes | None,
    watch: Callable[[Group], loop.AnyWatch | None] = lambda group: None,
    observer: loop.AnyObserver | None = None,
) -> Outcome:
    """Run the plan's workers until the job is over for this node, and say how it ended."""
    with contextlib.closing(Group(plan, system, secret, observer)) as group:
        group.watch = watch(group)
        group.to_the_end()
    system.drain(loop.DRAIN_S)
    group.hand_up()
    return group_ending.outcome(group.state, system, group.evidence)


class Group:
    """The state, and who carries out what it asks for."""

    def __init__(
        self,
        plan: Plan,
        system: System,
        secret: bytes | None,
        observer: loop.AnyObserver | None,
    ) -> None:
        if plan.workers is None or plan.membership is None:
            raise InternalError("a worker group needs a plan with workers and a membership")
        workers, membership = plan.workers, plan.membership
        self.evidence = Evidence()
        self.watch: loop.AnyWatch | None = None
        self._observer = observer
        self._plan, self._workers, self._membership = plan, workers, membership
        self._system = system
        self._places: dict[str, Place] = {}
        self._queue: list[ge.Event] = []
        system.need_descriptors(_OWN_DESCRIPTORS + 2 * workers.count)
        system.mark = runtime_directory.VARIABLE, workers.run_dir
        self._gpus = Watch(workers.env)
        self._folders = LogFolders(workers, membership.job)
        self._attempt_folder = ""
        self._store_failed_in = -1  # a generation
        self._starter = Starter(workers, system)
        self._starter.begin(hosts_store=membership.node_rank == 0)
        incarnation = uuid.uuid4().hex
        self._client = _client(membership, workers, incarnation, secret, system)
        self.state, self._first = worker_group.begin(plan, incarnation, system.now())

    def to_the_end(self) -> None:
        """Wait and act until the group has ended."""
        if self._observer is not None:
            self._observer.begun(snapshot(self.state))
        self._apply(self._first)
        self._work_off()
        while self.state.phase is not Phase.ENDED:
            for event in self._wait():
                self._take(event)
                self._work_off()

    def close(self) -> None:
        """End what is left beside the workers, and leave the coordinator."""
        self._client.close()
        self._starter.close()

    def hand_up(self) -> None:
        """Give what a worker of this node said before it ended the job to who asks us for it."""
        own, end = self.state.own, self.state.end
        place = self._places.get(f"rank {own.rank}") if own is not None else None
        if own is not None and place is not None and isinstance(end, say.GiveUp) and end.rank == own.rank:
            code = -own.signal if own.signal is not None else own.exit_code or 0
            error_lines.hand_up(place.error_file, code, self._workers.env.get("TORCHELASTIC_ERROR_FILE"))

    def place_of(self, name: str) -> Place | None:
        """Which worker a process is."""
        return self._places.get(name)

    # -- events -------------------------------------------------------------------------------

    def _wait(self) -> list[ge.Event]:
        """Signals, news, ends, that nobody is left: a worker that had the same SIGTERM as we has not failed."""
        watch_s = self.watch.due_s if self.watch is not None and self._is_watched() else None
        times = [at_s for at_s in (self.state.deadline_s, watch_s) if at_s is not None]
        happened = self._system.wait(min(times, default=None))
        ends = [event for event in happened if isinstance(event, ev.Exited)]
        last = [event for event in happened if isinstance(event, ev.Childless)]
        events: list[ge.Event] = [event for event in happened if event not in ends and event not in last]
        events += self._news()
        answer = self._starter.answer(self._system.now(), hosts_store=self._hosts_store())
        events += [self._with_folder(answer)] if answer is not None else []
        events += [event for end in ends if (event := self._ended(end)) is not None]
        events += last
        now_s = self._system.now()
        if self.state.deadline_s is not None and now_s >= self.state.deadline_s:
            events.append(ev.Deadline(now_s))
        if self.watch is not None and self._is_watched() and now_s >= self.watch.due_s:
            hung = self.watch.look(now_s)
            events += [hung] if hung is not None else []
        return events

    def _is_watched(self) -> bool:
        run = self.state.run
        return self.state.phase is Phase.RUNNING and run is not None and run.phase is supervisor.Phase.RUNNING

    def _news(self) -> list[ge.Heard]:
        heard = []
        while (news := self._client.receive(0)) is not None:
            _tell(news)
            heard.append(ge.Heard(self._system.now(), news))
        return heard

    def _ended(self, event: ev.Exited) -> ge.Event | None:
        """A worker's end with what it said; what else has ended is of our own making."""
        name = event.exit.process
        if name.startswith(SERVER):
            answer = self._starter.server_ended(event.exit, event.at_s, hosts_store=self._hosts_store())
            return None if answer is None else self._with_folder(answer)
        if name.startswith(STORE):
            return ge.StoreEnded(event.at_s, event.exit) if self._starter.store_ended(name) else None
        place = self._places.get(name)
        said = error_lines.read_error_file(place.error_file) if place is not None and place.error_file else {}
        death = FailureRecord(
            rank=place.rank if place else None,
            local_rank=place.local_rank if place else None,
            exit_code=event.exit.code,
            signal=event.exit.signal,
            message=error_lines.message_in(said),
            lines=tuple(error_lines.traceback_in(said)),
        )
        return ge.WorkerEnded(event.exit, death)

    def _hosts_store(self) -> bool:
        formed = self.state.formed
        return formed.is_store_host if formed is not None else self._membership.node_rank == 0

    # -- steps and actions --------------------------------------------------------------------

    def _work_off(self) -> None:
        while self._queue:
            self._take(self._queue.pop(0))

    def _take(self, event: ge.Event) -> None:
        before = self.state
        self.state, actions = worker_group.step(before, event)
        _log_step(event, before, self.state)
        self._observe(event, before)
        self._apply(actions)

    def _observe(self, event: ge.Event, before: State) -> None:
        """Observers know the supervisor's events; the others change what they see of the state."""
        if self._observer is None:
            return
        seen: ev.Event = ev.Deadline(self._system.now())
        if isinstance(event, ge.WorkerEnded):
            seen = ev.Exited(event.exit.at_s, event.exit)
        elif isinstance(event, ev.Event):
            seen = event
        self._observer.stepped(seen, snapshot(before), snapshot(self.state))

    def _apply(self, actions: tuple[ge.Action, ...]) -> None:
        for action in actions:
            self._do(action)

    def _do(self, action: ge.Action) -> None:
        match action:
            case ge.Tell(message=message):
                self._client.send(message)
            case ge.Prepare():
                self._prepare()
            case ge.OpenStore():
                self._open_store()
            case ge.CloseStore():
                self._starter.close_store()
            case ge.StartWorkers(processes=processes):
                self._start(processes)
            case ev.Look():
                self.evidence = self._system.look()
            case _:
                loop.carry_out(self._system, action, self._plan)

    def _prepare(self) -> None:
        formed, now_s = self.state.formed, self._system.now()
        try:
            self._attempt_folder = self._folders.begin(0 if formed is None else formed.restarts)
        except UsageError as problem:
            self._queue.append(ge.CannotStart(now_s, str(problem), problem.exit_code))
            return
        prepared = self._starter.prepare(now_s, hosts_store=self._hosts_store())
        self._queue += [self._with_folder(prepared)] if prepared is not None else []

    def _with_folder(self, event: ge.Prepared | ge.CannotStart) -> ge.Event:
        return replace(event, attempt_folder=self._attempt_folder) if isinstance(event, ge.Prepared) else event

    def _start(self, processes: tuple[Process, ...]) -> None:
        formed, go = self.state.formed, self.state.go
        if formed is None or go is None:
            return
        _log.info(
            "generation %d: this is node %d of %d, store at %s:%d, %s so far",
            *(formed.generation, formed.group_rank, formed.size, go.host, go.port),
            counted(formed.restarts, "failure"),
        )
        self._places = worker_processes.places(
            self._workers, formed, self._attempt_folder, are_forked=self._starter.forks
        )
        started = {"workers": len(processes), "first_rank": formed.first_rank}
        runtime_directory.tell(self._workers.run_dir, "workers_started", **started)
        self._gpus.tell(is_first=self.state.starts == 1)
        self._queue += self._starter.start(processes, self._system.now)
        if self._observer is not None:
            for name, pid in self._system.pids().items():
                self._observer.spawned(name, pid)

    def _open_store(self) -> None:
        formed = self.state.formed
        if formed is None:
            return
        try:
            port = self._starter.open_store(formed.generation, self._membership.ports)
        except ServerError as problem:
            self._lost_store(str(problem))
            return
        host = self._client.own_address(self._membership.address, self._membership.host)
        self._queue.append(ge.StoreOpened(self._system.now(), host, port))

    def _lost_store(self, why: str) -> None:
        """The fork server has failed while it opened the store: another one tries it again, once a generation."""
        formed, now_s = self.state.formed, self._system.now()
        generation = 0 if formed is None else formed.generation
        if self._store_failed_in == generation:
            text = f"the store cannot be opened: {why}"
            self._queue.append(ge.CannotStart(now_s, text, exit_codes.INFRASTRUCTURE))
            return
        self._store_failed_in = generation
        _log.warning("the store cannot be opened: %s; a new fork server tries it again", why)
        prepared = self._starter.renew(now_s, hosts_store=True)
        self._queue += [self._with_folder(prepared)] if prepared is not None else []


def snapshot(state: State) -> supervisor.State:
    """The group as the supervisor's observers know a run."""
    run = state.run if state.phase is Phase.RUNNING and state.run is not None else None
    if run is None:
        phase = {Phase.ENDED: supervisor.Phase.DONE, Phase.DONE: supervisor.Phase.CLEARING}.get(
            state.phase, supervisor.Phase.WAITING
        )
        exit_codes = state.run.exits if state.run is not None else ()
        run = supervisor.State(plan=state.plan, phase=phase, started_at_s=state.started_at_s, exits=exit_codes)
    phase = supervisor.Phase.RUNNING if run.phase is supervisor.Phase.DONE else run.phase
    return replace(run, phase=phase, restarts=max(0, state.starts - 1), stop_signal=state.stop_signal)


def _client(me: Membership, workers: Workers, incarnation: str, secret: bytes | None, system: System) -> Client:
    hello = say.Hello(
        say.VERSION, me.job, me.node_rank, me.host, incarnation, workers=workers.count, role=workers.role
    )
    return Client(me.coordinator, hello, secret, _log.info, me.seats, system.poke, workers.run_dir)


def _tell(news: object) -> None:
    match news:
        case Disconnected(reason=reason):
            _log.warning("the coordinator is unreachable: %s", reason)
        case Connected():
            pass
        case say.Restart(generation=number, reason=reason):
            _log.info("generation %d ends: %s", number, reason)
        case say.Waiting(present=present, wanted=wanted, missing=missing) if missing:
            _log.info("%d of %d nodes are here; missing: %s", present, wanted, ", ".join(missing))


def _log_step(event: ge.Event, before: State, after: State) -> None:
    """What the supervisor's loop would log of its own steps, in fewer lines: workers are many."""
    match event:
        case ge.WorkerEnded(exit=end) if after.failure is not None and before.failure is None:
            _log.info("%s ended with %s", end.process, loop.how(end))
        case ge.WorkerEnded(exit=end):
            _log.debug("%s ended with %s", end.process, loop.how(end))
        case ev.SpawnFailed(text=text):
            _log.error("%s", text)
        case ev.Signalled(number=number) if before.stop_signal is None and after.stop_signal is not None:
            asked = after.run.asked if after.run is not None and after.phase is Phase.RUNNING else 1
            grace_s = after.plan.grace_s
            _log.info("asked to stop by %s (request %d, grace %g s)", signal_name(number), asked, grace_s)
        case ev.Deadline() if _begins_to_kill(before, after):
            _log.warning("the grace period is over; sending SIGKILL to the remaining processes")


def _begins_to_kill(before: State, after: State) -> bool:
    runs = (before.run, after.run)
    kills = [run is not None and run.phase is supervisor.Phase.KILLING for run in runs]
    return kills == [False, True]


# -- GPU memory in use -------------------------------------------------------------------------


PATIENCE_S = 0.2  # with a driver that hangs, at a restart; the first start does not wait at all


class Watch:
    """Looks once at its making, and again before each later start."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._answer: list[str] = []
        self._look()

    def tell(self, *, is_first: bool) -> None:
        """Warn of each holder."""
        if not is_first:
            self._answer = []
            self._look()
            self._thread.join(PATIENCE_S)
        if not self._thread.is_alive():
            for text in self._answer:
                _log.warning("%s", text)

    def _look(self) -> None:
        self._thread = threading.Thread(target=self._ask, name="gpu-holders", daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        self._answer = holders(self._env)


def holders(env: Mapping[str, str]) -> list[str]:
    """One sentence for each process that holds memory on a GPU that we see; none when nothing can be told."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver here
        return []
    try:
        return [text for index in range(nvml.nvmlDeviceGetCount()) for text in _on(nvml, index, env)]
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()


def _on(nvml: Any, index: int, env: Mapping[str, str]) -> list[str]:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = nvml.nvmlDeviceGetUUID(device)
    uuid = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
    shown = [word.strip() for word in env.get("CUDA_VISIBLE_DEVICES", str(index)).split(",")]
    if not any(word == str(index) or (word and uuid.startswith(word)) for word in shown):
        return []
    me = os.getpid()
    return [
        f"GPU {index}: process {process.pid} (as the driver numbers it) holds"
        f" {_in_mib(process.usedGpuMemory)} while none of our workers runs"
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(device)
        if process.pid != me
    ]


def _in_mib(size: int | None) -> str:
    return "memory" if size is None else f"{size >> 20} MiB"


# -- log folders -------------------------------------------------------------------------------


class LogFolders:
    """LOG_DIR/JOB_xxxxxxxx/attempt_N/LOCAL_RANK of one run.

    A generation after a membership change has the N of the one before: its output is appended there.
    """

    def __init__(self, workers: Workers, job: str) -> None:
        self._workers = workers
        self._job = job
        self._of_this_run: str | None = None
        self._last = ""  # the attempt before

    def begin(self, restarts: int) -> str:
        """Make the folders of a generation, without the error files of the one before; return their folder.

        It is "" with --log-dir /dev/null: torchrun makes no folder then, and the workers have no error file.

        Raises:
            UsageError: a folder cannot be made.
        """
        logs = self._workers.logs
        if logs.get("log_dir") == torchrun_options.NOWHERE:
            return ""
        try:
            attempt = f"{self._of_the_run()}/attempt_{restarts}"
            if self._last != attempt and not torchrun_options.writes_files(logs):
                shutil.rmtree(self._last, ignore_errors=True)  # nobody reads it again
            self._last = attempt
            for local_rank in range(self._workers.count):
                os.makedirs(f"{attempt}/{local_rank}", exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{attempt}/{local_rank}/error.json")
            for path in torchrun_options.copies(logs, attempt):
                with open(path, "ab"):
                    pass
        except OSError as problem:
            name = f"--log-dir {logs['log_dir']}" if "log_dir" in logs else "the folder of the workers' error files"
            raise UsageError(
                f"{name}: cannot create {problem.filename}: {problem.strerror}; "
                f"set --log-dir to a writable directory"
            ) from problem
        return attempt

    def _of_the_run(self) -> str:
        if self._of_this_run is None:
            base = self._base()
            os.makedirs(base, exist_ok=True)
            self._of_this_run = tempfile.mkdtemp(prefix=f"{self._job}_", dir=base)
        return self._of_this_run

    def _base(self) -> str:
        """Where the user wants the logs, else a new folder as torchrun's; the run's own if nobody wants logs."""
        logs = self._workers.logs
        if "log_dir" in logs:
            return os.path.abspath(logs["log_dir"])
        return (
            tempfile.mkdtemp(prefix="torchelastic_")
            if torchrun_options.writes_files(logs)
            else self._workers.errors
        )
