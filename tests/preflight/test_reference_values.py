"""References: the package's own are sound, a site's own come back as written, a bad file is one sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from trainer_launch.host import files
from trainer_launch.model.errors import UsageError
from trainer_launch.model.findings import Measure, Report
from trainer_launch.preflight import thresholds
from trainer_launch.preflight.report_formats import ReportPlace, document

ROW = {"model": "A", "measure": "gemm", "value": 1.5, "unit": "TFLOP/s", "source": "here"}


def written(**other: object) -> bytes:
    return json.dumps({"format": thresholds.FORMAT, "version": 1, "references": [ROW], **other}).encode()


def test_the_packages_own_table_is_sound_and_every_number_has_its_source() -> None:
    rows = thresholds.load_table(None).rows.values()
    assert len(json.loads(thresholds.BUILT_IN.read_bytes())["references"]) == len(rows), "no row twice"
    assert all(len(row.source) > 40 for row in rows)
    known = [prefix for kind in thresholds.KINDS for prefix in kind.measures] + ["pair"]
    assert all(row.measure.startswith(tuple(known)) for row in rows)
    assert {row.model for row in rows} >= {"NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"}


def report_with(rows: Sequence[thresholds.Reference], **changes: object) -> bytes:
    place = ReportPlace(host="a", node_rank=0, nodes="1", contract="plain")
    found = Report(findings=())
    made = document(found, place, exit_code=0, at_s=1.0, measured=rows)
    return json.dumps(made | changes).encode()


def test_the_report_of_a_healthy_job_is_the_reference_of_the_next_with_medians_by_model(tmp_path: Path) -> None:
    measures = [Measure("gemm", value, "TFLOP/s", "X", 0) for value in (600.0, 610.0, 700.0)]
    measures += [Measure("h2d", 50.0, "GB/s", "Y", 1), Measure("pair", 1.0, "GB/s", "", None)]
    rows = thresholds.measured(measures, "2026-11-21")
    (tmp_path / "healthy.json").write_bytes(report_with(rows))
    table = thresholds.load_table(str(tmp_path / "healthy.json"))
    assert tuple(table.rows.values()) == rows
    assert [(row.model, row.measure, row.value) for row in rows] == [("X", "gemm", 610.0), ("Y", "h2d", 50.0)]
    assert rows[0].source == "median of 3 by trainer-launch preflight, 2026-11-21"


def test_a_table_of_references_as_0_2_wrote_it_is_read() -> None:
    assert [row.value for row in thresholds.parse_table(written(), "x").rows.values()] == [1.5]


def test_a_model_is_found_in_any_case_and_only_in_its_own_unit() -> None:
    table = thresholds.load_table(None)
    assert table.of(Measure("gemm", 1, "TFLOP/s", "nvidia h200", 0)) is not None
    assert table.of(Measure("gemm", 1, "GFLOP/s", "NVIDIA H200", 0)) is None
    assert table.of(Measure("gemm", 1, "TFLOP/s", "NVIDIA H200 NVL", 0)) is None


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"{", "x is neither a report of preflight nor a table"),
        (written(version=2), "x is neither a report of preflight nor a table"),
        (report_with(()), "x has no measurements of GPUs; write one with --report FILE.json in a healthy job"),
        (report_with((), version=1), "x is neither a report of preflight nor a table"),
        (report_with((), verdict="retryable"), "x is the report of a job whose preflight failed"),
        (report_with((), measured=[{"model": "A"}]), "Object missing required field `measure`"),
        (written(references=[{**ROW, "more": 1}]), "Object contains unknown field `more`"),
        (written(references=[ROW, {**ROW, "value": "1"}]), r"got `str` - at `\$.references\[1\].value`"),
        (written(references=[{**ROW, "value": -1}]), "Expected `float` > 0"),
        (b"[" * 100_000, "x is neither a report of preflight nor a table"),
    ],
)
def test_a_bad_file_is_one_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as raised:
        thresholds.parse_table(data, "x")
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_or_would_never_end_is_one_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=r"--reference .*pipe cannot be read: it is not a regular file"):
        thresholds.load_table(str(tmp_path / "pipe"))
    with pytest.raises(UsageError, match=r"--reference .*none cannot be read: No such file"):
        thresholds.load_table(str(tmp_path / "none"))
    (tmp_path / "large").write_bytes(b" " * (thresholds.MAX_BYTES + 1))
    with pytest.raises(UsageError, match=r"--reference .*large is larger than 1048576 bytes"):
        thresholds.load_table(str(tmp_path / "large"))


def test_a_file_whose_server_is_gone_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "within", lambda path, default, *_: default)  # as after 2 s
    with pytest.raises(UsageError, match=r"--reference .*none cannot be read: its file server does not answer"):
        thresholds.load_table(str(tmp_path / "none"))
