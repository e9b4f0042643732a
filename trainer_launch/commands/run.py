"""`run`, the ENTRYPOINT: read, plan, run to the end, say how it ended."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from msgspec.structs import replace

from trainer_launch.commands.options import Parsed
from trainer_launch.contracts import UNKNOWN
from trainer_launch.host import deadline_subprocess, logs, process_tree, runtime_directory, shm
from trainer_launch.host.files import LiveFiles, at_start, read_secret, remove_tree
from trainer_launch.host.runtime_directory import private_folder
from trainer_launch.host.slow_files import within
from trainer_launch.model import Outcome, Plan
from trainer_launch.model.errors import NotRunnableError
from trainer_launch.model.settings import Settings
from trainer_launch.model.signal_policy import stops
from trainer_launch.planning import engines, shared_memory
from trainer_launch.planning.command import CHANGE_USER, CommandKind, Unwrapped, parse_command, see_through
from trainer_launch.planning.mpi import HOROVODRUN, MPIRUN
from trainer_launch.planning.plain import FRONT_END
from trainer_launch.planning.reading import check_command, check_torch, live_pod, read
from trainer_launch.planning.task import Task
from trainer_launch.supervisor import inherited, outcome

if TYPE_CHECKING:  # all else is loaded when the plan has been made, while the fork server imports torch
    from trainer_launch.membership.notes import Judge
    from trainer_launch.mpi.mpi_job import Preparation
    from trainer_launch.observability.observer import Observer
    from trainer_launch.pytorch.fork_server import ForkServer
    from trainer_launch.supervisor.output import Listener
    from trainer_launch.supervisor.system import System

_LIST_BYTES = 65_536
_PROBE_S = 30.0
_log = logging.getLogger(__name__)


def main(parsed: Parsed) -> int:
    """The command."""
    unwrapped = see_through(parsed.argv)
    if unwrapped.prefix:
        _start_behind(unwrapped, len(parsed.argv))
    return run(parsed.settings, parsed.argv)


def _start_behind(unwrapped: Unwrapped, words: int) -> NoReturn:
    """Become a program such as numactl, which becomes this launcher again; the command typed has so many words."""
    program, own = unwrapped.prefix[0], _own_words(words)
    if shutil.which(program) is None:
        raise NotRunnableError(f"{program!r} was not found in PATH; install it in the image", exists=False)
    if any(os.path.basename(word) in CHANGE_USER for word in unwrapped.prefix):
        probe = deadline_subprocess.run((*unwrapped.prefix, own[0], "-c", f"import {__package__}"), None, _PROBE_S)
        if probe.code != 0:
            _log.warning(
                "the command runs without the launcher: behind %s, %s cannot be used (%s); install trainer-launch "
                "where that user may read it",
                *(program, own[0], probe.failure or probe.why()),
            )
            own = ()
    os.execvp(program, [*unwrapped.prefix, *own, *unwrapped.command])


def _own_words(words: int) -> tuple[str, ...]:
    """How this launcher was started, without the command, which was typed in so many words."""
    own = sys.orig_argv[1 : len(sys.orig_argv) - words]
    return (sys.executable, *own) if own[-1:] == ["--"] else (sys.executable, *own, "--")


def run(settings: Settings, argv: Sequence[str]) -> int:
    """Run `argv` in this pod; return the pod's exit code.

    Raises:
        LaunchError: nothing could be started.
    """
    if argv and parse_command(see_through(argv).command).kind is CommandKind.FRONT_END:
        _become_front_end(settings, argv)
    return outcome.exit_code(to_the_end(settings, argv))


def to_the_end(
    settings: Settings,
    argv: Sequence[str],
    *,
    adjust: Callable[[Plan], Plan] = lambda plan: plan,
) -> Outcome:
    """Run `argv` in this pod by an adjusted plan, and say how it ended.

    Raises:
        LaunchError: nothing could be started.
    """
    scratch = at_start("to make a temporary folder", private_folder)
    try:
        with shm.kept_clean() as sweep:
            task, plan = at_start("to read this pod", _planned, settings, argv, scratch)
            plan = adjust(plan)
            inherited.end_on_stop(number for number in plan.signals if stops(number, plan.signals))
            server = _fork_server(plan)
            return _carried_out(task, plan, scratch, sweep, server)
    finally:
        within(scratch, None, remove_tree, scratch)


def _fork_server(plan: Plan) -> ForkServer | None:
    """The fork server of torch workers, which imports torch while the rest of the launcher is loaded."""
    workers = plan.workers
    if workers is None or not workers.forks:
        return None
    from trainer_launch.pytorch.fork_server import ForkServer

    inherited.hear(())  # workers get from the server what hears a request to stop
    process_tree.mark_descendants()
    try:
        return ForkServer(workers)
    except OSError:
        return None  # the next one says why


def _carried_out(
    task: Task, plan: Plan, scratch: str, sweep: Callable[[], None], server: ForkServer | None
) -> Outcome:
    """Run the plan, and say how it ended."""
    settings = task.settings
    secret = _secret(settings, task, plan)
    mpi = _mpi_job(task, plan)  # before there is a system: it starts children, and waits for them
    # Loaded while an MPI job's hosts are looked at.
    from trainer_launch.observability import node_view
    from trainer_launch.observability.goodput_keeper import GoodputKeeper
    from trainer_launch.observability.observer import conclude, observed
    from trainer_launch.observability.progress import PrintedSteps
    from trainer_launch.supervisor.output import Output
    from trainer_launch.supervisor.system import System

    watched = settings.hang_timeout is not None  # output is progress, so no part of it may be left out
    printed = PrintedSteps(scratch)
    listeners = (printed.heard,) if mpi is None else (printed.heard, mpi.program.hear)
    listener, limit = partial(_hear, listeners), settings.output_limit
    system = System(Output(watched=watched, lines_per_s=limit, listener=listener))
    system.clean = sweep
    system.launchers = lambda: {view.pid for view in node_view.find()}
    keeper = GoodputKeeper(scratch, printed)
    logs.send_through(system.say)
    with contextlib.closing(system), observed(task, plan, settings, system, keeper) as observer:
        gc.enable()
        with _hosted(plan, secret, observer) as serves:
            if serves and plan.membership is not None and plan.membership.node_rank is None:
                plan = replace(plan, membership=replace(plan.membership, node_rank=0))
            if mpi is None:
                ended = _supervised(plan, system, task, secret, observer, server)
            else:
                ended = _mpi_run(plan, system, task, mpi, observer)
            sweep()
        return conclude(ended, task, settings, observer)


def _hear(listeners: Sequence[Listener], process: str, stream: int, data: bytes) -> None:
    for listener in listeners:
        listener(process, stream, data)


def _mpi_job(task: Task, plan: Plan) -> Preparation | None:
    """Prepare the job's mpirun or horovodrun; None: it has none."""
    if plan.engine not in (MPIRUN.name, HOROVODRUN.name):
        return None
    from trainer_launch.mpi.mpi_job import prepared  # only an MPI job needs it

    return prepared(task, plan.processes[0])


def _secret(settings: Settings, task: Task, plan: Plan) -> bytes | None:
    """The job's secret, where its nodes meet; one that was given is read in any case."""
    is_needed = settings.secret_file is not None or plan.membership is not None
    return read_secret(task.job.secret_file) if task.job.secret_file and is_needed else None


def _supervised(
    plan: Plan,
    system: System,
    task: Task,
    secret: bytes | None,
    observer: Observer,
    server: ForkServer | None,
) -> Outcome:
    from trainer_launch.observability.incident_watch import Incidents
    from trainer_launch.supervisor.processes import Processes
    from trainer_launch.supervisor.run_loop import ProgramLoop

    processes = Processes(plan, system, observer)
    if plan.workers is None:
        incidents = Incidents(task, processes)
        incidents.hear_requests()
        return incidents.concluded(ProgramLoop(processes, incidents.watch(), incidents.failed).run())
    from trainer_launch.diagnosis.group_incidents import GroupIncidents
    from trainer_launch.diagnosis.stragglers import STRAGGLERS, StragglerSamples  # only a torch job needs these
    from trainer_launch.membership.protocol import Note
    from trainer_launch.pytorch import node
    from trainer_launch.pytorch.fork_server import Starter
    from trainer_launch.pytorch.worker_group import WorkerGroup

    group = WorkerGroup(processes)
    client = node.client_of(group, secret, observer.notes)
    incidents = Incidents(task, processes, group)
    reports = GroupIncidents(group, client.send, incidents.collector)
    stragglers = StragglerSamples(
        group.recorders,
        group.workers.run_dir,
        lambda body: client.send(Note(group.generation, STRAGGLERS, body)),
        observer.stragglers,
    )
    watch = incidents.watch(reports.tell_ranks)
    incidents.hear_requests(lambda: reports.show_ranks(watch))
    here = node.TorchNode(group, client, Starter(group, server), reports, stragglers, watch)
    ended = incidents.concluded(here.run())
    return replace(ended, node_rank=group.node_rank) if group.generation else ended


def _mpi_run(plan: Plan, system: System, task: Task, mpi: Preparation, observer: Observer) -> Outcome:
    from trainer_launch.mpi.mpi_job import MpiJob
    from trainer_launch.observability.incident_watch import Incidents
    from trainer_launch.supervisor.processes import Processes

    processes = Processes(plan, system, observer)
    incidents = Incidents(task, processes)
    incidents.hear_requests()
    job = MpiJob(processes, mpi.program, mpi.begin(system), incidents.watch(), incidents.failed)
    return incidents.concluded(job.run())


def _planned(settings: Settings, argv: Sequence[str], scratch: str) -> tuple[Task, Plan]:
    reading = read(live_pod(argv), settings)
    env = inherited.with_user(reading.pod.env, f"{scratch}/{runtime_directory.HOME}")
    reading = replace(reading, pod=replace(reading.pod, env=env))
    memory = shared_memory.enlarged(reading, settings)
    if reading.command is not None:
        check_command(reading.command, reading.pod.env.get("PATH"))
    shims = _shims(scratch) if reading.calls_others else None
    task = engines.task_of(reading, settings, scratch=scratch, shm_is_short=memory.is_short, shims=shims)
    task = engines.with_network(task)
    plan = engines.plan(task)
    if settings.report is not None:
        plan = _with_preflights_findings(plan, settings.report)
    check_torch(plan.engine)
    if plan.workers is not None:
        process_tree.require("torch workers")
    _tell(task, plan)
    return task, plan


def _shims(scratch: str) -> str | None:
    """A folder of shims for a script; None where programs in it cannot be run, or the disk is full."""
    from trainer_launch.commands import install_shims  # only a shell or a wrapper needs them

    folder = f"{scratch}/{runtime_directory.SHIMS}"
    try:
        install_shims.write(Path(folder))
    except OSError as problem:
        _log.warning("%s cannot be written (%s): launchers in scripts run without trainer-launch", folder, problem)
        return None
    return folder if os.access(f"{folder}/torchrun", os.X_OK) else None


def _with_preflights_findings(plan: Plan, report: str) -> Plan:
    """The plan with what an earlier preflight found faulty: on this node, and for a coordinator on all nodes."""
    if plan.hosting is not None:
        from trainer_launch.membership.quarantine import FAILING_NODES, nodes_in  # only a coordinator needs it

        text = LiveFiles(_LIST_BYTES).read(os.path.join(os.path.dirname(report) or ".", FAILING_NODES)) or b""
        failing = nodes_in(text.decode(errors="replace"))
        plan = replace(plan, hosting=replace(plan.hosting, failing=failing))
    if plan.membership is not None:
        from trainer_launch.preflight.report_formats import fault_of  # only who has a preflight needs the checks

        fault = fault_of(report, plan.membership.host)
        plan = replace(plan, membership=replace(plan.membership, fault=fault))
    return plan


@contextlib.contextmanager
def _hosted(plan: Plan, secret: bytes | None, observer: Observer) -> Iterator[bool]:
    """Host the coordinator while the plan runs, when this is the node to do so; whether it is."""
    if plan.hosting is None:
        yield False
        return
    from trainer_launch.diagnosis import stragglers  # only node 0 of a torch job needs these
    from trainer_launch.diagnosis.stall import StallJudge
    from trainer_launch.membership.server import serve
    from trainer_launch.observability.training_judge import TrainingJudge

    judges: list[Judge] = [StallJudge(), TrainingJudge(shown=observer.training)]
    if plan.hosting.finds_stragglers:
        judges.append(stragglers.StragglerJudge(every_s=stragglers.EVERY_S))
    with serve(plan.hosting, secret, observer.coordinator_spoke, judges) as server:
        yield server is not None


def _tell(task: Task, plan: Plan) -> None:
    job, topology = task.job, task.topology
    for warning in (*job.warnings, *plan.warnings):
        _log.warning("%s", warning)
    is_alone = job.contract == UNKNOWN.name and topology.pods == 1
    rank = "ranked-by-arrival" if topology.by_arrival and topology.node_rank is None else topology.node_rank
    _log.info(
        "%s engine=%s node=%s/%s workers=%s%s",
        "no platform found; running as a single node:" if is_alone else f"contract={job.contract}",
        plan.engine,
        "?" if rank is None else rank,
        topology.nodes or "?",
        topology.local_world_size or "?",
        f" coordinator={topology.coordinator}" if topology.coordinator else "",
    )
    if job.contract == UNKNOWN.name and task.command.is_worker and plan.engine == "plain":
        _log.info(
            "no platform was found: running one process, for which the launcher sets no RANK and WORLD_SIZE; "
            "for torch workers add --nproc-per-node N"
        )


def _become_front_end(settings: Settings, argv: Sequence[str]) -> None:
    """Replace this process by the front end, which becomes this launcher again.

    Where the front end is to run as any program, nothing happens.
    """
    reading = read(live_pod(argv), settings)
    command = reading.command
    if command is None or engines.pick(reading.job, command, settings.engine)[0] != FRONT_END:
        return
    check_command(command, reading.pod.env.get("PATH"))
    env = inherited.with_user(reading.pod.env, tempfile.gettempdir())
    reading = replace(reading, pod=replace(reading.pod, env=env))
    task = engines.task_of(reading, settings, launcher=_own_words(len(argv)))
    process = engines.plan(task).processes[0]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(process.argv[0], process.argv, dict(process.env))
    except OSError as problem:
        is_there = not isinstance(problem, FileNotFoundError)
        raise NotRunnableError(f"cannot execute {process.argv[0]!r}: {problem.strerror}", exists=is_there) from None
