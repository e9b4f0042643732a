"""What the platform and the command say of this node: a program that can run, a rank and a domain of its own."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.errors import NotRunnableError
from trainer_launch.model.findings import Fault, Finding
from trainer_launch.planning import programs
from trainer_launch.preflight.check import Subject, check


@check("program")
def program(subject: Subject) -> Iterator[Finding]:
    """The command's program is there and may be run; it is looked for as a shell would."""
    if subject.command is None:
        yield program.skipped("no command was given after --")
        return
    try:
        programs.check(subject.command, subject.env.get("PATH"))
    except NotRunnableError as problem:
        text, _, action = str(problem).partition("; ")
        action = action or "check the image and the command"
        yield program.failed(Fault.JOB, text, measured=problem.exit_code, unit="exit code", action=action)
        return
    yield program.passed(f"{subject.command.argv[0]} can be run")


@check("rank-collision")
def rank_collision(subject: Subject) -> Iterator[Finding]:
    """This pod's rank is its rank among the trainer's nodes, and not its index in another replicatedJob."""
    rank = subject.job.node_rank
    if subject.job.details.get("foreign_replicated_job"):  # the contract has found it out by the pod's name
        yield rank_collision.failed(
            Fault.JOB,
            f"{subject.host.hostname} is of another replicatedJob than the trainer's nodes, yet it was told "
            f"the node rank {rank}: there would be two of them",
            measured=rank,
            action="start workers in the replicatedJob node only; take this one out of envInjection.targets",
        )
    elif rank is None:
        yield rank_collision.skipped("the platform told no node rank")
    else:
        yield rank_collision.passed(f"node rank {rank} is this pod's own")


@check("subdomain")
def subdomain(subject: Subject) -> Iterator[Finding]:
    """Node 0's address is in this pod's DNS domain: Trainer v2 names it without regard to a JobSet's subdomain."""
    if not subject.job.contract.startswith("trainer-v2"):
        yield subdomain.skipped("only Kubeflow Trainer v2 makes such names")
        return
    own = own_subdomain(subject.hosts_file, subject.host.hostname)
    told = subject.topology.coordinator.host.split(".") if subject.topology.coordinator else []
    job = subject.host.hostname.rpartition("-")[0].rpartition("-")[0].rpartition("-")[0]
    if own is None or len(told) < 2 or not told[0].startswith(f"{job}-"):
        yield subdomain.skipped("this pod has no name in a domain to compare with")
    elif told[1] == own:
        yield subdomain.passed(f"node 0 is in this pod's domain {own}", measured=own)
    else:
        right = ".".join((told[0], own, *told[2:]))
        yield subdomain.bad(
            None if _resolves(subject, ".".join(told)) else Fault.JOB,
            f"node 0 is said to be {'.'.join(told)}, but this job's pods are in the domain {own}",
            measured=told[1],
            expected=own,
            action=f"remove network.subdomain from the JobSet template, or set --master-addr {right}",
        )


def _resolves(subject: Subject, name: str) -> bool:
    try:
        return bool(subject.lookup(name))
    except OSError:
        return False


def own_subdomain(hosts_file: str, hostname: str) -> str | None:
    """The label after the host's own in its full name, None when there is no full name.

    Kubelet writes it to /etc/hosts: `address host.subdomain.namespace.svc.zone host`.
    """
    for line in hosts_file.splitlines():
        names = line.partition("#")[0].split()[1:]
        if hostname in names:
            for name in names:
                labels = name.split(".")
                if labels[0] == hostname and len(labels) > 2 and "svc" in labels:
                    return labels[1]
    return None
