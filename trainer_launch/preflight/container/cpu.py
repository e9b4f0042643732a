"""There are CPUs for this node's workers: less than one each makes collectives many times slower."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Finding, Status
from trainer_launch.model.units import counted
from trainer_launch.preflight.check_context import Subject

NAME = "cpu"
OF_A_CONTAINER = True


def check(subject: Subject) -> Iterator[Finding]:
    """Compare the smaller of quota and affinity mask with the workers."""
    cpus = subject.host.cpus
    usable = float(cpus.affinity if cpus.quota is None else min(cpus.affinity, cpus.quota))
    quota = "no quota" if cpus.quota is None else f"a quota of {cpus.quota:g}"
    have, workers = f"{usable:g} {'CPU' if usable == 1 else 'CPUs'}", counted(subject.workers, "worker")
    text = f"{have} for {workers} ({cpus.affinity} in the affinity mask, {quota})"
    if usable >= subject.workers:
        yield Finding(check=NAME, status=Status.PASS, text=text, measured=usable, unit="CPUs")
        return
    yield Finding(
        check=NAME,
        status=Status.WARN,
        text=text,
        measured=usable,
        expected=subject.workers,
        unit="CPUs",
        action="raise resources.limits.cpu to at least one for each worker, data loaders not counted",
    )
