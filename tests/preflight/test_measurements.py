"""Measures travel to node 0: as many as fit, none that is not one."""

from __future__ import annotations

import json

from trainer_launch.model.codec import MAX_LINE_BYTES
from trainer_launch.model.findings import Finding, Measure, Status, fitted
from trainer_launch.preflight.cluster import preflight_messages
from trainer_launch.preflight.cluster.preflight_messages import MAX_FACTS, MAX_VALUE, NodeReport, parse, render

GEMM = Measure("gemm", 665.1, "TFLOP/s", "NVIDIA H200", 3)


def test_the_largest_record_fits_into_a_line() -> None:
    letter = "\u20ac"  # takes six bytes
    measures = fitted([GEMM._replace(model=letter * 500)] * 10_000)
    assert measures
    facts = {f"{number:060d}": "x" * 1 for number in range(MAX_FACTS - 40)}
    failure = Finding(check="shm", status=Status.WARN, text='"' * 500)
    findings = preflight_messages.fitted([failure] * 100, 10_000)
    line = render(NodeReport(facts, 0.0, 0.0, findings, measures))
    assert len(line) <= MAX_LINE_BYTES
    assert len(json.dumps(facts)) > 24_000 - MAX_VALUE
    assert parse(line)


def test_what_was_measured_but_is_no_number_is_nothing() -> None:
    assert fitted([GEMM._replace(value=float("inf"))])[0].value == 0.0
