"""A report for programs, people and the pod's status."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from tests.schemas.validator import violations
from trainer_launch.model.codec import MAX_FILE_BYTES, MessageError
from trainer_launch.model.findings import Basis, Fault, Finding, Report, Scope, Status
from trainer_launch.preflight import report_formats
from trainer_launch.preflight.report_formats import ReportPlace
from trainer_launch.supervisor import outcome

HERE = ReportPlace(host="job-node-0-1", node_rank=1, nodes="2", contract="trainer-v2-torch")
FATAL = Finding(
    check="shm",
    status=Status.FAIL,
    fault=Fault.JOB,
    text="/dev/shm has 64 MiB free of 64 MiB, 8 workers may need 2356 MiB (data loaders, a rule of thumb; NCCL)",
    measured=64,
    expected=2356,
    unit="MiB",
    basis=Basis.ABSOLUTE,
    evidence=("torch_1_2: 12 MiB",),
    action="volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 3Gi}}] in the pod",
    took_s=0.25,
)
RETRYABLE = Finding(
    check="dns", status=Status.FAIL, fault=Fault.NODE, scope=Scope.LINK, subject="0-1", text="no", action="wait"
)
WARNED = Finding(check="cpu", status=Status.WARN, text="1.5 CPUs for 2 workers", measured=1.5, unit="CPUs")
UNKNOWN = Finding(check="memlock", status=Status.UNKNOWN, text="nobody knows")
PASSED = Finding(check="pids", status=Status.PASS, text="1450", measured=True)
SKIPPED = Finding(check="ports", status=Status.SKIPPED, text="not here")
ALL = Report(findings=(PASSED, UNKNOWN, WARNED, RETRYABLE, SKIPPED, FATAL), silenced=("storage",), took_s=0.5)


def made(report: Report = ALL, **changes: Any) -> dict[str, Any]:
    told = report_formats.document(report, HERE, exit_code=30, at_s=1.5e9) | changes
    read: dict[str, Any] = json.loads(json.dumps(told))
    return read


def data(**changes: Any) -> bytes:
    return json.dumps(made(**changes)).encode()


def test_the_document_is_as_its_published_schema_says() -> None:
    assert violations("preflight", made()) == []
    assert violations("preflight", made(Report(findings=()))) == []


def test_a_document_can_be_read_back() -> None:
    assert report_formats.parse(data()) == (HERE.host, ALL.findings)


@pytest.mark.parametrize(
    "changed",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        data(version=1),
        data(format="other"),
        data(findings={}),
        data(findings=[{**made()["findings"][0], "text": 1}]),
        data(findings=[{**made()["findings"][0], "fault": "job"}]),
        data(findings=[made()["findings"][0]] * 1001),
        b" " * (MAX_FILE_BYTES + 1),
    ],
)
def test_what_is_no_document_is_refused(changed: bytes) -> None:
    with pytest.raises(MessageError, match=r"\w"):
        report_formats.parse(changed)


def test_the_screen_has_the_summary_first_then_the_worst_and_folds_what_is_well() -> None:
    lines = report_formats.screen(ALL, HERE, 30).splitlines()
    assert lines[0] == "Preflight FAILED: fix the job; a retry will not help (exit code 30)"
    assert lines[1] == "  node 1 of 2 (job-node-0-1): 2 failed, 1 warned, 1 unknown, 1 passed in 0.50 s"
    marks = [line.split()[0] for line in lines if line and line.split()[0].isupper() and not line[0].isspace()]
    assert marks == ["FATAL", "FAIL", "WARN", "UNKNOWN"]
    assert lines[-3:] == ["passed: pids", "skipped: ports", "silenced: storage"]
    assert any(line.startswith("    -> volumes:") for line in lines)


def test_the_screen_fits_into_80_columns_unless_a_single_word_does_not() -> None:
    long = replace(FATAL, text="word " * 60 + "/a" * 60)
    assert all(len(line) <= 80 for line in report_formats.screen(ALL, HERE, 30).splitlines())
    wide = [
        line for line in report_formats.screen(Report(findings=(long,)), HERE, 30).splitlines() if len(line) > 80
    ]
    assert [line.strip() for line in wide] == ["/a" * 60]


def test_a_report_without_findings_says_that_nothing_was_checked() -> None:
    assert "nothing was checked" in report_formats.screen(Report(findings=()), HERE, 0)


ABSENT = replace(RETRYABLE, check="roll-call", scope=Scope.NODE, action="see its pod")
MISSING = tuple(
    replace(ABSENT, subject=f"node {rank} (job-node-0-{rank})", text=f"{rank} is missing") for rank in range(2, 60)
)
TOLD = replace(FATAL, check="facts", basis=Basis.PEER, subject="node 2 (job-node-0-2), node 3 (job-node-0-3)")


def test_the_faulty_ones_are_in_the_summary() -> None:
    lines = report_formats.screen(Report(findings=(PASSED, *MISSING)), HERE, 20).splitlines()
    assert lines[2].startswith("  faulty: node 2 (job-node-0-2): roll-call; node 3")
    assert any(line.endswith("and 52 more") for line in lines)


def test_the_job_is_at_fault_where_nobody_is_named() -> None:
    assert report_formats.at_fault(Report(findings=(replace(FATAL, scope=Scope.JOB),))) == "the job: shm"


def test_a_faulty_nodes_own_part_comes_first_and_says_this_node() -> None:
    own = replace(FATAL, subject=HERE.name)
    text = report_formats.screen(Report(findings=(TOLD, own)), HERE, 30)
    assert text.index("FATAL shm (this node): ") < text.index("FATAL facts (node 2")


def test_the_first_line_of_the_termination_message_can_be_read_alone() -> None:
    first, *rest = report_formats.termination_message(ALL, HERE, 30).splitlines()
    assert first.startswith("reason=PreflightFatal exit=30 retryable=false node=1 host=job-node-0-1 | 2 failed, ")
    assert "shm: /dev/shm has 64 MiB" in first
    assert [line.split()[0] for line in rest if not line.startswith(" ")] == ["FATAL", "FAIL", "WARN", "UNKNOWN"]
    assert "  What to do: wait" in rest


def test_the_termination_message_fits_however_much_was_found() -> None:
    many = Report(findings=tuple(replace(RETRYABLE, text="ö" * 500) for _ in range(100)))
    words = outcome.fitted(report_formats.termination_message(many, HERE, 20))
    assert len(words.encode()) <= 4096
    assert words.splitlines()[0].startswith("reason=PreflightRetryable exit=20 retryable=true")
    assert len(words.splitlines()[0]) < 1000


def test_a_pass_has_a_reason_too() -> None:
    report = Report(findings=(PASSED,))
    assert report_formats.termination_message(report, replace(HERE, node_rank=None), 0).startswith(
        "reason=PreflightPassed exit=0 node=? host=job-node-0-1 | 1 passed in "
    )
