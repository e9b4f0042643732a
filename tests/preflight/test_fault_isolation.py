"""Who is faulty, found by pair tests: simulated faults of nodes, rails and links, and nobody is accused wrongly."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
from msgspec.structs import replace

from trainer_launch.preflight.fault_isolation import (
    MAX_ROUNDS,
    Faulty,
    Pair,
    PairTrial,
    next_round,
    pair,
    verdict,
)

NOBODY: frozenset[int] = frozenset()


def record(trial: PairTrial, passed: Mapping[Pair, bool]) -> PairTrial:
    """Add the results of a round."""
    results = {ends: list(counts) for ends, counts in trial.results.items()}
    for ends, good in passed.items():
        results.setdefault(ends, [0, 0])[not good] += 1
    return replace(trial, rounds=trial.rounds + 1, results=results)


def find(
    n_nodes: int, bad: set[int] | frozenset[int] = NOBODY, fails: Callable[[Pair], bool] | None = None
) -> Faulty:
    """Run all rounds against faulty nodes, and links that fail when they are asked."""
    trial = PairTrial(n_nodes=n_nodes)
    while pairs := next_round(trial):
        nodes = [node for ends in pairs for node in ends]
        assert len(nodes) == len(set(nodes)), "a node is in one test at a time"
        trial = record(trial, {ends: bad.isdisjoint(ends) and not (fails and fails(ends)) for ends in pairs})
    return verdict(trial)


def ring_link(n_nodes: int, at: int) -> Pair:
    return pair(at, (at + 1) % n_nodes)


@pytest.mark.parametrize("n_nodes", range(2, 65))
def test_a_healthy_job_takes_the_rings_rounds_and_accuses_nobody(n_nodes: int) -> None:
    found = find(n_nodes)
    assert (found.nodes, found.links, found.unresolved) == ((), (), ())
    assert found.rounds == (1 if n_nodes == 2 else 2 + n_nodes % 2)


@pytest.mark.parametrize("n_nodes", range(4, 65))
def test_every_single_bad_node_is_named_alone(n_nodes: int) -> None:
    for bad in range(n_nodes):
        found = find(n_nodes, {bad})
        assert (found.nodes, found.links, found.unresolved) == ((bad,), (), ())
        assert found.rounds <= 4 + n_nodes % 2


@pytest.mark.parametrize("n_nodes", range(4, 65))
def test_every_single_bad_link_of_the_ring_is_named_alone(n_nodes: int) -> None:
    for at in range(n_nodes):
        bad = ring_link(n_nodes, at)
        found = find(n_nodes, fails=lambda ends, bad=bad: ends == bad)  # type: ignore[misc]
        assert (found.nodes, [link.ends for link in found.links], found.unresolved) == ((), [bad], ())
        assert found.rounds <= 4 + n_nodes % 2


@pytest.mark.parametrize("n_nodes", [*range(4, 65, 2), 512, 4096])
def test_up_to_a_quarter_of_bad_nodes_take_four_rounds_and_one_among_themselves(n_nodes: int) -> None:
    for seed in range(10 if n_nodes < 512 else 3):
        bad = set(random.Random(seed).sample(range(n_nodes), n_nodes // 4))
        found = find(n_nodes, bad)
        assert (set(found.nodes), found.links, found.unresolved) == (bad, (), ())
        assert found.rounds <= 5


@pytest.mark.parametrize("share", [0.5, 0.3, 0.1])
@pytest.mark.parametrize("n_nodes", [4, 5, 6, 7, 8, 12, 16, 32, 64, 256])
def test_no_healthy_node_is_accused_where_the_network_is_in_two_parts(n_nodes: int, share: float) -> None:
    """Such as two pools of machines between which there is no InfiniBand; ranks are spread over both by chance."""
    for seed in range(50 if n_nodes < 100 else 5):
        part = set(random.Random(seed).sample(range(n_nodes), max(2, int(share * n_nodes))))
        found = find(n_nodes, fails=lambda ends, part=part: len(part.intersection(ends)) == 1)  # type: ignore[misc]
        assert found.nodes == ()
        assert found.links or found.unresolved or n_nodes == 4
        assert all(len(part.intersection(ends)) == 1 for ends in found.unresolved)
        assert found.rounds <= 9


@pytest.mark.parametrize("n_nodes", [4, 5, 6, 7, 8, 9, 31, 64, 65, 512, 4095, 4096])
def test_many_faults_of_both_kinds_accuse_no_healthy_node_and_no_healthy_link(n_nodes: int) -> None:
    for seed in range(200 if n_nodes < 100 else 5 if n_nodes < 1000 else 2):
        dice = random.Random(seed)
        bad = set(dice.sample(range(n_nodes), dice.randint(0, n_nodes // 2)))
        links = {
            ring_link(n_nodes, at) for at in dice.sample(range(n_nodes), dice.randint(0, max(1, n_nodes // 8)))
        }
        found = find(n_nodes, bad, lambda ends, links=links: ends in links)  # type: ignore[misc]
        assert set(found.nodes) <= bad
        assert {link.ends for link in found.links} <= links
        assert found.rounds <= MAX_ROUNDS


def test_half_of_the_nodes_bad_is_still_exact() -> None:
    bad = set(random.Random(1).sample(range(4096), 2048))
    assert set(find(4096, bad).nodes) == bad


def test_bad_nodes_opposite_each_other_spoil_every_edge_of_the_ring_and_are_named_all_the_same() -> None:
    assert find(4, {0, 2}).nodes == (0, 2)


def test_of_two_nodes_neither_is_accused_and_their_only_pair_has_a_second_chance() -> None:
    found = find(2, {1})
    assert (found.nodes, found.unresolved, found.rounds) == ((), ((0, 1),), 2)
    answers = iter([True, False, False])
    found = find(2, fails=lambda ends: next(answers))
    assert [(link.failed, link.tests) for link in found.links] == [(1, 3)]
    assert not found.unresolved


def test_when_nobody_is_well_nobody_is_accused() -> None:
    found = find(6, set(range(6)))
    assert found.nodes == ()
    assert found.unresolved


def test_a_link_that_fails_now_and_then_keeps_its_rate() -> None:
    answers = iter([True, False, True])  # fails, passes, fails
    found = find(8, fails=lambda ends: ends == (0, 1) and next(answers))
    assert [(link.ends, link.failed, link.tests) for link in found.links] == [((0, 1), 2, 3)]


def test_a_node_both_of_whose_ring_links_are_bad_is_not_accused_for_them() -> None:
    found = find(8, fails=lambda ends: ends in {(2, 3), (3, 4)})
    assert found.nodes == ()
    assert {link.ends for link in found.links} == {(2, 3), (3, 4)}


RAILS = 8


def find_on_rails(n_nodes: int, fails: Callable[[Pair, int], bool]) -> Faulty:
    """The same with several rails, which are all tested when a pair is."""
    trials = [PairTrial(n_nodes=n_nodes) for _ in range(RAILS)]
    while pairs := next_round(*trials):
        nodes = [node for ends in pairs for node in ends]
        assert len(nodes) == len(set(nodes)), "a node is in one test at a time"
        trials = [
            record(trial, {ends: not fails(ends, rail) for ends in pairs}) for rail, trial in enumerate(trials)
        ]
    return verdict(*trials)


def nothing_else(found: Faulty) -> bool:
    """Whether only what was asked for before is named."""
    return sum(map(len, (found.nodes, found.rails, found.links, found.unresolved))) == 1


@pytest.mark.parametrize("n_nodes", range(4, 17))
def test_every_single_bad_rail_of_a_node_is_named_alone(n_nodes: int) -> None:
    for bad in range(n_nodes):
        for rail in range(RAILS):
            found = find_on_rails(n_nodes, lambda ends, at, bad=bad, rail=rail: bad in ends and at == rail)  # type: ignore[misc]
            assert found.rails == ((bad, (rail,)),)
            assert nothing_else(found)
            assert found.rounds <= 4 + n_nodes % 2


@pytest.mark.parametrize("n_nodes", range(4, 17))
def test_a_node_that_is_bad_on_all_rails_is_a_bad_node(n_nodes: int) -> None:
    for bad in range(n_nodes):
        found = find_on_rails(n_nodes, lambda ends, at, bad=bad: bad in ends)  # type: ignore[misc]
        assert found.nodes == (bad,)
        assert nothing_else(found)


@pytest.mark.parametrize("n_nodes", range(4, 17))
def test_every_single_bad_way_between_two_neighbours_is_named_with_its_rail(n_nodes: int) -> None:
    for start in range(n_nodes):
        bad = ring_link(n_nodes, start)
        for rail in range(RAILS):
            found = find_on_rails(n_nodes, lambda ends, at, bad=bad, rail=rail: ends == bad and at == rail)  # type: ignore[misc]
            assert [(link.ends, link.rails) for link in found.links] == [(bad, (rail,))]
            assert nothing_else(found)
        found = find_on_rails(n_nodes, lambda ends, at, bad=bad: ends == bad)  # type: ignore[misc]
        assert [(link.ends, link.rails) for link in found.links] == [(bad, ())]
        assert nothing_else(found)


@pytest.mark.parametrize("n_nodes", [4, 5, 8, 9, 16, 33, 64])
def test_many_faults_of_nodes_rails_and_ways_accuse_nothing_that_is_healthy(n_nodes: int) -> None:
    for seed in range(20):
        dice = random.Random(seed)
        nodes = {
            (node, rail)
            for node in dice.sample(range(n_nodes), dice.randint(0, n_nodes // 4))
            for rail in dice.sample(range(RAILS), dice.randint(1, RAILS))
        }
        links = {
            (ring_link(n_nodes, at), dice.randrange(RAILS))
            for at in dice.sample(range(n_nodes), dice.randint(0, max(1, n_nodes // 8)))
        }

        def fails(ends: Pair, rail: int, nodes: set = nodes, links: set = links) -> bool:
            return any((node, rail) in nodes for node in ends) or (ends, rail) in links

        found = find_on_rails(n_nodes, fails)
        assert {(node, rail) for node, rails in found.rails for rail in rails} <= nodes
        assert {(node, rail) for node in found.nodes for rail in range(RAILS)} <= nodes
        assert {(link.ends, rail) for link in found.links for rail in link.rails or range(RAILS)} <= links


def test_nodes_that_are_left_are_tested_also_where_a_lost_one_would_come_first() -> None:
    trial = PairTrial(n_nodes=3, rounds=1, lost=frozenset({1}))
    assert next_round(trial) == ((0, 2),)
    half = PairTrial(n_nodes=5, rounds=3, lost=frozenset({2}), results={(0, 1): [1, 0], (3, 4): [0, 1]})
    assert {pair(*ends) for ends in next_round(half)} == {(0, 3), (1, 4)}
