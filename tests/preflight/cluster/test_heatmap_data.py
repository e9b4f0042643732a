"""The picture of the pair tests: what it shows, drawn by the real child, and what is said when it cannot be."""

from __future__ import annotations

import importlib.util
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require
from tests.preflight.cluster.job import Simulation
from trainer_launch.preflight.cluster import pair_results
from trainer_launch.preflight.cluster.pair_results import PairTests
from trainer_launch.preflight.fault_isolation import Faulty, Link
from trainer_launch.preflight.heatmap import drawing, plot

PNG = b"\x89PNG\r\n\x1a\n"


def seen(nodes: int, bad: int, link: tuple[int, int] | None = None) -> PairTests:
    """The ring, with a node that fails always."""
    tests = []
    for node in range(nodes):
        ends = (node, node + 1) if node + 1 < nodes else (0, node)
        is_well = bad not in ends and ends != link
        rate = random.Random(node).randrange(1_000_000_000, 1_200_000_000)
        tests.append(pair_results.Tested(ends, ("", "") if is_well else ("no", "no"), rate if is_well else 0))
    links = () if link is None else (Link(ends=link, failed=2, tests=2),)
    return PairTests(
        tuple(f"node {node} (job-node-0-{node})" for node in range(nodes)),
        tuple(tests),
        Faulty(nodes=(bad,), links=links, rounds=2),
    )


def test_each_pair_is_shown_once_by_its_slowest_test() -> None:
    tests = (pair_results.Tested((0, 1), ("", ""), 9_000_000), pair_results.Tested((0, 1), ("", ""), 5_000_000))
    shown = drawing(
        PairTests(
            ("a", "b", "c"),
            (*tests, pair_results.Tested((1, 2), ("", "no"), 7), pair_results.Tested((1, 2), ("", ""), 7)),
        )
    )
    assert shown["tests"] == [[0, 1, 5.0], [1, 2, None]]
    assert shown["title"] == "Bandwidth between 3 nodes, 4 tests: no fault found"


def test_what_the_cluster_preflight_has_tested_can_be_drawn() -> None:
    job = Simulation(4, outcome=lambda node, partner: ("lost", 0) if 2 in (node, partner) else ("", 10**9))
    job.come(*range(4))
    shown: Mapping[str, Any] = drawing(job.hall.seen)
    assert shown["faulty"] == [2]
    assert {tuple(row[:2]) for row in shown["tests"] if row[2] is None} >= {(1, 2), (2, 3)}
    assert shown["title"].endswith("faulty: node 2 (job-node-0-2)")
    assert Simulation(4).hall.seen == PairTests()


def test_a_node_of_which_one_rail_is_at_fault_is_framed_and_the_rail_told() -> None:
    tests = (pair_results.Tested((0, 1), ("", ""), 9_000_000, 0), pair_results.Tested((0, 1), ("", "no"), 0, 1))
    shown = drawing(PairTests(("a", "b"), tests, Faulty(rails=((1, (1,)),), rounds=2)))
    assert (shown["faulty"], shown["tests"]) == ([1], [[0, 1, None]])
    assert "faulty: b, rail 1" in str(shown["title"])


@pytest.fixture
def matplotlib() -> None:
    require(importlib.util.find_spec("matplotlib") is not None, "needs matplotlib")


@pytest.mark.process
@pytest.mark.usefixtures("matplotlib")
@pytest.mark.parametrize("nodes", [4, 64, 600])
def test_the_faulty_row_is_in_the_picture_by_name(tmp_path: Path, nodes: int) -> None:
    told = seen(nodes, bad=nodes // 2, link=(0, 1))
    plot(str(tmp_path / "pairs.png"), told)
    assert (tmp_path / "pairs.png").read_bytes().startswith(PNG)
    plot(str(tmp_path / "pairs.svg"), told)
    text = (tmp_path / "pairs.svg").read_text()
    assert f"<!-- node {nodes // 2} (job-node-0-{nodes // 2}) -->" in text
    assert "#d62728" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs.png", "pairs.svg"]


@pytest.mark.process
@pytest.mark.usefixtures("matplotlib")
def test_why_it_was_not_drawn_is_said_plainly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    plot("pairs.png", None)
    plot("pairs.png", PairTests())
    assert caplog.text.count("--plot: pairs.png was not written: no pairs of nodes were tested") == 2
    told = seen(4, bad=1)
    plot(str(tmp_path / "no" / "pairs.png"), told)
    assert "pairs.png was not written: No such file or directory" in caplog.text
    plot(str(tmp_path / "pairs.docx"), told)
    assert "pairs.docx was not written: Format 'docx' is not supported" in caplog.text
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    plot(str(tmp_path / "pairs.png"), told)
    assert "it needs matplotlib: pip install 'trainer-launch[report]'" in caplog.text
    assert not (tmp_path / "pairs.png").exists()
