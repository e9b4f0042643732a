"""The preflight of an MPI launcher: one question to each host over ssh, and what the answers come to."""

from __future__ import annotations

import re
import secrets
import selectors
import shlex
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

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
from trainer_launch.mpi.ssh_client import prepared
from trainer_launch.planning import mpi_options
from trainer_launch.planning.command import Command
from trainer_launch.planning.mpi import KUBEXEC
from trainer_launch.planning.mpi_options import Typed, is_horovodrun
from trainer_launch.preflight.check import Check, Subject, Where, at_once, check

AT_ONCE = 64  # sessions under way; PRRTE has 128
_ASK_S = 20.0
_THREADS = 64
_SHOWN = 200
_SSH_FAILED = 255
_VERSION = re.compile(r"\d+(?:\.\d+)+\S{0,20}")

# $1 mpirun.
_SCRIPT = r"""
printf '%s %s\n' "$T" "$(command -v "$1" >/dev/null 2>&1 &&
  "$1" --version 2>&1 </dev/null | grep -m 1 -i -e version -e mpi -e prrte)"
"""


def script_command(token: str, mpirun: str) -> str:
    """The command line for the host's shell."""
    return f"exec env T={shlex.quote(token)} sh -c {shlex.quote(_SCRIPT)} sh {shlex.quote(mpirun)}"


def read(token: str, text: str) -> str | None:
    """The version of mpirun by the output of a session, "": it is not there; None: the script was not run.

    A login shell may print, too.
    """
    line = re.search(rf"^{token} (.*)$", text, re.MULTILINE)
    return None if line is None else version_in(line[1].strip())


def version_in(text: str) -> str:
    """The version in a program's own words; the words themselves where there is none."""
    match = _VERSION.search(text)
    return match[0].rstrip(",)") if match else text[:_SHOWN]


# The stages that a host has to pass, in order: facts of the rules of mpi-hosts, then of mpi-ssh.
_OF_HOSTS = DNS, PORT, BANNER, SESSION = ("DNS", "port", "banner", "session")
HOST_KEY, KEY, SHELL = ("host key", "key", "shell")
STAGES = (*_OF_HOSTS, HOST_KEY, KEY, SHELL)
_WORDS = {  # that ssh prints at a stage; who came far was not stuck before
    KEY: "Permission denied|Too many authentication failures|UNPROTECTED PRIVATE|no matching (?:key|cipher|MAC)",
    HOST_KEY: "[Hh]ost key|HOST IDENTIFICATION",
}


class Refusal(Struct, frozen=True):
    """Where a host is stuck, and why it did not run what ssh was asked for."""

    stage: str
    why: str


def refusal(code: int | None, err: str) -> Refusal:
    """Why a host did not run the script; `code` None: it was given up for its time."""
    lines = [line.strip("@ \t\r") for line in err.splitlines() if line.strip("@ \t\r")]
    last = lines[-1][:_SHOWN] if lines else ""
    if code == _SSH_FAILED:
        for stage, words in _WORDS.items():
            if line := next((line for line in lines if re.search(words, line)), None):
                return Refusal(stage, line[:_SHOWN])
        return Refusal(BANNER, last or "it said nothing")
    if code is None:
        return Refusal(SESSION, f"no answer in {_ASK_S:g} s")
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
    checks_host_keys: bool = True
    stuck: Mapping[str, Refusal | None] = field(default_factory=dict)  # of each host; None: it has answered
    versions: Mapping[str, str] = field(default_factory=dict)  # of mpirun on those that have; "": not told
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
    stuck |= {host: refusal(ended[host].code, ended[host].err) for host in ended if answers[host] is None}
    return HostAnswers(
        checks_host_keys=client.checks_host_keys,
        stuck={host: stuck.get(host) for host in hosts},
        versions={host: version for host, version in answers.items() if version is not None},
        own=own,
    )


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


@check("mpi-hosts", Where.MPI)
def mpi_hosts(hosts: HostAnswers) -> Iterator[Finding]:
    """Every host has an address and accepts connections, and its sshd answers."""
    if hosts.trouble is not None:
        text, _, action = str(hosts.trouble).partition("; ")
        fault = Fault.JOB if isinstance(hosts.trouble, UsageError) else Fault.NODE
        yield mpi_ssh.bad(fault, text, action=action or "mount the job's Secret, or set --ssh-dir")
    else:
        yield from reached(hosts.stuck, check_host_keys=hosts.checks_host_keys)


mpi_ssh = replace(
    mpi_hosts,
    id="mpi-ssh",
    title="Every host accepts the job's key, shows it as its host key, and runs a command in its login shell.",
)


@check("mpi-programs", Where.MPI)
def mpi_programs(hosts: HostAnswers) -> Iterator[Finding]:
    """Every host has the launcher's version of MPI."""
    if hosts.own is not None:
        yield from alike(hosts.own, hosts.versions)


def reached(hosts: Mapping[str, Refusal | None], *, check_host_keys: bool = True) -> Iterator[Finding]:
    """Findings about connections and keys of hosts: one for each stage and reason where hosts are stuck."""
    stuck = grouped((refusal, host) for host, refusal in hosts.items() if refusal is not None)
    if not any(refusal.stage in _OF_HOSTS for refusal in stuck):
        yield mpi_hosts.passed(f"name, port and sshd answer on {all_of(len(hosts), 'host')}", scope=Scope.JOB)
    for refusal, its in sorted(stuck.items(), key=lambda group: STAGES.index(group[0].stage)):
        where, who = mpi_hosts if refusal.stage in _OF_HOSTS else mpi_ssh, listed(its)
        yield where.found(refusal.stage, f"{who}: {refusal.why}", subject=who, measured=refusal.stage)
    n_let_in = sum(refusal is None for refusal in hosts.values())
    if n_let_in and all(refusal.stage in _OF_HOSTS for refusal in stuck):
        how = "present it as their host key"
        how = how if check_host_keys else "host keys are not checked (--insecure-host-keys)"
        who = _share(n_let_in, len(hosts))
        yield mpi_ssh.passed(f"{who} accept the job's key, and {how}", scope=Scope.JOB)


def _share(number: int, of: int) -> str:
    return all_of(of, "host") if number == of else f"{number} of {of} hosts"


def alike(own: LaunchersMpi, answers: Mapping[str, str]) -> Iterator[Finding]:
    """Whether every host has the launcher's version of mpirun; gloo needs none."""
    if not own.mpirun:
        return
    if not own.is_here:
        text = f"{own.mpirun} is not in the launcher's PATH, so nothing can be started on the hosts"
        action = "install MPI in the launcher's image, or type the path of its mpirun before the program"
        if own.is_needed:
            yield mpi_programs.bad(Fault.JOB, text, action=action, remedy="FIX_IMAGE")
        else:
            yield mpi_programs.unknown(text, action=action)
        return
    if not own.version:
        text = f"{own.mpirun} --version names no known MPI, so the hosts' programs cannot be compared"
        yield mpi_programs.unknown(text)
        return
    # A host that does not tell its version is not compared.
    versions = grouped((version, host) for host, version in answers.items() if version)
    others = {version: hosts for version, hosts in versions.items() if version != own.version}
    for version, hosts in others.items():
        yield mpi_programs.bad(
            Fault.JOB,
            f"mpirun is {version} on {listed(hosts)}, and {own.version} on the launcher",
            subject=listed(hosts),
            measured=version,
            expected=own.version,
            basis=Basis.PEER,
            action="start launcher and workers from the same image, by digest",
            remedy="FIX_IMAGE",
        )
    if answers and not versions:
        yield mpi_programs.unknown("no host tells its version of MPI")
    elif versions and not others:
        who = _share(len(versions[own.version]), len(answers))
        yield mpi_programs.passed(f"mpirun is {own.version} on the launcher and {who}", scope=Scope.JOB)
