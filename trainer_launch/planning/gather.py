"""What `run` and `explain` share: from the live pod or a snapshot to a request that an engine can plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainer_launch.contracts import read_job
from trainer_launch.contracts.source import MAX_FILE_BYTES, Pod
from trainer_launch.host import network
from trainer_launch.host.files import LiveFiles
from trainer_launch.host.machine import probe
from trainer_launch.model import Host, Job, Origin, PortRange, Topology, signal_policy, value_parsers
from trainer_launch.model.errors import UsageError
from trainer_launch.model.frozen import dataclass
from trainer_launch.model.settings import PREFIX, Settings, job_options
from trainer_launch.model.signal_policy import StopOrder
from trainer_launch.planning import programs
from trainer_launch.planning.command import Command, grace_of, parse_command
from trainer_launch.planning.engines.request import Request
from trainer_launch.planning.flag_overrides import overlay, with_hosts, with_minimum
from trainer_launch.planning.ssh_environment import named

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


def read(pod: Pod, settings: Settings) -> Reading:
    """Read the pod, and look at this machine.

    Raises:
        LaunchError: the command or the contract does not fit.
    """
    command = programs.recognise(pod.command, pod.env.get("PATH")) if pod.command else None
    job = _job(pod, settings, command)
    return Reading(pod=pod, command=command, job=job, host=probe(pod.env))


def _job(pod: Pod, settings: Settings, command: Command | None) -> Job:
    """The job as the platform told it, under torchrun's typed options, under our own flags."""
    if settings.ssh_dir is not None:
        pod = replace(pod, env={**pod.env, "TRAINER_LAUNCH_SSH_DIR": settings.ssh_dir})
    job = read_job(pod, settings.contract)
    if command is not None and command.torchrun is not None:
        job = overlay(job, command.torchrun.options, Origin.COMMAND)
    job = overlay(with_hosts(job, settings.hosts), job_options(settings), Origin.FLAG)
    job = with_minimum(job, settings.min_nodes)
    _, warning = _grace(settings, command, pod)
    return replace(job, warnings=(*job.warnings, warning)) if warning and not settings.exec else job


def _grace(settings: Settings, command: Command | None, pod: Pod) -> tuple[float, str | None]:
    return grace_of(settings.grace, command, pod.env, is_given="grace" in settings.model_fields_set)


def request_of(
    reading: Reading, topology: Topology, settings: Settings, *, replace_launcher: bool = False, scratch: str
) -> Request:
    """Everything an engine needs for its plan.

    Raises:
        UsageError: there is no command.
    """
    pod = reading.pod
    if reading.command is None and reading.job.engine == "sshd":
        raise UsageError("missing command; this pod is an MPI worker, whose command is: trainer-launch sshd")
    command = reading.command or parse_command(pod.command)
    path = pod.env.get("PATH")
    ports = ports_of(settings)
    return Request(
        job=reading.job,
        host=reading.host,
        topology=topology,
        command=command,
        env=_with_log_level(pod.env, settings),
        python=sys.executable,
        python_is_ours=bool(command.python) and programs.is_our_python(command.python[0], path),
        engine=settings.engine,
        grace_s=_grace(settings, command, pod)[0],
        stop_order=StopOrder(settings.stop_order),
        signals=signal_policy.parse(settings.signals or ""),
        wait_s=settings.wait_timeout,
        rejoin_timeout_s=settings.rejoin_timeout,
        our_rendezvous=settings.rendezvous == "trainer-launch" and not replace_launcher,
        loopback_port=network.free_port(ports),
        shrink_after_s=_patience(settings),
        restart_window_s=settings.restart_window,
        hosts=settings.hosts,
        discovery=settings.host_discovery_script,
        forward_env=tuple(sorted(named(settings.forward_env))),
        ssh_port=settings.ssh_port,
        check_host_keys=not settings.insecure_host_keys,
        port_range=ports,
        secret_file=settings.secret_file,
        start_method=settings.start_method,
        preload=_names(settings.preload),
        prefix=settings.prefix,
        watches_output=settings.hang_timeout is not None,
        scratch=scratch,
        replace_launcher=replace_launcher,
    )


def _with_log_level(env: Mapping[str, str], settings: Settings) -> Mapping[str, str]:
    """The agents of torch and MPI read their level there."""
    given = "log_level" in settings.model_fields_set
    return {**env, f"{PREFIX}LOG_LEVEL": settings.log_level} if given else env


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


def _patience(settings: Settings) -> float:
    """A platform that allows fewer nodes means it; who lowers a fixed number still wants the lost node back."""
    if settings.shrink_after is not None:
        return settings.shrink_after
    return 0.0 if settings.min_nodes is None else _PATIENCE_S


def _namespace() -> str | None:
    try:
        return _NAMESPACE.read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


def _names(words: str | None) -> tuple[str, ...]:
    """A list of modules.

    Raises:
        UsageError: one of them is no module's name.
    """
    names = tuple(name.strip() for name in (words or "").split(",") if name.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(
                f"invalid value {name!r} for --preload: expected Python modules, such as numpy,my_package.data"
            )
    return names
