"""This pod's rank is its rank among the trainer's nodes, and not its index in another replicatedJob."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.preflight.check_context import Subject

NAME = "rank-collision"


def check(subject: Subject) -> Iterator[Finding]:
    """The contract has found it out by the pod's name."""
    foreign = subject.job.details.get("foreign_replicated_job")
    if foreign:
        rank = subject.job.node_rank
        yield Finding(
            check=NAME,
            status=Status.FAIL,
            fault=Fault.JOB,
            text=f"{subject.host.hostname} is of another replicatedJob than the trainer's nodes, yet it was told "
            f"the node rank {rank}: there would be two of them",
            measured=rank,
            action="start workers in the replicatedJob node only; take this one out of envInjection.targets",
        )
    elif subject.job.node_rank is None:
        yield Finding(check=NAME, status=Status.SKIPPED, text="the platform told no node rank")
    else:
        yield Finding(check=NAME, status=Status.PASS, text=f"node rank {subject.job.node_rank} is this pod's own")
