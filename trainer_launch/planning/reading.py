"""What is read before a plan is made: the live pod or a snapshot, its job, its command, and this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.contracts import read_job
from trainer_launch.contracts.source import MAX_FILE_BYTES, Pod
from trainer_launch.host import network
from trainer_launch.host.files import JOB_SECRET, LiveFiles
from trainer_launch.host.machine import probe
from trainer_launch.model import Fact, Host, Job, Origin, PortRange, value_parsers
from trainer_launch.model.errors import UsageError
from trainer_launch.model.settings import Settings, job_options
from trainer_launch.planning import programs
from trainer_launch.planning.command import Command, Kind, grace_of, launcher_in
from trainer_launch.planning.flag_overrides import overlay, with_minimum, with_spares
from trainer_launch.planning.wrappers import as_torchrun, see_through, typed_launcher

SHIM_SWITCH = "TRAINER_LAUNCH_SHIM"
_SECRET_FILE, _SSH_KEY = "secret_file", "id_rsa"
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def live_pod(argv: Sequence[str]) -> Pod:
    """This container's injected input."""
    env = dict(os.environ)
    return Pod(
        env=env,
        files=LiveFiles(MAX_FILE_BYTES + 1),
        hostname=env.get("HOSTNAME") or os.uname().nodename,
        command=tuple(argv),
        namespace=_namespace(),
    )


class Reading(Struct, frozen=True, kw_only=True):
    """A pod, read once: its job, its command if it has one, and this machine."""

    pod: Pod
    command: Command | None
    job: Job
    host: Host
    python_is_ours: bool  # whether the interpreter typed in the command is the launcher's
    loopback_port: int  # a free one, where a single node's agent meets its launcher

    @property
    def calls_others(self) -> bool:
        """Whether the command is a shell or a wrapper, whose torchrun may be a shim."""
        command = self.command
        if command is None or command.kind is not Kind.PROGRAM or self.pod.env.get(SHIM_SWITCH) == "off":
            return False
        launcher = launcher_in(command.argv)
        return command.shell is not None or (launcher is not None and launcher.is_inside)


def read(pod: Pod, settings: Settings) -> Reading:
    """Read the pod, and look at this machine.

    Raises:
        LaunchError: the command or the contract does not fit.
    """
    path, command = pod.env.get("PATH"), None
    pod, warning = _taken_over(replace(pod, command=see_through(pod.command).command), settings)
    if pod.command:
        command = programs.recognise(pod.command, path)
    job = _job(pod, settings, command)
    job = replace(job, warnings=(*job.warnings, warning)) if warning else job
    python = command.python if command is not None else ()
    return Reading(
        pod=pod,
        command=command,
        job=job,
        host=probe(pod.env),
        python_is_ours=bool(python) and programs.is_our_python(python[0], path),
        loopback_port=network.free_port(ports_of(settings)),
    )


def _taken_over(pod: Pod, settings: Settings) -> tuple[Pod, str | None]:
    """The pod with `accelerate launch` and the like as torchrun; or a warning that a file keeps them from it.

    Raises:
        LaunchError: the contract does not fit, or the workers cannot be divided among its nodes.
    """
    typed = typed_launcher(pod.command)
    if typed is None:
        return pod, None
    if (path := programs.defaults_file(typed, pod.env)) is not None:
        return pod, (
            f"{typed.form.name} runs as it is: {path} may choose what the launcher would drop, such as FSDP or "
            f"other hosts. If it does not, type {typed.form.workers} and remove the file"
        )
    nodes = overlay(read_job(pod, settings.contract), job_options(settings), Origin.FLAG).nodes
    command, env = as_torchrun(typed, nodes) or (pod.command, {})
    return replace(pod, command=command, env={**pod.env, **env}), None


def _job(pod: Pod, settings: Settings, command: Command | None) -> Job:
    """The job as the platform told it, under torchrun's typed options, under our own flags."""
    if settings.ssh_dir is not None:
        pod = replace(pod, env={**pod.env, "TRAINER_LAUNCH_SSH_DIR": settings.ssh_dir})
    told = job = read_job(pod, settings.contract)
    if command is not None and command.torchrun is not None:
        job = overlay(job, command.torchrun.options, Origin.COMMAND)
    job = overlay(job, job_options(settings), Origin.FLAG)
    job = with_minimum(with_spares(job, settings.spares, told.nodes), settings.min_nodes)
    job = _with_secret(job, pod, settings.secret_file)
    _, warning = grace(settings, command, pod)
    return replace(job, warnings=(*job.warnings, warning)) if warning else job


def _with_secret(job: Job, pod: Pod, given: str | None) -> Job:
    """The job with the path of its secret: the given one, what is mounted by convention, or the job's ssh key."""
    key = f"{job.details.get('ssh_dir')}/{_SSH_KEY}"
    mounted = (path for path in (JOB_SECRET, key) if path.startswith("/") and pod.files.exists(path))
    path = given or next(mounted, None)
    if path is None:
        return job
    fact = Fact(name=path, value="present", origin=Origin.FLAG if given else Origin.FILE, field=_SECRET_FILE)
    return replace(job, details={**job.details, _SECRET_FILE: path}, facts=(*job.facts, fact))


def secret_file_of(job: Job) -> str | None:
    """Where the job's secret is."""
    path = job.details.get(_SECRET_FILE)
    return path if isinstance(path, str) else None


def grace(settings: Settings, command: Command | None, pod: Pod) -> tuple[float, str | None]:
    """Seconds between SIGTERM and SIGKILL, and what is odd about them."""
    return grace_of(settings.grace, command, pod.env, is_given="grace" in settings.model_fields_set)


def ports_of(settings: Settings) -> PortRange | None:
    """What may be opened beside the port that the nodes meet at; None: anything.

    Raises:
        UsageError: --port-range makes no sense.
    """
    text = settings.port_range
    ports = None if text is None else value_parsers.parse_port_range(text)
    if text is not None and ports is None:
        raise UsageError(
            f"invalid value {text[:60]!r} for --port-range: expected LOW-HIGH, two ports from 1 to 65535"
        )
    return ports


def _namespace() -> str | None:
    try:
        return _NAMESPACE.read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None
