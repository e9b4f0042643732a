"""What is read before a plan is made: the live pod or a snapshot, its job, its command, and this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainer_launch.contracts import read_job
from trainer_launch.contracts.source import MAX_FILE_BYTES, Pod
from trainer_launch.host import network
from trainer_launch.host.files import LiveFiles
from trainer_launch.host.machine import probe
from trainer_launch.model import Host, Job, Origin, PortRange, value_parsers
from trainer_launch.model.errors import UsageError
from trainer_launch.model.frozen import dataclass
from trainer_launch.model.settings import Settings, job_options
from trainer_launch.planning import programs
from trainer_launch.planning.command import Command, grace_of
from trainer_launch.planning.flag_overrides import overlay, with_hosts, with_minimum, with_spares
from trainer_launch.planning.wrappers import see_through

_PATIENCE_S = 30.0  # for a lost node, where --min-nodes lets a fixed job go on without it
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A pod, read once: its job, its command if it has one, and this machine."""

    pod: Pod
    command: Command | None
    job: Job
    host: Host
    python_is_ours: bool  # whether the interpreter typed in the command is the launcher's
    loopback_port: int  # a free one, where a single node's agent meets its launcher


def read(pod: Pod, settings: Settings) -> Reading:
    """Read the pod, and look at this machine.

    Raises:
        LaunchError: the command or the contract does not fit.
    """
    path, seen = pod.env.get("PATH"), see_through(pod.command)
    pod = replace(pod, command=seen.command, env={**pod.env, **seen.env})
    command = programs.recognise(pod.command, path) if pod.command else None
    job = _job(pod, settings, command)
    python = command.python if command is not None else ()
    return Reading(
        pod=pod,
        command=command,
        job=job,
        host=probe(pod.env),
        python_is_ours=bool(python) and programs.is_our_python(python[0], path),
        loopback_port=network.free_port(ports_of(settings)),
    )


def _job(pod: Pod, settings: Settings, command: Command | None) -> Job:
    """The job as the platform told it, under torchrun's typed options, under our own flags."""
    if settings.ssh_dir is not None:
        pod = replace(pod, env={**pod.env, "TRAINER_LAUNCH_SSH_DIR": settings.ssh_dir})
    told = job = read_job(pod, settings.contract)
    if command is not None and command.torchrun is not None:
        job = overlay(job, command.torchrun.options, Origin.COMMAND)
    job = overlay(with_hosts(job, settings.hosts), job_options(settings), Origin.FLAG)
    job = with_minimum(with_spares(job, settings.spares, told.nodes), settings.min_nodes)
    _, warning = grace(settings, command, pod)
    return replace(job, warnings=(*job.warnings, warning)) if warning and not settings.exec else job


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
