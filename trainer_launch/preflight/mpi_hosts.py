"""The preflight of an MPI launcher: one question to each host over ssh, and what the answers come to."""

from __future__ import annotations

import re
import secrets
import selectors
import shlex
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.host.deadline_subprocess import Ended, run
from trainer_launch.host.network import is_here
from trainer_launch.host.runtime_directory import private_folder
from trainer_launch.model.errors import LaunchError, UsageError
from trainer_launch.model.findings import Basis, Fault, Finding, Scope
from trainer_launch.model.settings import Settings
from trainer_launch.model.units import all_of, grouped, listed
from trainer_launch.mpi import remote_hosts
from trainer_launch.mpi.mpirun_command import recognised
from trainer_launch.mpi.remote_hosts import Probes, Threads
from trainer_launch.mpi.ssh_client import SshClient, prepared
from trainer_launch.planning import mpi_options
from trainer_launch.planning.command import Command
from trainer_launch.planning.mpi import KUBEXEC
from trainer_launch.planning.mpi_options import Typed, is_horovodrun
from trainer_launch.preflight.check import Check, Subject, Where, at_once, check

MPIRUN, _END = "mpirun", "end"  # facts of a host
MPI_HOSTS, MPI_SSH = "mpi-hosts", "mpi-ssh"  # checks
AT_ONCE = 64  # sessions under way; PRRTE has 128
_ASK_S = 20.0
_THREADS = 64
_SHOWN = 200
_MAX_LINES = 200
_SSH_FAILED = 255
_VERSION = re.compile(r"\d+(?:\.\d+)+\S{0,20}")

# $1 mpirun.
_SCRIPT = r"""
say() { printf '%s %s\n' "$T" "$*"; }
command -v "$1" >/dev/null 2>&1 &&
  say mpirun "$("$1" --version 2>&1 </dev/null | grep -m 1 -i -e version -e mpi -e prrte)"
say end here
"""

Facts: TypeAlias = Mapping[str, str]  # what a host has answered, as far as it is known


def script_command(token: str, mpirun: str) -> str:
    """The command line for the host's shell."""
    return f"exec env T={shlex.quote(token)} sh -c {shlex.quote(_SCRIPT)} sh {shlex.quote(mpirun)}"


def read(token: str, text: str) -> Facts:
    """The answer in a session's standard output, in which a login shell may print, too."""
    facts: dict[str, str] = {}
    for line in text.splitlines()[:_MAX_LINES]:
        first, _, rest = line.partition(" ")
        name, _, value = rest.partition(" ")
        if first == token and value.strip():
            facts.setdefault(name, version_in(value.strip()) if name == MPIRUN else value.strip())
    return facts


def version_in(text: str) -> str:
    """The version in a program's own words; the words themselves where there is none."""
    match = _VERSION.search(text)
    return match[0].rstrip(",)") if match else text[:_SHOWN]


class SshStage(Struct, frozen=True):
    """A stage that a host has to pass, and the finding about hosts that do not."""

    name: str
    check: str  # its name
    fault: Fault
    text: str
    action: str
    words: str = ""  # a pattern: what ssh prints then


STAGES = (
    SshStage(
        "DNS", MPI_HOSTS, Fault.NODE, "no address found for",
        "check that the pod and the job's headless Service exist",
    ),
    SshStage(
        "port", MPI_HOSTS, Fault.NODE, "cannot connect to sshd of",
        "check that its sshd runs, its port, and NetworkPolicies",
    ),
    SshStage(
        "banner", MPI_HOSTS, Fault.NODE, "no sshd answers on",
        "read that pod's log; check that the port is sshd's",
    ),
    SshStage(
        "host key", MPI_SSH, Fault.JOB, "another host key than the job's is shown by",
        "run trainer-launch sshd there, which shows the job's key; a host without it may be an impostor",
        "[Hh]ost key|HOST IDENTIFICATION",
    ),
    SshStage(
        "key", MPI_SSH, Fault.JOB, "the job's key is refused by",
        "mount the same Secret in all pods; check mode and owner of authorized_keys",
        "Permission denied|Too many authentication failures|UNPROTECTED PRIVATE|no matching (?:key|cipher|MAC)",
    ),
    SshStage(
        "shell", MPI_SSH, Fault.JOB, "no command runs on",
        "check the login shell and its start-up files (.bashrc, .profile)",
    ),
)  # fmt: skip
DNS, PORT, BANNER, HOST_KEY, KEY, SHELL = STAGES


class Refusal(Struct, frozen=True):
    """Where a host is stuck, and why it did not run what ssh was asked for."""

    stage: SshStage
    why: str


def refusal(code: int | None, err: str, facts: Facts) -> Refusal | None:
    """Why a host did not run the script to its end; None: it did. `code` None: it was given up for its time."""
    if _END in facts:
        return None
    lines = [line.strip("@ \t\r") for line in err.splitlines() if line.strip("@ \t\r")]
    last = lines[-1][:_SHOWN] if lines else ""
    if code == _SSH_FAILED:
        for stage in (KEY, HOST_KEY):  # who came far was not stuck before
            if line := next((line for line in lines if re.search(stage.words, line)), None):
                return Refusal(stage, line[:_SHOWN])
        return Refusal(BANNER, last or "it said nothing")
    if code is None:
        return Refusal(SHELL, "no answer in time")
    return Refusal(SHELL, f"its login shell or the test command ends with code {code}{f'; {last}' if last else ''}")


class LaunchersMpi(Struct, frozen=True):
    """The mpirun of the launcher, with which the hosts are compared."""

    mpirun: str  # as typed; "": ranks are started without MPI
    version: str = ""  # empty: no mpirun that we know
    is_here: bool = True
    is_needed: bool = True  # by a command that is known


class HostAnswers(Struct, frozen=True, kw_only=True):
    """The answers of the hosts, or why there are none."""

    trouble: LaunchError | None = None  # no host was asked
    client: SshClient | None = None
    refusals: Mapping[str, Refusal | None] = field(default_factory=dict)
    answers: Mapping[str, Facts] = field(default_factory=dict)
    own: LaunchersMpi | None = None


def asked(subject: Subject, settings: Settings, typed: Typed, folder: str, wait_s: float) -> HostAnswers:
    """Look at all hosts, for `wait_s` at most if some are not there; `folder` is private and new."""
    env = subject.env
    try:
        client = prepared(
            subject.job,
            f"{folder}/ssh",
            port=settings.ssh_port,
            check_host_keys=not settings.insecure_host_keys,
            path=env.get("PATH"),
        )
    except LaunchError as problem:
        return HostAnswers(trouble=problem)
    hosts = [member.host for member in subject.job.members or ()]
    stuck = _wait(hosts, client.port, wait_s)
    own = _own(subject, typed)
    token = secrets.token_hex(12)
    command = script_command(token, own.mpirun or "-")

    def ask(host: str) -> Ended:
        # mpirun starts ranks on its own host without ssh.
        argv = ("/bin/sh", "-c", command) if is_here(host) else client.argv(host, command)
        return run(argv, env, _ASK_S)

    ended = at_once([host for host in hosts if host not in stuck], ask, AT_ONCE)
    answers = {host: read(token, session.out) for host, session in ended.items()}
    refusals = {host: refusal(session.code, session.err, answers[host]) for host, session in ended.items()}
    refusals = {host: stuck.get(host) or refusals.get(host) for host in hosts}
    return HostAnswers(client=client, refusals=refusals, answers=answers, own=own)


def _wait(hosts: Sequence[str], port: int, wait_s: float) -> dict[str, Refusal]:
    """Wait until every host has shown its banner; the hosts that have not in time, and where each is stuck."""
    until_s = time.monotonic() + max(wait_s, 5.0)
    threads = Threads(_THREADS)
    with selectors.DefaultSelector() as selector:
        selector.register(threads.fd, selectors.EVENT_READ, threads.settle)
        probes = Probes(threads, port, lambda host: None)
        probes.watch(hosts)
        while time.monotonic() < until_s and len(remote_hosts.ready(probes.readiness)) < len(hosts):
            due_s = until_s if probes.due_s is None else min(until_s, probes.due_s)
            for key, _ in selector.select(max(0.0, due_s - time.monotonic())):
                key.data()
            probes.tick(time.monotonic())
        probes.rest()
        return {
            host: Refusal(STAGES[reached.stage], reached.why)
            for host, reached in probes.readiness.items()
            if reached.stage is not remote_hosts.HostStage.READY
        }


def _own(subject: Subject, typed: Typed) -> LaunchersMpi:
    """The launcher's version of MPI."""
    env, mpirun = subject.env, typed.mpirun
    path = shutil.which(mpirun, path=env.get("PATH")) if mpirun else None
    if path is None:
        return LaunchersMpi(mpirun, is_here=False, is_needed=subject.command is not None)
    ended = run((path, "--version"), env, _ASK_S)
    match = next(filter(None, map(_VERSION.search, ended.out.splitlines())), None)
    is_mpi = recognised(ended.out + ended.err) is not None
    return LaunchersMpi(mpirun, version_in(match[0]) if match and is_mpi else "")


def concerns(subject: Subject) -> bool:
    """Whether this is a pod that runs mpirun."""
    return subject.job.engine == "mpirun" and subject.job.role == "launcher"


def named(subject: Subject) -> str:
    """The first few of the hosts."""
    return listed([member.host for member in subject.job.members or ()])


def findings(
    subject: Subject, settings: Settings, checks: Collection[Check[HostAnswers]], left_s: float
) -> tuple[Finding, ...]:
    """The findings of these checks; `left_s` is how long hosts have to come."""
    why = _obstacle(subject, settings)
    if why is not None:
        return (mpi_hosts.skipped(why),)
    folder = private_folder()
    try:
        hosts = asked(subject, settings, _typed(subject.command), folder, left_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wanted = {check.id for check in checks}
    runs = dict.fromkeys(check.run for check in checks)
    return tuple(finding for run in runs for finding in run(hosts) if finding.check in wanted)


def _obstacle(subject: Subject, settings: Settings) -> str | None:
    if settings.level == "container":
        return "--level container checks this container only"
    if subject.job.mpi is not None and subject.job.mpi.launch_agent == KUBEXEC:
        return "the hosts are reached with kubectl exec, not ssh; `run` waits for them"
    return None if subject.job.members else "no hosts are listed yet"


def _typed(command: Command | None) -> Typed:
    """The mpirun of the command, or the one that `run` puts before it; none for Horovod, which has gloo."""
    if command is not None and is_horovodrun(command.argv):
        words = mpi_options.parse(command.argv)
        if "mpi" not in words.names:
            return Typed(mpirun="", number=words.number, program=words.program)
    if command is not None and mpi_options.is_mpirun(command.argv[0]):
        return mpi_options.parse(command.argv)
    return Typed(mpirun="mpirun", program=command.argv if command is not None else ())


@check(MPI_HOSTS, Where.MPI)
def mpi_hosts(hosts: HostAnswers) -> Iterator[Finding]:
    """Every host has an address and accepts connections, and its sshd answers."""
    if hosts.trouble is not None:
        text, _, action = str(hosts.trouble).partition("; ")
        fault = Fault.JOB if isinstance(hosts.trouble, UsageError) else Fault.NODE
        yield mpi_ssh.failed(fault, text, action=action or "mount the job's Secret, or set --ssh-dir")
    elif hosts.client is not None:
        yield from reached(hosts.refusals, check_host_keys=hosts.client.checks_host_keys)


mpi_ssh = replace(
    mpi_hosts,
    id=MPI_SSH,
    title="Every host accepts the job's key, shows it as its host key, and runs a command in its login shell.",
)


@check("mpi-programs", Where.MPI)
def mpi_programs(hosts: HostAnswers) -> Iterator[Finding]:
    """Every host has the launcher's version of MPI."""
    if hosts.own is not None:
        ran = {host: facts for host, facts in hosts.answers.items() if hosts.refusals[host] is None}
        yield from alike(hosts.own, ran)


def reached(refusals: Mapping[str, Refusal | None], *, check_host_keys: bool = True) -> Iterator[Finding]:
    """Findings about connections and keys of hosts: one for each stage and reason where hosts are stuck."""
    stuck = grouped((refusal, host) for host, refusal in refusals.items() if refusal is not None)
    at = {refusal.stage.check for refusal in stuck}
    if mpi_hosts.id not in at:
        yield mpi_hosts.passed(f"name, port and sshd answer on {all_of(len(refusals), 'host')}", scope=Scope.JOB)
    for refusal, hosts in sorted(stuck.items(), key=lambda group: STAGES.index(group[0].stage)):
        stage, who = refusal.stage, listed(hosts)
        more = {"subject": who, "measured": stage.name, "action": stage.action}
        stuck_at = mpi_hosts if stage.check == mpi_hosts.id else mpi_ssh
        yield stuck_at.failed(stage.fault, f"{stage.text} {who}: {refusal.why}", **more)
    n_let_in = sum(refusal is None for refusal in refusals.values())
    if n_let_in and mpi_ssh.id not in at:
        is_all = n_let_in == len(refusals)
        who = all_of(n_let_in, "host") if is_all else f"{n_let_in} of {len(refusals)} hosts"
        shown = "host keys are not checked (--insecure-host-keys)"
        shown = "present it as their host key" if check_host_keys else shown
        yield mpi_ssh.passed(f"{who} accept the job's key, and {shown}", scope=Scope.JOB)


def alike(own: LaunchersMpi, answers: Mapping[str, Facts]) -> Iterator[Finding]:
    """Whether every host has the launcher's version of mpirun; gloo needs none."""
    if not own.mpirun:
        return
    if not own.is_here:
        text = f"{own.mpirun} is not in the launcher's PATH, so nothing can be started on the hosts"
        action = "install MPI in the launcher's image, or type the path of its mpirun before the program"
        more = {"action": action}
        yield mpi_programs.failed(Fault.JOB, text, **more) if own.is_needed else mpi_programs.unknown(text, **more)
        return
    if not own.version:
        text = f"{own.mpirun} --version names no known MPI, so the hosts' programs cannot be compared"
        yield mpi_programs.unknown(text)
        return
    # A host that does not tell its version is not compared.
    versions = grouped((facts[MPIRUN], host) for host, facts in answers.items() if MPIRUN in facts)
    others = {version: hosts for version, hosts in versions.items() if version != own.version}
    for version, hosts in others.items():
        yield mpi_programs.failed(
            Fault.JOB,
            f"mpirun is {version} on {listed(hosts)}, and {own.version} on the launcher",
            subject=listed(hosts),
            measured=version,
            expected=own.version,
            basis=Basis.PEER,
            action="start launcher and workers from the same image, by digest",
        )
    if answers and not versions:
        yield mpi_programs.unknown("no host tells its version of MPI")
    elif versions and not others:
        n_alike = len(versions[own.version])
        who = all_of(n_alike, "host") if n_alike == len(answers) else f"{n_alike} of {len(answers)} hosts"
        yield mpi_programs.passed(f"mpirun is {own.version} on the launcher and {who}", scope=Scope.JOB)
