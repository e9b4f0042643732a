"""What the hosts' answers come to: findings, each with the hosts that it is about. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainer_launch.model import Member, units
from trainer_launch.model.findings import Basis, Fault, Finding, Scope, Status
from trainer_launch.model.units import all_of, counted
from trainer_launch.preflight.mpi.host_queries import Answer, Refusal, Stage

HOSTS, SSH, PROGRAMS, SLOTS, CALLBACK = "mpi-hosts", "mpi-ssh", "mpi-programs", "mpi-slots", "mpi-callback"
TREE, RING = "mpi-tree", "mpi-ring"
_SHOWN = 5
_CALLBACK = (
    "let the workers connect to the launcher on any port: see NetworkPolicies, the mesh's sidecars, and firewalls"
)


@dataclass(frozen=True, slots=True)
class _Told:
    """What a stage is about: its check, whose fault it is, and what to do."""

    check: str
    fault: Fault
    says: str
    action: str


_TOLD: Mapping[Stage, _Told] = {
    Stage.DNS: _Told(
        HOSTS, Fault.NODE, "no address found for", "see whether the pod and the job's headless Service are there"
    ),
    Stage.PORT: _Told(
        HOSTS,
        Fault.NODE,
        "cannot connect to sshd of",
        "check that its sshd runs, its port, and NetworkPolicies",
    ),
    Stage.BANNER: _Told(
        HOSTS, Fault.NODE, "no sshd answers on", "see that pod's log; check that the port is sshd's"
    ),
    Stage.HOST_KEY: _Told(
        SSH,
        Fault.JOB,
        "another host key than the job's is shown by",
        "run trainer-launch sshd there, which shows the job's key; a host without it may be an impostor",
    ),
    Stage.KEY: _Told(
        SSH,
        Fault.JOB,
        "the job's key is refused by",
        "mount the same Secret in all pods; see mode and owner of authorized_keys",
    ),
    Stage.SHELL: _Told(
        SSH, Fault.JOB, "no command runs on", "see the login shell and its start-up files (.bashrc, .profile)"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What the launcher itself has, by which the others are measured."""

    mpirun: str  # as typed
    version: str | None
    daemons: Sequence[str]  # names, one of which every host needs; none: it is no mpirun that we know
    daemon: str | None  # the file, where it is here
    is_here: bool = True
    is_needed: bool = True  # by a command that is known


def listed(hosts: Sequence[str]) -> str:
    """The first few, and how many more."""
    return units.listed(hosts, _SHOWN)


def reached(refusals: Mapping[str, Refusal | None], *, check_host_keys: bool = True) -> Iterator[Finding]:
    """Who is reached and who lets us in: one finding for each stage and reason at which hosts are stuck."""
    stuck: defaultdict[Refusal, list[str]] = defaultdict(list)
    for host, refusal in refusals.items():
        if refusal is not None:
            stuck[refusal].append(host)
    at = {_TOLD[refusal.stage].check for refusal in stuck}
    if HOSTS not in at:
        yield _passed(HOSTS, f"name, port and sshd answer on {all_of(len(refusals), 'host')}")
    for refusal, hosts in sorted(stuck.items(), key=lambda item: list(Stage).index(item[0].stage)):
        told = _TOLD[refusal.stage]
        yield Finding(
            check=told.check,
            status=Status.FAIL,
            fault=told.fault,
            subject=listed(hosts),
            text=f"{told.says} {listed(hosts)}: {refusal.why}",
            measured=refusal.stage.value,
            action=told.action,
        )
    let_in = [host for host, refusal in refusals.items() if refusal is None]
    if let_in and SSH not in at:
        shown = (
            "and present it as their host key"
            if check_host_keys
            else "and host keys are not checked (--insecure-host-keys)"
        )
        yield _passed(SSH, f"{_count(let_in, refusals)} accept the job's key, {shown}")


def noisy(answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """Whose login shell prints something by itself."""
    loud = [host for host, answer in answers.items() if answer.noise]
    if loud:
        yield Finding(
            check=SSH,
            status=Status.WARN,
            subject=listed(loud),
            text=f"login shells print output on {listed(loud)}: {answers[loud[0]].noise[0]!r}",
            evidence=answers[loud[0]].noise[:_SHOWN],
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
        yield _passed(PROGRAMS, f"{what} and what it starts there are the same on {all_of(len(answers), 'host')}")


def _without_mpirun(own: Own) -> Iterator[Finding]:
    if not own.is_here:
        yield Finding(
            check=PROGRAMS,
            status=Status.FAIL if own.is_needed else Status.UNKNOWN,
            fault=Fault.JOB if own.is_needed else None,
            text=f"{own.mpirun} is not in the launcher's PATH, so nothing can be started on the hosts",
            action="install MPI in the launcher's image, or type the path of its mpirun before the program",
        )
    elif not own.daemons:
        text = f"{own.mpirun} --version names no known MPI, so the hosts' programs cannot be compared"
        yield Finding(check=PROGRAMS, status=Status.UNKNOWN, text=text)


def _missing(own: Own, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    without = [host for host, answer in answers.items() if not answer.daemons]
    if without and own.daemons:
        names = " or ".join(own.daemons)
        yield Finding(
            check=PROGRAMS,
            status=Status.FAIL,
            fault=Fault.JOB,
            subject=listed(without),
            text=f"no {names} is in the PATH of {listed(without)}, and mpirun starts it there",
            expected=names,
            evidence=tuple(f"{host}: PATH is {answers[host].path}" for host in without[:_SHOWN]),
            action="install the same MPI in the workers' image, or have its folder in the PATH that sshd gives",
        )


def _other_version(own: Own, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    by_version: defaultdict[str, list[str]] = defaultdict(list)
    for host, answer in answers.items():
        if answer.version is not None and own.version is not None and answer.version != own.version:
            by_version[answer.version].append(host)
    for version, hosts in by_version.items():
        yield Finding(
            check=PROGRAMS,
            status=Status.FAIL,
            fault=Fault.JOB,
            subject=listed(hosts),
            text=f"mpirun is {version} on {listed(hosts)}, and {own.version} on the launcher",
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
        yield Finding(
            check=PROGRAMS,
            status=Status.WARN,
            subject=listed(hosts),
            text=f"one version, two installations: {file} on {listed(hosts)}, {own.daemon} on the launcher",
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
        yield Finding(
            check=SLOTS,
            status=Status.FAIL,
            fault=Fault.JOB,
            scope=Scope.JOB,
            text=f"{counted(number, 'rank')} asked for, but the hosts have {counted(total, 'slot')}",
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
        yield _passed(SLOTS, f"{counted(total, 'slot')} on {counted(len(slots), 'host')}{asked}")


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
            yield Finding(
                check=SLOTS,
                status=Status.WARN,
                subject=listed(over),
                text=f"more slots than {unit} on {listed(over)}: {slots[first]} slots, {there}",
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
        yield Finding(
            check=CALLBACK,
            status=Status.UNKNOWN if untried else Status.FAIL,
            fault=None if untried else Fault.NODE,
            subject=listed(hosts),
            text=f"the launcher cannot be called back, as mpirun's daemons do, by {listed(hosts)}: {why}",
            evidence=(why,),
            action=_CALLBACK,
        )
    if answers and not silent:
        yield _passed(CALLBACK, f"{all_of(len(answers), 'host')} can connect back to the launcher")


def _passed(check: str, text: str) -> Finding:
    return Finding(check=check, status=Status.PASS, scope=Scope.JOB, text=text)


def _count(some: Sequence[str], all_: Mapping[str, object]) -> str:
    return all_of(len(some), "host") if len(some) == len(all_) else f"{len(some)} of {len(all_)} hosts"
