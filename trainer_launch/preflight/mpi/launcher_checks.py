"""What `preflight` does in an MPI job's launcher: asks every host, and lets MPI itself go round once."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import selectors
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from trainer_launch.host import deadline_subprocess, network
from trainer_launch.host.network import route_to
from trainer_launch.host.runtime_directory import private_folder
from trainer_launch.model import Job, Member, PortRange, hostfile
from trainer_launch.model.errors import LaunchError, UsageError
from trainer_launch.model.findings import Fault, Finding, Scope, Status
from trainer_launch.model.settings import Settings
from trainer_launch.mpi import host_readiness, mpirun_command
from trainer_launch.mpi.host_readiness import Crew, Probes
from trainer_launch.mpi.mpirun_command import INTEL, OPEN_MPI, Dialect, recognised
from trainer_launch.mpi.ssh_client import Client, prepared
from trainer_launch.mpi.ssh_config import AGENT
from trainer_launch.planning import typed_mpirun
from trainer_launch.planning.command import Command
from trainer_launch.planning.gather import ports_of
from trainer_launch.planning.horovodrun_options import is_horovodrun, split_command
from trainer_launch.planning.mpi_launch_spec import KUBEXEC
from trainer_launch.planning.typed_mpirun import Typed
from trainer_launch.preflight.check import Check, Subject, Where, check
from trainer_launch.preflight.mpi import host_findings, host_queries, ring
from trainer_launch.preflight.mpi.host_queries import Answer, Question, Refusal, Stage, read, refusal, version_in
from trainer_launch.preflight.thresholds import Thresholds

_ASK_S = 20.0  # for all that a host is asked, with three addresses to call back at 3 s each
_VERSION_S = 20.0
_THREADS = 16
_NEW_OPEN_MPI = 5
_STAGES = {
    host_readiness.Stage.DNS: Stage.DNS,
    host_readiness.Stage.PORT: Stage.PORT,
    host_readiness.Stage.BANNER: Stage.BANNER,
}


def concerns(subject: Subject) -> bool:
    """Whether this is a pod that runs mpirun."""
    return subject.job.engine == "mpirun" and subject.job.role == "launcher"


def named(subject: Subject) -> str:
    """The first few of the hosts."""
    hosts = [member.host for member in subject.job.members or ()]
    return ", ".join(hosts[:_SHOWN]) + (f" and {len(hosts) - _SHOWN} more" if len(hosts) > _SHOWN else "")


def findings(
    subject: Subject, settings: Settings, thresholds: Thresholds, checks: Collection[Check[Hosts]], left_s: float
) -> tuple[Finding, ...]:
    """What these checks find; `left_s` is how long hosts have to come."""
    why = _obstacle(subject, settings)
    if why is not None:
        return (mpi_hosts.skipped(why),)
    folder = private_folder()
    launcher = Launcher(
        job=subject.job,
        env=subject.env,
        folder=folder,
        typed=_typed(subject.command),
        has_command=subject.command is not None,
        port=settings.ssh_port,
        check_host_keys=not settings.insecure_host_keys,
        ports=ports_of(settings),
        deadline_s=left_s,
        thresholds=thresholds,
        with_ring=settings.level not in _WITHOUT_RING,
    )
    wanted = {one.id for one in checks}
    try:
        hosts = look(launcher)
        found = [finding for run in dict.fromkeys(one.run for one in checks) for finding in run(hosts)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return tuple(finding for finding in found if finding.check in wanted)


def _obstacle(subject: Subject, settings: Settings) -> str | None:
    if settings.level == "container":
        return "--level container checks this container only"
    if subject.job.details.get("launch_agent") == KUBEXEC:
        return "the hosts are reached with kubectl exec, not ssh; `run` waits for them"
    return None if subject.job.members else "no hosts are listed yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """What is known before any host was asked."""

    job: Job
    env: Mapping[str, str]
    folder: str  # private and new
    typed: Typed  # of which nothing but the program is known where ranks are started without MPI
    has_command: bool = True  # that is to be run; without one nobody knows which mpirun it will use
    port: int | None = None  # of the hosts' sshd
    check_host_keys: bool = True
    ports: PortRange | None = None  # what may be listened on here
    deadline_s: float = 0.0  # for hosts to come
    thresholds: Thresholds = field(default_factory=Thresholds)  # of pairs
    with_ring: bool = True

    @property
    def mpirun(self) -> str | None:
        """As typed; None: ranks are started without MPI."""
        return self.typed.mpirun or None

    @property
    def members(self) -> Sequence[Member]:
        """The hosts."""
        return self.job.members or ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """All that was found out of the hosts; those that let us in may be asked more."""

    launcher: Launcher
    trouble: LaunchError | None = None  # no host was asked
    client: Client | None = None
    refusals: Mapping[str, Refusal | None] = field(default_factory=dict)
    answers: Mapping[str, Answer] = field(default_factory=dict)
    own: host_findings.Own | None = None
    dialect: Dialect | None = None
    callers: Sequence[str] = ()  # who called back

    @property
    def let_in(self) -> Mapping[str, Answer]:
        """The hosts that ran the whole script."""
        return {host: answer for host, answer in self.answers.items() if self.refusals[host] is None}


def look(launcher: Launcher) -> Hosts:
    """Look at all hosts, to the end of the deadline at most if some are not there."""
    try:
        client = prepared(
            launcher.job,
            f"{launcher.folder}/ssh",
            port=launcher.port,
            check_host_keys=launcher.check_host_keys,
            path=launcher.env.get("PATH"),
        )
    except LaunchError as problem:
        return Hosts(launcher=launcher, trouble=problem)
    hosts = [member.host for member in launcher.members]
    stuck = _wait(hosts, client.port, launcher.deadline_s)
    there = [host for host in hosts if host not in stuck]
    dialect, own = _own(launcher)
    token = secrets.token_hex(12)
    ear = host_queries.Ear(token, launcher.ports)
    try:
        question = Question(
            token=token,
            mpirun=launcher.mpirun or "-",
            daemons=own.daemons,
            addresses=host_queries.ways_back(there, _source_to),
            port=ear.port,
        )
        told = host_queries.everywhere(there, _asking(client, question), launcher.env, _ASK_S)
    finally:
        ear.close()
    answers = {host: read(token, one.out) for host, one in told.items()}
    refusals = {host: refusal(one.code, one.err, answers[host]) for host, one in told.items()}
    return Hosts(
        launcher=launcher,
        client=client,
        refusals={host: stuck.get(host) or refusals.get(host) for host in hosts},
        answers=answers,
        own=own,
        dialect=dialect,
        callers=[*ear.heard, *(host for host in there if network.is_here(host))],
    )


# -- the checks -------------------------------------------------------------------------------


@check(host_findings.HOSTS, Where.MPI)
def mpi_hosts(hosts: Hosts) -> Iterator[Finding]:
    """Every host has an address, can be connected to, and its sshd answers."""
    if hosts.trouble is not None:
        yield _no_client(hosts.trouble)
    elif hosts.client is not None:
        yield from host_findings.reached(hosts.refusals, check_host_keys=hosts.client.checks_host_keys)
        yield from host_findings.noisy({host: one for host, one in hosts.answers.items() if one.began})


mpi_ssh = replace(
    mpi_hosts,
    id=host_findings.SSH,
    title="Every host accepts the job's key and shows the job's own, and its login shell runs a command.",
)


def _no_client(problem: LaunchError) -> Finding:
    text, _, action = str(problem).partition("; ")
    fault = Fault.JOB if isinstance(problem, UsageError) else Fault.NODE
    return mpi_ssh.failed(fault, text, action=action or "mount the job's Secret, or set --ssh-dir")


@check(host_findings.PROGRAMS, Where.MPI)
def mpi_programs(hosts: Hosts) -> Iterator[Finding]:
    """Every host has what mpirun starts there, of the launcher's version and in the same place."""
    if hosts.own is not None and hosts.launcher.mpirun:
        yield from host_findings.alike(hosts.own, hosts.let_in)


@check(host_findings.SLOTS, Where.MPI)
def mpi_slots(hosts: Hosts) -> Iterator[Finding]:
    """The slots suffice for the ranks asked for, and each host for its slots."""
    if hosts.client is not None:
        yield from host_findings.room(hosts.launcher.members, hosts.launcher.typed.number, hosts.let_in)


@check(host_findings.CALLBACK, Where.MPI)
def mpi_callback(hosts: Hosts) -> Iterator[Finding]:
    """Every host can connect to the launcher, as mpirun's daemons do."""
    if hosts.client is not None:
        yield from host_findings.called_back(hosts.let_in, hosts.callers)


@check(host_findings.TREE, Where.MPI)
def mpi_tree(hosts: Hosts) -> Iterator[Finding]:
    """Hosts can log in to each other where mpirun's daemons start others: in jobs of more than 64 hosts."""
    if hosts.client is not None:
        yield from tree_findings(tuple(hosts.let_in), hosts.client, hosts.launcher.env)


@check(host_findings.RING, Where.MPI)
def mpi_ring(hosts: Hosts) -> Iterator[Finding]:
    """A hello and a ring over MPI itself come to their end, and no pair of hosts is slow."""
    if not hosts.launcher.with_ring:
        return
    launcher, client, dialect = hosts.launcher, hosts.client, hosts.dialect
    if client is None or dialect is None:
        unknown = f"{launcher.mpirun} is not a known MPI" if launcher.mpirun else "Horovod's ranks do not use MPI"
        yield mpi_ring.skipped("no host accepts the key" if client is None else unknown)
        return

    def has(host: str, command: str) -> deadline_subprocess.Ended:
        argv = ("/bin/sh", "-c", command) if network.is_here(host) else client.argv(host, command)
        return deadline_subprocess.run(argv, launcher.env, _HAS_S)

    way = _way(launcher, dialect, client.config)
    yield from ring.findings(tuple(hosts.let_in), _python(launcher.typed.program), way, has, launcher.thresholds)


def _asking(client: Client, question: Question) -> Callable[[str], tuple[str, ...]]:
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


def _own(launcher: Launcher) -> tuple[Dialect | None, host_findings.Own]:
    """The launcher's mpirun, and what it starts on other hosts."""
    path = launcher.env.get("PATH")
    found = shutil.which(launcher.mpirun, path=path) if launcher.mpirun else None
    if found is None or launcher.mpirun is None:
        nothing = host_findings.Own(mpirun=launcher.mpirun or "", version=None, daemons=(), daemon=None)
        return None, replace(nothing, is_here=False, is_needed=launcher.has_command)
    said = deadline_subprocess.run((found, "--version"), launcher.env, _VERSION_S)
    dialect = recognised(said.out + said.err)
    daemons = _daemons(dialect)
    if "/" in launcher.mpirun:  # it starts what lies beside itself
        daemons = tuple(str(PurePosixPath(launcher.mpirun).parent / name) for name in daemons)
    here = next((one for name in daemons if (one := shutil.which(name, path=path))), None)
    line = next((text for text in said.out.splitlines() if version_in(text) != text[:200]), "")
    return dialect, host_findings.Own(
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


# -- what `preflight` does in an MPI job's launcher --------------------------------------------


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


def _way(launcher: Launcher, dialect: Dialect, config: str) -> ring.Way:
    taken, numbers = launcher.typed, itertools.count()  # several run at once

    def way(hosts: Sequence[str], program: Sequence[str]) -> tuple[Sequence[str], Mapping[str, str]]:
        path = f"{launcher.folder}/hosts-{next(numbers)}"
        members = [Member(host, 1) for host in hosts]
        ours = Typed(
            mpirun=taken.mpirun, kept=_about_talking(taken.kept), named=taken.named, program=tuple(program)
        )
        if dialect.is_hydra:
            Path(path).write_text(hostfile.render_hydra(members), encoding="utf-8")
            argv = mpirun_command.hydra_argv(ours, path, len(hosts), mpirun_command.but_secrets(launcher.env))
            return argv, mpirun_command.hydra_env(launcher.env, dialect.name, config)
        Path(path).write_text(hostfile.render_open_mpi(members), encoding="utf-8")
        argv = mpirun_command.openmpi_argv(
            ours, path, len(hosts), mpirun_command.allowed(launcher.env), is_root=os.geteuid() == 0
        )
        return argv, mpirun_command.openmpi_env(launcher.env, dialect.major, config)

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
        return (Finding(check=host_findings.TREE, status=Status.PASS, scope=Scope.JOB, text=text),)
    whys = [f"{hosts[one]} - {hosts[other]}: {_why(bad[one, other])}" for one, other in list(bad)[:_SHOWN]]
    one, other = next(iter(bad))
    more = f" and {len(bad) - 1} others" if len(bad) > 1 else ""
    return (
        Finding(
            check=host_findings.TREE,
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
