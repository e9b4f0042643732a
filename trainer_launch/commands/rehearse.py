"""`rehearse`: every pod of a job as its own launcher process on this machine, with gloo."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from trainer_launch.commands import options
from trainer_launch.commands.install_shims import is_shim
from trainer_launch.commands.options import Parsed
from trainer_launch.contracts.source import MAX_FILE_BYTES, PodInput
from trainer_launch.diagnosis.incident_bundle import NOWHERE
from trainer_launch.host.files import LiveFiles
from trainer_launch.model import NodeRange, signal_policy
from trainer_launch.model.errors import ContractError, NodeError, UsageError
from trainer_launch.model.settings import Settings, load
from trainer_launch.model.value_parsers import parse_node_range, parse_nproc, shown
from trainer_launch.observability import incident_watch
from trainer_launch.planning import engines
from trainer_launch.planning.command import CommandKind, grace_of, launcher_in
from trainer_launch.planning.mpi_options import is_horovodrun, is_mpirun
from trainer_launch.planning.reading import check_command, check_torch, read, recognise
from trainer_launch.rehearsal import controllers, faults, reporting
from trainer_launch.rehearsal.controllers import overridden, workload_of
from trainer_launch.rehearsal.controllers.flag_jobs import elastic_job, mpi_job, torch_job
from trainer_launch.rehearsal.controllers.local_jobs import OURS, RUN, own_environment
from trainer_launch.rehearsal.controllers.pod_values import Workload
from trainer_launch.rehearsal.driver import RehearsalJob, rehearse
from trainer_launch.rehearsal.kubelet import Kubelet, Setting, image_path
from trainer_launch.supervisor.output import use_color

_log = logging.getLogger(__name__)
_PASSED = ("signals", "max_restarts", "spares", "hang_timeout", "hang_report_after", "events", "preload")
_POD_GRACE = 0.75  # of ours: a pod has ended its workers before we end the pod
# Checks of what only a real pod has of its own: network interfaces, a name, a range of ports.
_NOT_HERE = "own-name=off,gloo-socket-ifname=off"


def main(parsed: Parsed) -> int:
    """Start the pods, show their output, print a table, return the first failure's exit code.

    Raises:
        LaunchError: the flags, the command or the manifest do not fit, or a fault cannot be done here.
    """
    reports = reporting.paths_of(parsed.flags)
    injected = tuple(map(faults.parse, parsed.flags["fault"] or ()))
    own_network = faults.isolate(injected)
    made = _of_manifests(parsed) if parsed.flags["file"] else _of_command(parsed)
    if parsed.flags["render"]:
        sys.stdout.write(controllers.render(made[0], parsed.flags["render"]))
        return 0
    workload, settings, setting = made
    faults.check_targets(injected, workload.drafts)
    job = RehearsalJob(workload=workload, faults=injected, reports=reports, check=_check_plans)
    return rehearse(job, settings, replace(setting, own_network=own_network))


def _of_command(parsed: Parsed) -> tuple[Workload, Settings, Setting]:
    """The job of the flags and a command."""
    for flag, name in (("render", "--render"), ("command_line", "--command"), ("skip_init", "--skip-init")):
        if parsed.flags[flag]:
            raise UsageError(f"{name} needs a manifest; add -f FILE")
    settings, path = parsed.settings, os.environ.get("PATH", os.defpath)
    if not parsed.argv:
        raise UsageError("missing command; write one after --, or add a manifest with -f")
    command = recognise(parsed.argv, path)
    check_command(command, path)
    starts_by_ssh = settings.engine == "auto" and (is_mpirun(parsed.argv[0]) or is_horovodrun(parsed.argv))
    is_mpi = settings.engine in ("mpi", "horovodrun") or starts_by_ssh
    is_given = "grace" in settings.model_fields_set
    launchers_s = grace_of(settings.grace * _POD_GRACE, command, own_environment(os.environ), is_given=is_given)
    settings = Settings({**vars(settings), "grace": launchers_s / _POD_GRACE})
    setting = Setting(launchers=_for_our_pods(settings, is_mpi=is_mpi), path=path, labels=False)
    return _of_flags(parsed, is_mpi=is_mpi), settings, setting


def _of_manifests(parsed: Parsed) -> tuple[Workload, Settings, Setting]:
    if parsed.argv:
        raise UsageError(
            "with -f the command comes from the manifest; use --command 'PROGRAM ARG ...' to run another one"
        )
    wished, documents = parsed.settings, controllers.read(parsed.flags["file"])
    nodes = None if wished.nodes is None else _nodes(wished)
    documents = overridden(documents, nodes, None if wished.nproc_per_node is None else _nproc(wished))
    workload = _adjusted(workload_of(documents, shows_secrets=not parsed.flags["render"]), parsed)
    controllers.warn_of_ignored(workload)
    if parsed.flags["command_line"] is None and (sentence := without_launcher(workload, image_path())):
        _log.warning("%s", sentence)
    setting = Setting(
        launchers=_for_their_pods(parsed.settings),
        path=image_path(),
        command=parsed.flags["command_line"],
        labels="prefix" not in parsed.settings.model_fields_set or parsed.settings.prefix,
    )
    return workload, parsed.settings, setting


def _adjusted(workload: Workload, parsed: Parsed) -> Workload:
    """The job of the manifests with what the command line has over it."""
    settings = parsed.settings
    workload = controllers.without_init(workload, parsed.flags["skip_init"] or ())
    if parsed.flags["command_line"] is None and settings.nodes is not None:
        workload = controllers.retyped(workload, "--nnodes", settings.nodes)
    if parsed.flags["command_line"] is None and settings.nproc_per_node is not None:
        workload = controllers.retyped(workload, controllers.NPROC_OPTION, settings.nproc_per_node)
        sentence = controllers.other_counts(workload)
        workload = replace(workload, odd=(*workload.odd, *([sentence] if sentence else [])))
    return workload


def without_launcher(workload: Workload, path: str) -> str:
    """A sentence about pods that run torchrun as it is, and how to see the difference; "": there are none."""
    for draft in workload.drafts:
        container = draft.template.container(draft.main)
        launcher = launcher_in((*container.command, *container.args)) if container and container.command else None
        if launcher is None or not launcher.is_torchrun:
            continue
        program = shutil.which(launcher.words[0], path=path)
        if program is None or not is_shim(Path(program)):
            return (
                "the pods run torchrun without trainer-launch. To compare what a fault costs, "
                "rehearse with --command 'trainer-launch run -- torchrun …' too"
            )
    return ""


def _check_plans(kubelet: Kubelet) -> None:
    """Plan the launchers' work: a command that each launcher would refuse is refused once, before any pod starts.

    Raises:
        UsageError: a launcher's options or command do not fit, or there is no torch.
    """
    starts_ours, planned = (sys.executable, "-c", RUN), set[tuple[str, ...]]()
    for pod in kubelet.pods:
        process = kubelet.process(pod, pod.draft.main, 1)
        words, stop_signal = process.argv[len(starts_ours) :], pod.main.stop_signal or "SIGTERM"
        if process.argv[: len(starts_ours)] != starts_ours or words[:1] != ("run",) or words in planned:
            continue
        planned.add(words)
        kubelet.prepare(pod, pod.draft.main, 1)  # its files, such as a hostfile
        _, given, argv, _ = options.typed(OURS, words)
        if not argv:
            raise UsageError(
                f"container {pod.draft.main} of {pod.name} has no program to run; add it to the command or args in "
                "the manifest, or run --command 'PROGRAM ARG ...'"
            )
        settings, files = load(given, process.env), LiveFiles(MAX_FILE_BYTES + 1)
        with contextlib.suppress(ContractError, NodeError):  # these depend on the pod, whose launcher says so
            reading = read(PodInput(env=process.env, files=files, hostname=pod.name, command=argv), settings)
            task = engines.task_of(reading, settings)
            plan = engines.plan(task)
            if unheard := signal_policy.unheard(stop_signal, plan.signals):
                _log.warning("%s of %s: %s", pod.draft.main, pod.name, unheard)
            check_torch("torch" if task.command.kind is CommandKind.FRONT_END else plan.engine)


def _of_flags(parsed: Parsed, *, is_mpi: bool) -> Workload:
    """The job of the flags; an elastic one begins with as many nodes as it may have."""
    settings, argv, grace_s = parsed.settings, parsed.argv, parsed.settings.grace
    nodes, nproc, says = _nodes(settings), _nproc(settings), settings.nproc_per_node is not None
    if is_mpi:
        if nodes.fixed is None:
            raise UsageError(f"invalid value {shown(str(nodes))} for --nodes: expected N for an MPI job")
        if not nproc.isdigit():
            raise UsageError(f"invalid value {shown(nproc)} for --nproc-per-node: expected a number for an MPI job")
        return mpi_job(nodes.max, int(nproc), argv, grace_s)
    spares = settings.spares or 0  # pods of the platform's, of which the launchers know by the option how many wait
    if nodes.fixed is not None:
        return torch_job(nodes.max, nproc, argv, grace_s, asked=says, spares=spares)
    return elastic_job(NodeRange(nodes.min, nodes.max + spares), nproc, argv, grace_s, asked=says)


def _for_our_pods(settings: Settings, *, is_mpi: bool) -> dict[str, str]:
    """The options that the launchers get as variables: each marks its workers' lines itself."""
    prefix = settings.prefix if is_mpi or "prefix" in settings.model_fields_set else True  # mpirun has --tag-output
    return {
        **_for_all_pods(settings, ("start_method",)),
        "PREFIX": str(int(prefix)),
        "GRACE": f"{settings.grace * _POD_GRACE:g}",
        "ENGINE": "auto" if settings.engine == "mpi" else settings.engine,
        **({"IN_COLOR": "1"} if prefix and use_color() else {}),
    }


def _for_their_pods(settings: Settings) -> dict[str, str]:
    """The same for a manifest's pods, which may have all this themselves."""
    return {**_for_all_pods(settings, ("engine", "grace", "start_method")), "POLICY": _NOT_HERE}


def _for_all_pods(settings: Settings, names: Sequence[str]) -> dict[str, str]:
    chosen = {name: getattr(settings, name) for name in (*_PASSED, *names) if name in settings.model_fields_set}
    place = incident_watch.place_of(settings)  # not in a pod's own temporary directory, which goes with it
    return {
        "SHM_SIZE": "keep",  # /dev/shm is this machine's, which all pods share
        "LOG_LEVEL": settings.log_level if "log_level" in settings.model_fields_set else "warning",
        "INCIDENT_DIR": NOWHERE if place is None else os.path.abspath(place),
        **{name.upper(): str(value) for name, value in chosen.items() if value is not None},
    }


def _nodes(settings: Settings) -> NodeRange:
    text = settings.nodes or "1"
    nodes = parse_node_range(text)
    if nodes is None:
        raise UsageError(f"invalid value {shown(text)} for --nodes: expected N, or MIN:MAX with 0 < MIN <= MAX")
    return nodes


def _nproc(settings: Settings) -> str:
    text = settings.nproc_per_node or "1"
    if parse_nproc(text) is None:
        raise UsageError(f"invalid value {shown(text)} for --nproc-per-node: expected a number, auto, gpu or cpu")
    return text
