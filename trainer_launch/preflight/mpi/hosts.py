"""The preflight of an MPI launcher: waits for the hosts, asks each of them, and makes findings of what they say."""

from __future__ import annotations

import os
import secrets
import selectors
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from trainer_launch.host import deadline_subprocess, network
from trainer_launch.host.network import route_to
from trainer_launch.model import Job, Member, PortRange
from trainer_launch.model.errors import LaunchError, UsageError
from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.mpi import host_readiness
from trainer_launch.mpi.host_readiness import Crew, Probes
from trainer_launch.mpi.mpirun_command import INTEL, OPEN_MPI, Dialect, recognised
from trainer_launch.mpi.ssh_client import Client, prepared
from trainer_launch.preflight.mpi import host_queries, verdicts
from trainer_launch.preflight.mpi.host_script import Question, read, version_in
from trainer_launch.preflight.mpi.ssh_refusals import Refusal, Stage, refusal

_ASK_S = 20.0  # for all that a host is asked, with three addresses to call back at 3 s each
_VERSION_S = 20.0
_THREADS = 16
_NEW_OPEN_MPI = 5
_STAGES = {
    host_readiness.Stage.DNS: Stage.DNS,
    host_readiness.Stage.PORT: Stage.PORT,
    host_readiness.Stage.BANNER: Stage.BANNER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is looked at."""

    job: Job
    members: Sequence[Member]
    env: Mapping[str, str]
    folder: str  # private and new, for the key's copy
    mpirun: str | None = "mpirun"  # as typed; None: ranks are started without MPI
    has_command: bool = True  # that is to be run; without one nobody knows which mpirun it will use
    number: int | None = None  # of ranks, as typed
    port: int | None = None  # of the hosts' sshd
    check_host_keys: bool = True
    ports: PortRange | None = None  # what may be listened on here
    deadline_s: float = 0.0  # for hosts to come


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """All that was found out; `let_in` may be asked more."""

    findings: tuple[Finding, ...]
    client: Client | None = None
    let_in: tuple[str, ...] = ()
    dialect: Dialect | None = None
    heard: Mapping[str, str] = field(default_factory=dict)


def look(subject: Subject) -> Seen:
    """Look at all hosts, to the end of the deadline at most if some are not there."""
    try:
        client = prepared(
            subject.job,
            subject.folder,
            port=subject.port,
            check_host_keys=subject.check_host_keys,
            path=subject.env.get("PATH"),
        )
    except LaunchError as problem:
        return Seen(findings=(_no_client(problem),))
    hosts = [member.host for member in subject.members]
    stuck = _wait(hosts, client.port, subject.deadline_s)
    there = [host for host in hosts if host not in stuck]
    dialect, own = _own(subject)
    token = secrets.token_hex(12)
    ear = host_queries.Ear(token, subject.ports)
    try:
        question = Question(
            token=token,
            mpirun=subject.mpirun or "-",
            daemons=own.daemons,
            addresses=host_queries.ways_back(there, _source_to),
            port=ear.port,
        )
        told = host_queries.everywhere(there, _way(client, question), subject.env, _ASK_S)
    finally:
        ear.close()
    answers = {host: read(token, one.out) for host, one in told.items()}
    refusals = {host: refusal(one.code, one.err, answers[host]) for host, one in told.items()}
    good = {host: answers[host] for host in there if refusals[host] is None}
    findings = (
        *verdicts.reached(
            {host: stuck.get(host) or refusals.get(host) for host in hosts}, check_host_keys=client.checks_host_keys
        ),
        *verdicts.noisy({host: answer for host, answer in answers.items() if answer.began}),
        *(verdicts.alike(own, good) if subject.mpirun else ()),
        *verdicts.room(subject.members, subject.number, good),
        *verdicts.called_back(good, [*ear.heard, *(host for host in good if network.is_here(host))]),
    )
    return Seen(findings=findings, client=client, let_in=tuple(good), dialect=dialect, heard=dict(ear.heard))


def _no_client(problem: LaunchError) -> Finding:
    text, _, action = str(problem).partition("; ")
    return Finding(
        check=verdicts.SSH,
        status=Status.FAIL,
        fault=Fault.JOB if isinstance(problem, UsageError) else Fault.NODE,
        text=text,
        action=action or "mount the job's Secret, or set --ssh-dir",
    )


def _way(client: Client, question: Question) -> Callable[[str], tuple[str, ...]]:
    """How the script is run on a host: here it needs no ssh."""

    def argv(host: str) -> tuple[str, ...]:
        command = question.command(host)
        return ("/bin/sh", "-c", command) if network.is_here(host) else client.argv(host, command)

    return argv


def _source_to(host: str) -> str:
    """Which of our addresses a host sees."""
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    return route_to(str(found[0][4][0])).source


# -- waiting ----------------------------------------------------------------------------------


def _wait(hosts: Sequence[str], port: int, deadline_s: float) -> dict[str, Refusal]:
    """Wait until every host has shown its banner; who has not at the deadline, and where each is stuck."""
    until_s = time.monotonic() + max(deadline_s, 5.0)
    crew = Crew(_THREADS)
    with selectors.DefaultSelector() as selector:
        selector.register(crew.fd, selectors.EVENT_READ, crew.settle)
        probes = Probes(selector, crew, port, lambda host: None)
        probes.watch(hosts)
        while time.monotonic() < until_s and len(host_readiness.ready(probes.sights)) < len(hosts):
            due_s = until_s if probes.due_s is None else min(until_s, probes.due_s)
            for key, _ in selector.select(max(0.0, due_s - time.monotonic())):
                key.data()
            probes.tick(time.monotonic())
        probes.rest()
        return {
            host: Refusal(_STAGES.get(sight.stage, Stage.KEY), sight.why)
            for host, sight in probes.sights.items()
            if sight.stage is not host_readiness.Stage.READY
        }


# -- the launcher itself ----------------------------------------------------------------------


def _own(subject: Subject) -> tuple[Dialect | None, verdicts.Own]:
    """The launcher's mpirun, and what it starts on other hosts."""
    path = subject.env.get("PATH")
    found = shutil.which(subject.mpirun, path=path) if subject.mpirun else None
    if found is None or subject.mpirun is None:
        nothing = verdicts.Own(mpirun=subject.mpirun or "", version=None, daemons=(), daemon=None)
        return None, replace(nothing, is_here=False, is_needed=subject.has_command)
    said = deadline_subprocess.run((found, "--version"), subject.env, _VERSION_S)
    dialect = recognised(said.out + said.err)
    daemons = _daemons(dialect)
    if "/" in subject.mpirun:  # it starts what lies beside itself
        daemons = tuple(str(PurePosixPath(subject.mpirun).parent / name) for name in daemons)
    here = next((one for name in daemons if (one := shutil.which(name, path=path))), None)
    line = next((text for text in said.out.splitlines() if version_in(text) != text[:200]), "")
    return dialect, verdicts.Own(
        mpirun=found,
        version=version_in(line),
        daemons=daemons,
        daemon=None if here is None else os.path.realpath(here),
    )


def _daemons(dialect: Dialect | None) -> tuple[str, ...]:
    if dialect is None:
        return ()
    if dialect.name == OPEN_MPI:
        return ("prted",) if dialect.major >= _NEW_OPEN_MPI else ("orted",)
    return ("hydra_bstrap_proxy", "hydra_pmi_proxy") if dialect.name == INTEL else ("hydra_pmi_proxy",)
