"""What a report comes to: a verdict and an exit code."""

from __future__ import annotations

import pytest

from trainer_launch.model.findings import Fault, Finding, PreflightVerdict, Report, Status, exit_code

PASSED = Finding(check="cpu", status=Status.PASS, text="8 CPUs")
WARNED = Finding(check="pids", status=Status.WARN, text="small")
UNKNOWN = Finding(check="dns", status=Status.UNKNOWN, text="no answer")
SKIPPED = Finding(check="storage", status=Status.SKIPPED, text="not asked for")
NODES = Finding(check="ports", status=Status.FAIL, fault=Fault.NODE, text="taken")
JOBS = Finding(check="shm", status=Status.FAIL, fault=Fault.JOB, text="too small")


@pytest.mark.parametrize(
    ("findings", "verdict", "code"),
    [
        ((PASSED, SKIPPED), PreflightVerdict.PASS, 0),
        ((PASSED, UNKNOWN), PreflightVerdict.UNKNOWN, 0),
        ((SKIPPED,), PreflightVerdict.UNKNOWN, 0),
        ((), PreflightVerdict.UNKNOWN, 0),
        ((PASSED, UNKNOWN, WARNED), PreflightVerdict.WARN, 0),
        ((PASSED, WARNED, NODES), PreflightVerdict.RETRYABLE, 20),
        ((NODES, JOBS), PreflightVerdict.FATAL, 30),
    ],
)
def test_the_worst_finding_makes_the_verdict(
    findings: tuple[Finding, ...], verdict: PreflightVerdict, code: int
) -> None:
    report = Report(findings=findings)
    assert (report.verdict, exit_code(report.verdict)) == (verdict, code)


def test_a_failure_without_a_fault_cannot_be_said() -> None:
    with pytest.raises(ValueError, match="somebody's fault"):
        Finding(check="shm", status=Status.FAIL, text="?")
    with pytest.raises(ValueError, match="somebody's fault"):
        Finding(check="shm", status=Status.PASS, fault=Fault.JOB, text="?")
