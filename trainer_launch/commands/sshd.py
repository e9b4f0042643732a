"""`sshd`, an MPI worker: the job's key, sshd under supervision, its sessions' environment, nothing left behind.

Its log leaves out connections that end before an SSH banner, as readiness probes do; `--log-level debug` shows all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil

from msgspec.structs import replace

from trainer_launch.commands.options import Parsed
from trainer_launch.host import logs, runtime_directory, shm
from trainer_launch.host.files import at_start
from trainer_launch.host.runtime_directory import private_folder
from trainer_launch.model import Job
from trainer_launch.model.errors import UsageError
from trainer_launch.model.settings import Settings
from trainer_launch.model.units import listed
from trainer_launch.mpi import ssh_client
from trainer_launch.mpi import ssh_server as server
from trainer_launch.mpi.rank_environment import Handed, handed_on
from trainer_launch.observability.incident_watch import Incidents
from trainer_launch.observability.observer import conclude, observed
from trainer_launch.planning import engines, shared_memory
from trainer_launch.planning.command import parse_command
from trainer_launch.planning.mpi import SSHD, forwarded
from trainer_launch.planning.reading import Reading, live_pod, read
from trainer_launch.planning.task import Task, sparing
from trainer_launch.supervisor import inherited, outcome
from trainer_launch.supervisor.output import Output
from trainer_launch.supervisor.processes import Processes
from trainer_launch.supervisor.run_loop import ProgramLoop
from trainer_launch.supervisor.system import System

# Not ERROR: it has a line for each probe of the port that does not go on to log in.
_LEVELS = {"debug": "VERBOSE", "info": "INFO", "warning": "FATAL", "error": "FATAL"}
# Lines of connections that leave before an SSH banner; from OpenSSH 9.8 on there is only the second kind. With
# "[preauth]" or a user's name the client has gone further: those lines stay.
_PROBE = re.compile(
    rb"^(?:kex_exchange_identification: (?:read: )?Connection (?:closed by remote host|reset by peer)|"
    rb"Connection (?:closed|reset) by \S+ port \d+)[^\S\n]*\n",
    re.MULTILINE,
)
_LINE_BYTES = 4096
COMMAND = parse_command(("sshd", "-D", "-e"))  # until it is known where it is
_NAMED = 12  # in a line of the log
_log = logging.getLogger(__name__)


def main(parsed: Parsed) -> int:
    """The command; returns the pod's exit code.

    Raises:
        LaunchError: sshd could not be started.
    """
    if parsed.argv:
        raise UsageError(f"sshd takes no command, found {parsed.argv[0]!r}; the launcher's mpirun provides it")
    settings = parsed.settings
    reading = at_start("to read this pod", read, live_pod(()), settings)
    scratch = at_start("to make a temporary folder", private_folder)
    try:
        env = inherited.with_user(reading.pod.env, f"{scratch}/{runtime_directory.HOME}")
        reading = replace(reading, pod=replace(reading.pod, env=env))
        with shm.kept_clean() as sweep:
            task = _task(reading, parsed, scratch)
            plan = SSHD.plan(task, "this is an MPI worker")
            system = System(Output(sieve=None if settings.log_level == "debug" else ProbeFilter()))
            logs.send_through(system.say)
            with contextlib.closing(system), observed(task, plan, settings, system) as observer:
                processes, watch = Processes(plan, system, observer), server.Sessions(os.getpid(), system.now())
                incidents = Incidents(task, processes)
                incidents.hear_requests()
                ended = incidents.concluded(ProgramLoop(processes, watch).run())
                sweep()
                ended = conclude(ended, task, settings, observer)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return outcome.exit_code(ended)


def _task(reading: Reading, parsed: Parsed, scratch: str) -> Task:
    """Make everything ready; what is to run is sshd's own command line."""
    settings, job = parsed.settings, reading.job
    if settings.ssh_dir is not None and job.ssh_dir is None:  # no controller names the key's folder to a container
        job = replace(job, ssh_dir=settings.ssh_dir)
    memory = shared_memory.enlarged(replace(reading, job=job), settings)
    reach = ssh_client.prepared(
        job,
        f"{scratch}/{runtime_directory.SSH}",
        port=settings.ssh_port,
        check_host_keys=not settings.insecure_host_keys,
        path=reading.pod.env.get("PATH"),
    )
    reading = replace(reading, job=job, command=COMMAND)
    task = engines.task_of(reading, settings, scratch=scratch, shm_is_short=memory.is_short)
    handed = handed_on(sparing(task, dict(task.env)), forwarded(settings.forward_env))
    addresses = task.env.get(runtime_directory.LISTEN_AT, "").replace(",", " ").split()
    ready = server.prepared(reach, handed, addresses=addresses, log_level=_LEVELS[settings.log_level])
    _tell(job, settings, reach.port, replace(handed, unfit=(*handed.unfit, *ready.unfit)))
    return replace(task, command=parse_command(ready.argv))


def _tell(job: Job, settings: Settings, port: int, handed: Handed) -> None:
    for warning in job.warnings:
        _log.warning("%s", warning)
    _log.info("contract=%s engine=%s port=%d variables=%d", job.contract, SSHD.name, port, len(handed.env))
    if handed.secrets:
        _log.info(
            "not forwarded to ranks, because they look like secrets: %s (--forward-env)",
            listed(handed.secrets, _NAMED),
        )
    if handed.unfit:
        _log.warning("not forwarded to ranks, because sshd cannot pass them on: %s", listed(handed.unfit, _NAMED))
    if settings.insecure_host_keys:
        _log.warning("%s", ssh_client.INSECURE)


class ProbeFilter:
    """Takes the lines of readiness probes out of sshd's log."""

    def __init__(self) -> None:
        self._rest = b""  # the beginning of a line

    def __call__(self, data: bytes) -> bytes:
        """Return what to show of sshd's output; an unfinished line waits for its end."""
        lines, newline, rest = (self._rest + data).rpartition(b"\n")
        is_last = not data or len(rest) > _LINE_BYTES  # no end will come, or it is no line of sshd's
        self._rest = b"" if is_last else rest
        return _PROBE.sub(b"", lines + newline + (rest if is_last else b""))
