"""Both of NCCL's trees, as its source draws them, and rounds that cover them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_launch.preflight.fault_isolation import Pair, double_tree, rounds


def edges(text: str) -> set[Pair]:
    found = [tuple(map(int, word.split("-"))) for word in text.split()]
    return {(min(one, other), max(one, other)) for one, other in found}


@pytest.mark.parametrize(
    ("n_nodes", "drawn"),
    [
        (2, "0-1"),
        (3, "0-2 1-2 1-0 2-0"),
        (4, "0-2 2-1 2-3 3-1 1-2 1-0"),
        # As the comments of src/graph/trees.cc have them: mirrored for 12, shifted for 13.
        (
            12,
            "0-8 8-4 8-10 4-2 4-6 2-1 2-3 6-5 6-7 10-9 10-11 3-11 3-1 3-7 1-0 1-2 7-5 7-9 5-4 5-6 9-8 9-10",
        ),
        (
            13,
            "0-8 8-4 8-12 4-2 4-6 12-10 2-1 2-3 6-5 6-7 10-9 10-11 "
            "1-9 9-5 9-0 5-3 5-7 0-11 3-2 3-4 7-6 7-8 11-10 11-12",
        ),
    ],
)
def test_the_trees_are_those_of_nccls_source(n_nodes: int, drawn: str) -> None:
    assert double_tree(n_nodes) == edges(drawn)


@given(st.integers(1, 600))
def test_each_tree_reaches_every_node_and_nobody_has_more_than_six_edges(n_nodes: int) -> None:
    found = double_tree(n_nodes)
    assert {node for edge in found for node in edge} == (set(range(n_nodes)) if n_nodes > 1 else set())
    assert all(0 <= one < other < n_nodes for one, other in found)
    assert all(sum(node in edge for edge in found) <= 6 for node in range(min(n_nodes, 20)))


@given(st.integers(2, 600))
def test_beside_the_ring_four_rounds_cover_every_edge_and_use_a_node_once_at_a_time(n_nodes: int) -> None:
    ring = {(min(n, (n + 1) % n_nodes), max(n, (n + 1) % n_nodes)) for n in range(n_nodes)}
    held = rounds(n_nodes)
    told = [edge for chosen in held for edge in chosen]
    assert len(told) == len(set(told))
    assert set(told) | ring >= double_tree(n_nodes)
    assert len(held) <= 4
    for chosen in held:
        nodes = [node for edge in chosen for node in edge]
        assert len(nodes) == len(set(nodes))
