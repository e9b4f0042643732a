"""Raw data in files: written whole, read again, refused where it is none of ours or of another machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.results import Figure, Refused, Results


def made(**more: object) -> Results:
    given = {
        "section": "idle",
        "date": "2026-11-22T01:10Z",
        "machine": "2 CPUs (Model), 23 GiB, Linux 6",
        "versions": {"tini": "0.19.0"},
        "load": 0.1,
        "repeats": 2,
        "command": "make bench",
        "figures": [Figure("memory", "tini", "MB", [0.1, 0.2], ["ü"], ["late"], [0.1, 0.2, 0.3])],
    }
    return Results(**{**given, **more})  # type: ignore[arg-type]


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    results.save(made(), tmp_path)
    assert results.load("idle", tmp_path) == made()
    assert [path.name for path in tmp_path.iterdir()] == ["idle.json"]


def test_a_figure_is_one_line_of_the_file(tmp_path: Path) -> None:
    results.save(made(figures=[Figure("memory", who, "MB", [0.1] * 9) for who in "abc"]), tmp_path)
    lines = (tmp_path / "idle.json").read_text().splitlines()
    assert sum('"who"' in line for line in lines) == 3


def test_what_was_never_measured_is_none(tmp_path: Path) -> None:
    assert results.load("idle", tmp_path) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no JSON"),
        ("[]", "not in format 1"),
        ('{"format": 2}', "not in format 1"),
        ('{"format": 1, "figures": []}', "lacks what"),
        (json.dumps({"format": 1, "section": "x"}), "lacks what"),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused_in_a_sentence(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "idle.json").write_text(text)
    with pytest.raises(Refused, match=says):
        results.load("idle", tmp_path)


def test_a_run_on_the_same_machine_adds_to_what_there_is() -> None:
    earlier = made()
    assert results.continued(earlier, made(figures=[], absent={"s6": "gone"})) is earlier
    assert earlier.absent == {"s6": "gone"}
    assert results.continued(None, now := made(figures=[])) is now


@pytest.mark.parametrize(
    ("other", "says"),
    [({"machine": "8 CPUs (Other), 64 GiB"}, "8 CPUs"), ({"versions": {"tini": "0.20.0"}}, "0.20.0")],
)
def test_raw_data_of_another_machine_or_version_is_never_added_to(other: dict[str, object], says: str) -> None:
    with pytest.raises(Refused, match=says):
        results.continued(made(), made(**other))
