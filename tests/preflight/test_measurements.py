"""Measures travel to node 0: as many as fit, none that is not one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainer_launch.model.codec import MAX_LINE_BYTES, MessageError
from trainer_launch.model.findings import Checksum, Measure, fitted, fitted_checksums
from trainer_launch.preflight.cluster.preflight_messages import MAX_FACTS, MAX_VALUE, Record, parse, render

GEMM = Measure("gemm", 665.1, "TFLOP/s", "NVIDIA H200", 3)
PAIR = Measure("pair", 1.2, "GB/s", "", None)
SUM = Checksum(3, "GPU-1", "NVIDIA H200, 580.159.04", "0123456789abcdef")


def test_a_record_with_measures_comes_back_as_it_was() -> None:
    record = Record({"torch": "2"}, 0.0, 0.0, "[]", (GEMM, PAIR), (SUM,))
    assert parse(render(record)) == record


def test_the_largest_record_fits_into_a_line() -> None:
    letter = "\u20ac"  # takes six bytes
    measures = fitted([GEMM._replace(model=letter * 500)] * 10_000)
    checksums = fitted_checksums([SUM._replace(kind=letter * 500)] * 10_000)
    assert measures
    assert checksums
    facts = {f"{number:060d}": "x" * 1 for number in range(MAX_FACTS - 40)}
    line = render(Record(facts, 0.0, 0.0, '"' * 10_000, measures, checksums))
    assert len(line) <= MAX_LINE_BYTES
    assert len(json.dumps(facts)) > 24_000 - MAX_VALUE
    assert parse(line)


def test_what_was_measured_but_is_no_number_is_nothing() -> None:
    assert fitted([GEMM._replace(value=float("inf"))])[0].value == 0.0


@pytest.mark.parametrize(
    "row",
    [
        "gemm",
        ["gemm", 1.0, "GB/s", ""],
        ["gemm", True, "GB/s", "", 0],
        ["gemm", -1.0, "GB/s", "", 0],
        ["gemm", 1e300, "GB/s", "", 0],
        ["x" * 1000, 1.0, "GB/s", "", 0],
        ["gemm", 1.0, "GB/s", "", 1.5],
        ["gemm", 1.0, "GB/s", "", -1],
    ],
)
def test_what_is_no_measure_is_refused(row: Any) -> None:
    line = render(Record({}, 0.0, 0.0, "[]")).replace(b'"measures":[]', b'"measures":' + json.dumps([row]).encode())
    with pytest.raises(MessageError, match=r"measures\[0\]"):
        parse(line)


def test_too_many_are_refused() -> None:
    with pytest.raises(MessageError, match="length <= 256"):
        parse(render(Record({}, 0.0, 0.0, "[]", (GEMM,) * 257)))
