"""What `preflight` does in an MPI job's launcher: look at all hosts, and let MPI itself go round once."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from trainer_launch.host import deadline_subprocess, network
from trainer_launch.host.runtime_directory import private_folder
from trainer_launch.model import Member, hostfile
from trainer_launch.model.findings import Finding, Scope, Status
from trainer_launch.model.settings import Settings
from trainer_launch.model.units import listed
from trainer_launch.mpi import mpirun_command
from trainer_launch.mpi.mpirun_command import Dialect
from trainer_launch.mpi.ssh_client import Client
from trainer_launch.mpi.ssh_config import AGENT
from trainer_launch.planning import typed_mpirun
from trainer_launch.planning.command import Command
from trainer_launch.planning.gather import ports_of
from trainer_launch.planning.horovodrun_options import is_horovodrun, split_command
from trainer_launch.planning.mpi_launch_spec import KUBEXEC
from trainer_launch.planning.typed_mpirun import Typed
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.cluster.pair_results import Thresholds
from trainer_launch.preflight.mpi import host_queries, ring, verdicts
from trainer_launch.preflight.mpi import hosts as looking

CHECKS = verdicts.CHECKS
_WITHOUT_RING = ("container", "quick")
_HAS_S = 20.0
_SHOWN = 5
_PYTHON = re.compile(r"python(3(\.[0-9]+)?)?")
# Of the options of mpirun those that say how ranks talk; others would change what is printed, or where ranks are.
_ABOUT_TALKING = {
    "mca": 2,
    "gmca": 2,
    "prtemca": 2,
    "pmixmca": 2,
    "genv": 2,
    "env": 2,
    "x": 1,
    "prefix": 1,
    "iface": 1,
}


def concerns(subject: Subject) -> bool:
    """Whether this is a pod that runs mpirun."""
    return subject.job.engine == "mpirun" and subject.job.role == "launcher"


def named(subject: Subject) -> str:
    """The first few of the hosts."""
    hosts = [member.host for member in subject.job.members or ()]
    return listed(hosts, _SHOWN)


def findings(
    subject: Subject, settings: Settings, thresholds: Thresholds, wanted: Collection[str], left_s: float
) -> tuple[Finding, ...]:
    """All of `wanted` checks; `left_s` is how long hosts have to come."""
    why = _obstacle(subject, settings)
    if why is not None:
        return (Finding(check=verdicts.HOSTS, status=Status.SKIPPED, text=why),)
    folder = private_folder()
    try:
        taken = _typed(subject.command)
        about = looking.Subject(
            job=subject.job,
            members=subject.job.members or (),
            env=subject.env,
            folder=f"{folder}/ssh",
            mpirun=taken.mpirun or None,
            has_command=subject.command is not None,
            number=taken.number,
            port=settings.ssh_port,
            check_host_keys=not settings.insecure_host_keys,
            ports=ports_of(settings),
            deadline_s=left_s,
        )
        seen = looking.look(about)
        found = [*seen.findings]
        if verdicts.TREE in wanted and seen.client is not None:
            found += tree_findings(seen.let_in, seen.client, about.env)
        if settings.level not in _WITHOUT_RING and verdicts.RING in wanted:
            found += _ring(about, seen, taken, thresholds, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return tuple(finding for finding in found if finding.check in wanted)


def _obstacle(subject: Subject, settings: Settings) -> str | None:
    if settings.level == "container":
        return "--level container checks this container only"
    if subject.job.details.get("launch_agent") == KUBEXEC:
        return "the hosts are reached with kubectl exec, not ssh; `run` waits for them"
    return None if subject.job.members else "no hosts are listed yet"


def _typed(command: Command | None) -> Typed:
    """The mpirun of the command, or the one that `run` puts before it; none for Horovod, which has gloo."""
    if command is not None and is_horovodrun(command.argv):
        words = split_command(command.argv[1:])
        if not words.has("mpi"):
            return Typed(mpirun="", number=words.number("num_proc"), program=words.program)
    if command is not None and typed_mpirun.is_mpirun(command.argv[0]):
        return typed_mpirun.parse(command.argv)
    return Typed(mpirun="mpirun", program=command.argv if command is not None else ())


# -- the ring ---------------------------------------------------------------------------------


def _ring(
    about: looking.Subject, seen: looking.Seen, taken: Typed, thresholds: Thresholds, folder: str
) -> Iterator[Finding]:
    client, dialect = seen.client, seen.dialect
    if client is None or dialect is None:
        unknown = f"{about.mpirun} is not a known MPI" if about.mpirun else "Horovod's ranks do not use MPI"
        why = "no host accepts the key" if client is None else unknown
        yield Finding(check=verdicts.RING, status=Status.SKIPPED, text=why)
        return

    def has(host: str, command: str) -> deadline_subprocess.Ended:
        argv = ("/bin/sh", "-c", command) if network.is_here(host) else client.argv(host, command)
        return deadline_subprocess.run(argv, about.env, _HAS_S)

    way = _way(about, taken, dialect, client.config, folder)
    yield from ring.findings(seen.let_in, _python(taken.program), way, has, thresholds)


def _way(about: looking.Subject, taken: Typed, dialect: Dialect, config: str, folder: str) -> ring.Way:
    numbers = itertools.count()  # several run at once

    def way(hosts: Sequence[str], program: Sequence[str]) -> tuple[Sequence[str], Mapping[str, str]]:
        path = f"{folder}/hosts-{next(numbers)}"
        members = [Member(host, 1) for host in hosts]
        ours = Typed(
            mpirun=taken.mpirun, kept=_about_talking(taken.kept), named=taken.named, program=tuple(program)
        )
        if dialect.is_hydra:
            Path(path).write_text(hostfile.render_hydra(members), encoding="utf-8")
            argv = mpirun_command.hydra_argv(ours, path, len(hosts), mpirun_command.but_secrets(about.env))
            return argv, mpirun_command.hydra_env(about.env, dialect.name, config)
        Path(path).write_text(hostfile.render_open_mpi(members), encoding="utf-8")
        argv = mpirun_command.openmpi_argv(
            ours, path, len(hosts), mpirun_command.allowed(about.env), is_root=os.geteuid() == 0
        )
        return argv, mpirun_command.openmpi_env(about.env, dialect.major, config)

    return way


def _about_talking(kept: Sequence[str]) -> tuple[str, ...]:
    words = list(kept)
    found: list[str] = []
    while words:
        word = words.pop(0)
        count = _ABOUT_TALKING.get(word.lstrip("-"), 0) if word.startswith("-") else 0
        if count:
            found += [word, *words[:count]]
            del words[:count]
    return tuple(found)


def _python(program: Sequence[str]) -> str:
    """The interpreter that the job's own program uses."""
    first = program[0] if program else ""
    return first if _PYTHON.fullmatch(PurePosixPath(first).name) else "python3"


# -- tree of daemons ---------------------------------------------------------------------------


RADIX = 64  # of PRRTE's tree, and of Open MPI 4's: up to so many hosts the launcher starts all daemons itself
_TRY_S = 20.0

_MAX_CHARS = 200


def edges(n_hosts: int, radix: int = RADIX) -> tuple[tuple[int, int], ...]:
    """Hosts that start others' daemons, with each of those, by index; the launcher is the root of the tree."""
    return tuple(((node - 1) // radix - 1, node - 1) for node in range(radix + 1, n_hosts + 1))


def tree_findings(
    hosts: Sequence[str], client: Client, env: Mapping[str, str], radix: int = RADIX
) -> tuple[Finding, ...]:
    """Try every edge of the tree, as many at once as mpirun would."""
    tried = edges(len(hosts), radix)
    if not tried:
        return ()

    def attempt(edge: tuple[int, int]) -> deadline_subprocess.Ended:
        parent, child = (hosts[end] for end in edge)
        # Sessions of `trainer-launch sshd` find an ssh that has the job's key and configuration.
        with_port = f"-p {client.port} -o BatchMode=yes -o ConnectTimeout=5 {child} true"
        command = f"if command -v {AGENT} >/dev/null; then {AGENT} {with_port}; else ssh {with_port}; fi"
        return deadline_subprocess.run(client.argv(parent, command), env, _TRY_S)

    with ThreadPoolExecutor(max_workers=min(host_queries.AT_ONCE, len(tried))) as pool:
        told = dict(zip(tried, pool.map(attempt, tried), strict=True))
    bad = {edge: one for edge, one in told.items() if one.code != 0}
    if not bad:
        text = f"all {len(tried)} paths between workers that a tree of daemons uses are open"
        return (Finding(check=verdicts.TREE, status=Status.PASS, scope=Scope.JOB, text=text),)
    whys = [f"{hosts[one]} - {hosts[other]}: {_why(bad[one, other])}" for one, other in list(bad)[:_SHOWN]]
    one, other = next(iter(bad))
    more = f" and {len(bad) - 1} others" if len(bad) > 1 else ""
    return (
        Finding(
            check=verdicts.TREE,
            status=Status.WARN,
            scope=Scope.LINK,
            subject=f"{hosts[one]} - {hosts[other]}{more}",
            text=f"{hosts[one]} cannot log in to {hosts[other]}{more}: {_why(bad[one, other])}",
            evidence=tuple(whys),
            action=f"let workers reach each other's sshd with the job's key: of over {radix} daemons some start "
            "the others, unless this launcher runs mpirun, which starts all by itself",
        ),
    )


def _why(told: deadline_subprocess.Ended) -> str:
    lines = [line.strip() for line in told.err.splitlines() if line.strip()]
    return lines[-1][:_MAX_CHARS] if lines else "no answer in time" if told.code is None else f"code {told.code}"
