"""Whatever a controller really sends can be checked: every case of every contract, through every check."""

from __future__ import annotations

import pytest

from tests.contracts.pods import CASES
from tests.contracts.test_cases import read
from tests.preflight.world import HEALTHY, HOST, run_all
from trainer_launch.model.errors import LaunchError
from trainer_launch.model.findings import Status
from trainer_launch.planning.job import place
from trainer_launch.preflight.check import Subject

READABLE = [pytest.param(case, id=name) for name, case in CASES.items() if "error" not in case]


def subject_of(case: dict[str, object]) -> Subject | None:
    job = read(case)
    try:
        topology = place(job, HOST)
    except LaunchError:
        return None  # a rank beyond the job's nodes; every command says so
    fields = {name: getattr(HEALTHY, name) for name in HEALTHY.__struct_fields__}
    there = {"lookup": lambda name: frozenset({"10.0.0.7"}), "cards": None}  # GPUs that are no job's workers'
    return Subject(**{**fields, **there, "job": job, "topology": topology})


@pytest.mark.parametrize("case", READABLE)
def test_no_check_fails_a_healthy_pod(case: dict[str, object]) -> None:
    subject = subject_of(case)
    if subject is None:
        return
    loud = [finding for finding in run_all(subject).findings if finding.status not in (Status.PASS, Status.SKIPPED)]
    # What the pod's own variables ask for is judged: ten workers on 8 CPUs, a million nodes, Paddle's ports.
    warned = {finding.check for finding in loud if finding.status is Status.WARN}
    assert warned <= {"cpu", "nofile"}
    assert [finding.check for finding in loud if finding.status is not Status.WARN] == []
