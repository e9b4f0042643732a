"""What `preflight` does in an MPI job's launcher: asks every host, and lets MPI itself go round once."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from trainer_launch.host.runtime_directory import private_folder
from trainer_launch.model import Member
from trainer_launch.model.errors import LaunchError, UsageError
from trainer_launch.model.findings import Basis, Fault, Finding, Scope
from trainer_launch.model.settings import Settings
from trainer_launch.model.units import all_of, counted, grouped, listed
from trainer_launch.planning import typed_mpirun
from trainer_launch.planning.command import Command
from trainer_launch.planning.horovodrun_options import is_horovodrun, split_command
from trainer_launch.planning.mpi_launch_spec import KUBEXEC
from trainer_launch.planning.typed_mpirun import Typed
from trainer_launch.preflight.check import Check, Subject, Where, check
from trainer_launch.preflight.mpi.host_queries import (
    Answer,
    Hosts,
    Launcher,
    Own,
    Refusal,
    Stage,
    look,
)
from trainer_launch.preflight.thresholds import Thresholds

_SHOWN = 5
_ACTION_CALLBACK = (
    "let the workers connect to the launcher on any port: see NetworkPolicies, the mesh's sidecars, and firewalls"
)


def concerns(subject: Subject) -> bool:
    """Whether this is a pod that runs mpirun."""
    return subject.job.engine == "mpirun" and subject.job.role == "launcher"


def named(subject: Subject) -> str:
    """The first few of the hosts."""
    return listed([member.host for member in subject.job.members or ()])


def findings(
    subject: Subject, settings: Settings, thresholds: Thresholds, checks: Collection[Check[Hosts]], left_s: float
) -> tuple[Finding, ...]:
    """What these checks find; `left_s` is how long hosts have to come."""
    why = _obstacle(subject, settings)
    if why is not None:
        return (mpi_hosts.skipped(why),)
    folder = private_folder()
    launcher = Launcher(
        subject=subject,
        settings=settings,
        folder=folder,
        typed=_typed(subject.command),
        deadline_s=left_s,
        thresholds=thresholds,
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


def _typed(command: Command | None) -> Typed:
    """The mpirun of the command, or the one that `run` puts before it; none for Horovod, which has gloo."""
    if command is not None and is_horovodrun(command.argv):
        words = split_command(command.argv[1:])
        if not words.has("mpi"):
            return Typed(mpirun="", number=words.number("num_proc"), program=words.program)
    if command is not None and typed_mpirun.is_mpirun(command.argv[0]):
        return typed_mpirun.parse(command.argv)
    return Typed(mpirun="mpirun", program=command.argv if command is not None else ())


# -- the checks -------------------------------------------------------------------------------


@check("mpi-hosts", Where.MPI)
def mpi_hosts(hosts: Hosts) -> Iterator[Finding]:
    """Every host has an address, can be connected to, and its sshd answers."""
    if hosts.trouble is not None:
        yield _no_client(hosts.trouble)
    elif hosts.client is not None:
        yield from reached(hosts.refusals, check_host_keys=hosts.client.checks_host_keys)
        yield from noisy({host: one for host, one in hosts.answers.items() if one.began})


mpi_ssh = replace(
    mpi_hosts,
    id="mpi-ssh",
    title="Every host accepts the job's key and shows the job's own, and its login shell runs a command.",
)


def _no_client(problem: LaunchError) -> Finding:
    text, _, action = str(problem).partition("; ")
    fault = Fault.JOB if isinstance(problem, UsageError) else Fault.NODE
    return mpi_ssh.failed(fault, text, action=action or "mount the job's Secret, or set --ssh-dir")


@check("mpi-programs", Where.MPI)
def mpi_programs(hosts: Hosts) -> Iterator[Finding]:
    """Every host has what mpirun starts there, of the launcher's version and in the same place."""
    if hosts.own is not None and hosts.launcher.mpirun:
        yield from alike(hosts.own, hosts.let_in)


@check("mpi-slots", Where.MPI)
def mpi_slots(hosts: Hosts) -> Iterator[Finding]:
    """The slots suffice for the ranks asked for, and each host for its slots."""
    if hosts.client is not None:
        yield from room(hosts.launcher.members, hosts.launcher.typed.number, hosts.let_in)


@check("mpi-callback", Where.MPI)
def mpi_callback(hosts: Hosts) -> Iterator[Finding]:
    """Every host can connect to the launcher, as mpirun's daemons do."""
    if hosts.client is not None:
        yield from called_back(hosts.let_in, hosts.callers)


# -- what the hosts' answers come to: findings, each with the hosts that it is about ----------


class _Told(NamedTuple):
    """What a stage is about: its check, whose fault it is, and what to do."""

    check: Check[Hosts]
    fault: Fault
    says: str
    action: str


_TOLD: Mapping[Stage, _Told] = {
    Stage.DNS: _Told(
        mpi_hosts,
        Fault.NODE,
        "no address found for",
        "see whether the pod and the job's headless Service are there",
    ),
    Stage.PORT: _Told(
        mpi_hosts,
        Fault.NODE,
        "cannot connect to sshd of",
        "check that its sshd runs, its port, and NetworkPolicies",
    ),
    Stage.BANNER: _Told(
        mpi_hosts, Fault.NODE, "no sshd answers on", "see that pod's log; check that the port is sshd's"
    ),
    Stage.HOST_KEY: _Told(
        mpi_ssh,
        Fault.JOB,
        "another host key than the job's is shown by",
        "run trainer-launch sshd there, which shows the job's key; a host without it may be an impostor",
    ),
    Stage.KEY: _Told(
        mpi_ssh,
        Fault.JOB,
        "the job's key is refused by",
        "mount the same Secret in all pods; see mode and owner of authorized_keys",
    ),
    Stage.SHELL: _Told(
        mpi_ssh, Fault.JOB, "no command runs on", "see the login shell and its start-up files (.bashrc, .profile)"
    ),
}


def reached(refusals: Mapping[str, Refusal | None], *, check_host_keys: bool = True) -> Iterator[Finding]:
    """Who is reached and who lets us in: one finding for each stage and reason at which hosts are stuck."""
    stuck = grouped((refusal, host) for host, refusal in refusals.items() if refusal is not None)
    at = {_TOLD[refusal.stage].check.id for refusal in stuck}
    if mpi_hosts.id not in at:
        yield mpi_hosts.passed(f"name, port and sshd answer on {all_of(len(refusals), 'host')}", scope=Scope.JOB)
    for refusal, hosts in sorted(stuck.items(), key=lambda item: list(Stage).index(item[0].stage)):
        told, who = _TOLD[refusal.stage], listed(hosts)
        text, measured = f"{told.says} {who}: {refusal.why}", refusal.stage.value
        yield told.check.failed(told.fault, text, subject=who, measured=measured, action=told.action)
    let_in = [host for host, refusal in refusals.items() if refusal is None]
    if let_in and mpi_ssh.id not in at:
        shown = (
            "present it as their host key"
            if check_host_keys
            else "host keys are not checked (--insecure-host-keys)"
        )
        who = (
            all_of(len(let_in), "host")
            if len(let_in) == len(refusals)
            else f"{len(let_in)} of {len(refusals)} hosts"
        )
        yield mpi_ssh.passed(f"{who} accept the job's key, and {shown}", scope=Scope.JOB)


def noisy(answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """Whose login shell prints something by itself."""
    loud = [host for host, answer in answers.items() if answer.noise]
    if loud:
        noise = answers[loud[0]].noise
        yield mpi_ssh.warned(
            f"login shells print output on {listed(loud)}: {noise[0]!r}",
            subject=listed(loud),
            evidence=noise[:_SHOWN],
            action="let .bashrc and .profile print only where there is a terminal ([ -t 1 ])",
        )


def alike(own: Own, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """Whether every host has what mpirun starts there, of the launcher's version and in the same place."""
    found = [*_without_mpirun(own)] or [*_missing(own, answers), *_other_version(own, answers)]
    if not found:
        found = [*_other_place(own, answers)]
    yield from found
    if answers and not found:
        what = f"mpirun {own.version}" if own.version else "mpirun"
        yield mpi_programs.passed(
            f"{what} and what it starts there are the same on {all_of(len(answers), 'host')}", scope=Scope.JOB
        )


def _without_mpirun(own: Own) -> Iterator[Finding]:
    if not own.is_here:
        text = f"{own.mpirun} is not in the launcher's PATH, so nothing can be started on the hosts"
        action = "install MPI in the launcher's image, or type the path of its mpirun before the program"
        if own.is_needed:
            yield mpi_programs.failed(Fault.JOB, text, action=action)
        else:
            yield mpi_programs.unknown(text, action=action)
    elif not own.daemons:
        text = f"{own.mpirun} --version names no known MPI, so the hosts' programs cannot be compared"
        yield mpi_programs.unknown(text)


def _missing(own: Own, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    without = [host for host, answer in answers.items() if not answer.daemons]
    if without and own.daemons:
        names = " or ".join(own.daemons)
        yield mpi_programs.failed(
            Fault.JOB,
            f"no {names} is in the PATH of {listed(without)}, and mpirun starts it there",
            subject=listed(without),
            expected=names,
            evidence=tuple(f"{host}: PATH is {answers[host].path}" for host in without[:_SHOWN]),
            action="install the same MPI in the workers' image, or have its folder in the PATH that sshd gives",
        )


def _other_version(own: Own, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    told = ((answer.version, host) for host, answer in answers.items() if answer.version is not None)
    by_version = grouped(pair for pair in told if own.version not in (None, pair[0]))
    for version, hosts in by_version.items():
        yield mpi_programs.failed(
            Fault.JOB,
            f"mpirun is {version} on {listed(hosts)}, and {own.version} on the launcher",
            subject=listed(hosts),
            measured=version,
            expected=own.version,
            basis=Basis.PEER,
            action="start launcher and workers from the same image, by digest",
        )


def _other_place(own: Own, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    if own.daemon is None:
        return
    name = own.daemon.rpartition("/")[2]
    by_file: defaultdict[str, list[str]] = defaultdict(list)
    for host, answer in answers.items():
        files = [file for file in answer.daemons.values() if file.rpartition("/")[2] == name]
        if files and own.daemon not in files:
            by_file[files[0]].append(host)
    for file, hosts in by_file.items():
        yield mpi_programs.warned(
            f"one version, two installations: {file} on {listed(hosts)}, {own.daemon} on the launcher",
            subject=listed(hosts),
            measured=file,
            expected=own.daemon,
            basis=Basis.PEER,
            action="start launcher and workers from the same image, or give mpirun --prefix",
        )


def room(members: Sequence[Member], number: int | None, answers: Mapping[str, Answer]) -> Iterator[Finding]:
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


def _overfull(slots: Mapping[str, int], answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """GPUs count only where some host has any; of CPUs a rank may need less than one."""
    some_gpus = any(answer.gpus for answer in answers.values())
    for unit, action in (("GPUs", "lower slotsPerWorker, or see which devices the host has lost"),
                         ("CPUs", "raise the workers' CPU limit, or lower slotsPerWorker")):  # fmt: skip
        if unit == "GPUs" and not some_gpus:
            continue
        has = {host: a.gpus if unit == "GPUs" else a.cpus for host, a in answers.items()}
        over = [host for host, number in has.items() if number is not None and number < slots.get(host, 0)]
        if over:
            first = over[0]
            there = counted(has[first] or 0, unit[:-1])
            yield mpi_slots.warned(
                f"more slots than {unit} on {listed(over)}: {slots[first]} slots, {there}",
                subject=listed(over),
                measured=has[first],
                expected=slots[first],
                unit=unit,
                basis=Basis.ABSOLUTE,
                action=action,
            )


def called_back(answers: Mapping[str, Answer], heard: Iterable[str]) -> Iterator[Finding]:
    """Whether every host can connect to the launcher, as mpirun's daemons do; `heard` are those that did."""
    came = set(heard)
    silent: defaultdict[str, list[str]] = defaultdict(list)
    for host, answer in answers.items():
        if host not in came:
            silent["; ".join(f"{to}: {why}" for to, why in answer.calls.items()) or "it did not try"].append(host)
    for why, hosts in silent.items():
        untried = "neither python3 nor bash" in why
        text = f"the launcher cannot be called back, as mpirun's daemons do, by {listed(hosts)}: {why}"
        more = {"subject": listed(hosts), "evidence": (why,), "action": _ACTION_CALLBACK}
        yield mpi_callback.unknown(text, **more) if untried else mpi_callback.failed(Fault.NODE, text, **more)
    if answers and not silent:
        yield mpi_callback.passed(
            f"{all_of(len(answers), 'host')} can connect back to the launcher", scope=Scope.JOB
        )
