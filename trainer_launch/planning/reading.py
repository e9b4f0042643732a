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
from trainer_launch.model import Fact, Host, Job, Origin
from trainer_launch.model.settings import Settings, job_options
from trainer_launch.planning import programs
from trainer_launch.planning.command import Command, see_through, starts_launchers
from trainer_launch.planning.job import overlay, with_hosts, with_minimum, with_spares
from trainer_launch.planning.task import grace, ports_of

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
    front_end: tuple[str, str] = ("", "")  # the Python of a typed front end, and the path of its program

    @property
    def calls_others(self) -> bool:
        """Whether the command is a shell or a wrapper, whose torchrun may be a shim."""
        switch = self.pod.env.get(SHIM_SWITCH)
        return self.command is not None and switch != "off" and starts_launchers(self.command)


def read(pod: Pod, settings: Settings) -> Reading:
    """Read the pod, and look at this machine.

    Raises:
        LaunchError: the command or the contract does not fit.
    """
    path, command = pod.env.get("PATH"), None
    pod = replace(pod, command=see_through(pod.command).command)
    if pod.command:
        command = programs.recognise(pod.command, path)
    python = command.python if command is not None else ()
    return Reading(
        pod=pod,
        command=command,
        job=_job(pod, settings, command),
        host=probe(pod.env),
        python_is_ours=bool(python) and programs.is_our_python(python[0], path),
        loopback_port=network.free_port(ports_of(settings)),
        front_end=programs.front_end(command, path),
    )


def _job(pod: Pod, settings: Settings, command: Command | None) -> Job:
    """The job as the platform told it, under torchrun's typed options, under our own flags."""
    if settings.ssh_dir is not None:
        pod = replace(pod, env={**pod.env, "TRAINER_LAUNCH_SSH_DIR": settings.ssh_dir})
    platform = job = read_job(pod, settings.contract)
    if command is not None and command.torchrun is not None:
        job = overlay(job, command.torchrun.options, Origin.COMMAND)
    job = overlay(with_hosts(job, settings.hosts), job_options(settings), Origin.FLAG)
    job = with_minimum(with_spares(job, settings.spares, platform.nodes), settings.min_nodes)
    job = _with_secret(job, pod, settings.secret_file)
    _, warning = grace(settings, command, pod.env)
    return replace(job, warnings=(*job.warnings, warning)) if warning else job


def _with_secret(job: Job, pod: Pod, given: str | None) -> Job:
    """The job with the path of its secret: the given one, what is mounted by convention, or the job's ssh key."""
    key = f"{job.ssh_dir}/{_SSH_KEY}"
    mounted = (path for path in (JOB_SECRET, key) if path.startswith("/") and pod.files.exists(path))
    path = given or next(mounted, None)
    if path is None:
        return job
    fact = Fact(name=path, value="present", origin=Origin.FLAG if given else Origin.FILE, field=_SECRET_FILE)
    return replace(job, secret_file=path, facts=(*job.facts, fact))


def _namespace() -> str | None:
    try:
        return _NAMESPACE.read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None
