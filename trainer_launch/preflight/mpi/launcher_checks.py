"""What `preflight` checks in an MPI job's launcher: its hosts, and what each of them answers over ssh."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec.structs import replace

from trainer_launch.host.runtime_directory import private_folder
from trainer_launch.model import Member
from trainer_launch.model.errors import UsageError
from trainer_launch.model.findings import Basis, Fault, Finding, Scope
from trainer_launch.model.settings import Settings
from trainer_launch.model.units import all_of, counted, grouped, listed
from trainer_launch.planning import mpi_options
from trainer_launch.planning.command import Command
from trainer_launch.planning.mpi import KUBEXEC
from trainer_launch.planning.mpi_options import Typed, is_horovodrun
from trainer_launch.preflight.check import Check, Subject, Where, check
from trainer_launch.preflight.mpi import host_queries
from trainer_launch.preflight.mpi.host_queries import (
    MPI_HOSTS,
    MPI_SSH,
    STAGES,
    Facts,
    HostAnswers,
    Own,
    Refusal,
    look,
)

_SHOWN = 5
_ACTION_IMAGE = "start launcher and workers from the same image, by digest"
# What a host should have as the launcher has it: what it is called, and whose fault it is where it differs.
_ALIKE: Mapping[str, tuple[str, Fault | None]] = {
    host_queries.MPIRUN: ("mpirun", Fault.JOB),
    host_queries.PYTHON: ("Python", None),
    host_queries.LAUNCHER: ("trainer-launch", None),
}
# What a slot needs one of, and what to do where there are fewer.
_ROOM: Mapping[str, tuple[str, str]] = {
    host_queries.GPUS: ("GPU", "lower slotsPerWorker, or see which devices the host has lost"),
    host_queries.CPUS: ("CPU", "raise the workers' CPU limit, or lower slotsPerWorker"),
}


def concerns(subject: Subject) -> bool:
    """Whether this is a pod that runs mpirun."""
    return subject.job.engine == "mpirun" and subject.job.role == "launcher"


def named(subject: Subject) -> str:
    """The first few of the hosts."""
    return listed([member.host for member in subject.job.members or ()])


def findings(
    subject: Subject, settings: Settings, checks: Collection[Check[HostAnswers]], left_s: float
) -> tuple[Finding, ...]:
    """What these checks find; `left_s` is how long hosts have to come."""
    why = _obstacle(subject, settings)
    if why is not None:
        return (mpi_hosts.skipped(why),)
    folder = private_folder()
    try:
        hosts = look(subject, settings, _typed(subject.command), folder, left_s)
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
    """Every host has an address, can be connected to, and its sshd answers."""
    if hosts.trouble is not None:
        text, _, action = str(hosts.trouble).partition("; ")
        fault = Fault.JOB if isinstance(hosts.trouble, UsageError) else Fault.NODE
        yield mpi_ssh.failed(fault, text, action=action or "mount the job's Secret, or set --ssh-dir")
    elif hosts.client is not None:
        yield from reached(hosts.refusals, check_host_keys=hosts.client.checks_host_keys)


mpi_ssh = replace(
    mpi_hosts,
    id=MPI_SSH,
    title="Every host accepts the job's key and shows the job's own, and its login shell runs a command.",
)


@check("mpi-programs", Where.MPI)
def mpi_programs(hosts: HostAnswers) -> Iterator[Finding]:
    """Every host has what mpirun starts there, and the launcher's versions of MPI, Python and trainer-launch."""
    if hosts.own is not None:
        yield from alike(hosts.own, hosts.let_in)


@check("mpi-slots", Where.MPI)
def mpi_slots(hosts: HostAnswers) -> Iterator[Finding]:
    """The slots suffice for the ranks asked for, and each host for its slots."""
    if hosts.client is not None:
        yield from room(hosts.members, hosts.typed.number, hosts.let_in)


def reached(refusals: Mapping[str, Refusal | None], *, check_host_keys: bool = True) -> Iterator[Finding]:
    """Who is reached and who lets us in: one finding for each stage and reason at which hosts are stuck."""
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


def alike(own: Own, answers: Mapping[str, Facts]) -> Iterator[Finding]:
    """Whether every host has what mpirun starts there, and the launcher's versions; gloo needs no mpirun."""
    findings = [*_without_mpirun(own), *_missing(own, answers), *_other_versions(own, answers)]
    yield from findings
    if answers and not findings and own.mpirun:
        names = " ".join(("mpirun", *filter(None, (own.versions.get(host_queries.MPIRUN),))))
        text = f"{names} and what it starts there are the same on {all_of(len(answers), 'host')}"
        yield mpi_programs.passed(text, scope=Scope.JOB)


def _without_mpirun(own: Own) -> Iterator[Finding]:
    if own.mpirun and not own.is_here:
        text = f"{own.mpirun} is not in the launcher's PATH, so nothing can be started on the hosts"
        action = "install MPI in the launcher's image, or type the path of its mpirun before the program"
        if own.is_needed:
            yield mpi_programs.failed(Fault.JOB, text, action=action)
        else:
            yield mpi_programs.unknown(text, action=action)
    elif own.mpirun and not own.daemons:
        text = f"{own.mpirun} --version names no known MPI, so the hosts' programs cannot be compared"
        yield mpi_programs.unknown(text)


def _missing(own: Own, answers: Mapping[str, Facts]) -> Iterator[Finding]:
    without = [host for host, facts in answers.items() if host_queries.DAEMON not in facts]
    if without and own.daemons:
        names = " or ".join(own.daemons)
        yield mpi_programs.failed(
            Fault.JOB,
            f"no {names} is in the PATH of {listed(without)}, and mpirun starts it there",
            subject=listed(without),
            expected=names,
            evidence=tuple(f"{host}: PATH is {answers[host].get(host_queries.PATH)}" for host in without[:_SHOWN]),
            action="install the same MPI in the workers' image, or have its folder in the PATH that sshd gives",
        )


def _other_versions(own: Own, answers: Mapping[str, Facts]) -> Iterator[Finding]:
    """Who does not have a program, or does not tell its version, is not compared."""
    for fact, (name, fault) in _ALIKE.items():
        expected = own.versions.get(fact)
        versions = grouped((facts.get(fact), host) for host, facts in answers.items())
        for version, hosts in versions.items():
            if expected is not None and version not in (None, expected):
                yield mpi_programs.bad(
                    fault,
                    f"{name} is {version} on {listed(hosts)}, and {expected} on the launcher",
                    subject=listed(hosts),
                    measured=version,
                    expected=expected,
                    basis=Basis.PEER,
                    action=_ACTION_IMAGE,
                )


def room(members: Sequence[Member], number: int | None, answers: Mapping[str, Facts]) -> Iterator[Finding]:
    """Whether the slots suffice for the ranks asked for, and each host for its slots."""
    slots = {member.host: member.slots or 1 for member in members}
    total = sum(slots.values())
    if number is not None and number > total:
        yield mpi_slots.failed(
            Fault.JOB,
            f"{counted(number, 'rank')} asked for, but the hosts have {counted(total, 'slot')}",
            scope=Scope.JOB,
            measured=total,
            expected=number,
            unit="slots",
            action="ask for fewer (-np), or raise slotsPerWorker or the number of workers",
        )
        return
    few = list(_overfull(slots, answers))
    yield from few
    if not few:
        asked = f", for {counted(number, 'rank')}" if number is not None else ""
        yield mpi_slots.passed(f"{counted(total, 'slot')} on {counted(len(slots), 'host')}{asked}", scope=Scope.JOB)


def _overfull(slots: Mapping[str, int], answers: Mapping[str, Facts]) -> Iterator[Finding]:
    """GPUs count only where some host has any; of CPUs a rank may need less than one."""
    for fact, (unit, action) in _ROOM.items():
        numbers = {host: host_queries.number(facts.get(fact)) for host, facts in answers.items()}
        have = {host: number for host, number in numbers.items() if number is not None}
        over = [host for host, number in have.items() if number < slots.get(host, 0)]
        if over and (fact == host_queries.CPUS or any(have.values())):
            slots_of, there = slots[over[0]], have[over[0]]
            yield mpi_slots.warned(
                f"more slots than {unit}s on {listed(over)}: {slots_of} slots, {counted(there, unit)}",
                subject=listed(over),
                measured=there,
                expected=slots_of,
                unit=f"{unit}s",
                basis=Basis.ABSOLUTE,
                action=action,
            )
