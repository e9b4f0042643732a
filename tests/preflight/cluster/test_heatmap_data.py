"""The picture of the pair tests: what it shows."""

from __future__ import annotations

import random
from xml.etree import ElementTree

import pytest

from tests.preflight.cluster.job import Simulation
from trainer_launch.preflight.cluster.nodes import PairTest, PairTests
from trainer_launch.preflight.fault_isolation import Faulty, Link
from trainer_launch.preflight.heatmap import drawn

SVG = "{http://www.w3.org/2000/svg}"
RED = "#d62728"


def seen(nodes: int, bad: int, link: tuple[int, int] | None = None) -> PairTests:
    """The ring, with a node that fails always."""
    tests = []
    for node in range(nodes):
        ends = (node, node + 1) if node + 1 < nodes else (0, node)
        is_well = bad not in ends and ends != link
        rate = random.Random(node).randrange(1_000_000_000, 1_200_000_000)
        tests.append(PairTest(ends, ("", "") if is_well else ("no", "no"), rate if is_well else 0))
    links = () if link is None else (Link(ends=link, failed=2, tests=2),)
    return PairTests(
        tuple(f"node {node} (job-node-0-{node})" for node in range(nodes)),
        tuple(tests),
        Faulty(nodes=(bad,), links=links, rounds=2),
    )


def squares(svg: str) -> list[str]:
    """The title of each square."""
    return [title.text or "" for title in ElementTree.fromstring(svg).iter(f"{SVG}title")]


def outlines(svg: str) -> int:
    return sum(rect.get("stroke") == RED for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"))


def test_each_pair_is_shown_once_by_its_slowest_test() -> None:
    tests = (PairTest((0, 1), ("", ""), 9_000_000), PairTest((0, 1), ("", ""), 5_000_000))
    shown = drawn(
        PairTests(
            ("a", "b", "c"),
            (*tests, PairTest((1, 2), ("", "no"), 7), PairTest((1, 2), ("", ""), 7)),
        )
    )
    assert squares(shown) == ["a - b: 5 MB/s", "b - c: failed"]
    assert outlines(shown) == 0


def test_what_the_cluster_preflight_has_tested_can_be_drawn() -> None:
    job = Simulation(4, outcome=lambda node, partner: ("lost", 0) if 2 in (node, partner) else ("", 10**9))
    job.come(*range(4))
    shown = drawn(job.hall.pair_tests)
    failed = {title for title in squares(shown) if title.endswith("failed")}
    names = job.hall.pair_tests.names
    assert failed >= {f"{names[1]} - {names[2]}: failed", f"{names[2]} - {names[3]}: failed"}
    assert outlines(shown) == 2
    assert Simulation(4).hall.pair_tests == PairTests()


def test_a_node_of_which_one_rail_is_at_fault_is_framed() -> None:
    tests = (PairTest((0, 1), ("", ""), 9_000_000, 0), PairTest((0, 1), ("", "no"), 0, 1))
    shown = drawn(PairTests(("a", "b"), tests, Faulty(rails=((1, (1,)),), rounds=2)))
    assert (outlines(shown), squares(shown)) == (2, ["a - b: failed"])


def test_a_name_that_is_markup_is_shown_as_it_is() -> None:
    tests = (PairTest((0, 1), ("", ""), 9_000_000),)
    assert squares(drawn(PairTests(("<b>\x1b[31m", "b"), tests))) == ["<b> - b: 9 MB/s"]


@pytest.mark.parametrize("nodes", [4, 64, 600])
def test_the_faulty_row_is_in_the_picture_by_name(nodes: int) -> None:
    shown = drawn(seen(nodes, bad=nodes // 2, link=(0, 1)))
    bad = [text for text in ElementTree.fromstring(shown).iter(f"{SVG}text") if text.get("fill") == RED]
    assert bad[0].text == f"node {nodes // 2}"
    assert outlines(shown) == 3
    assert sum(title.endswith("failed") for title in squares(shown)) == 3
