"""Whether GPUs deliver enough: no healthy card is accused, a bad one always is, a slow job is no slow card."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_launch.model.findings import Basis, Fault, Finding, Measure, Scope, Status
from trainer_launch.preflight.gpu_checks import slow_gpus as findings
from trainer_launch.preflight.thresholds import Reference, Table, load_table, table

H200, UNKNOWN = "NVIDIA H200", "Some Other GPU"
NODE_2 = "node 2 (host-2)"
OWN = table([Reference("M", "gemm", 100.0, "TFLOP/s", "for this test")])


def cards(values: Sequence[float], model: str = "M", per_node: int = 1) -> list[list[Measure]]:
    """Nodes with so many cards each."""
    made = [Measure("gemm", value, "TFLOP/s", model, at % per_node) for at, value in enumerate(values)]
    return [made[at : at + per_node] for at in range(0, len(made), per_node)]


def judged(measures: list[list[Measure]], known: Table = OWN) -> list[Finding]:
    return findings([f"node {n} (host-{n})" for n in range(len(measures))], measures, known)


def failed(found: Sequence[Finding]) -> list[str]:
    return [one.subject for one in found if one.status is Status.FAIL]


def warned(found: Sequence[Finding]) -> list[str]:
    return [one.subject for one in found if one.status is Status.WARN]


def test_a_card_at_half_speed_is_named_with_its_node_and_what_it_was_compared_with() -> None:
    values = [100.0] * 16
    values[11] = 50.0
    (one,) = [f for f in judged(cards(values, per_node=8)) if f.status is Status.FAIL]
    assert (one.subject, one.scope, one.fault) == ("node 1 (host-1), GPU 3", Scope.GPU, Fault.NODE)
    assert (one.check, one.measured, one.expected, one.basis) == ("gemm", 50.0, 100.0, Basis.BOTH)
    assert "50% of the reference 100 and 50% of what the others of its model do" in one.text


def test_a_node_whose_cards_are_all_slow_is_named_as_a_node() -> None:
    (one,) = [f for f in judged(cards([100.0] * 8 + [60.0] * 4, per_node=4)) if f.status is Status.FAIL]
    assert (one.subject, one.scope) == ("node 2 (host-2)", Scope.NODE)
    assert len(one.evidence) == 4


def test_when_all_are_slow_alike_the_job_is_told_once_and_nobody_is_accused() -> None:
    found = judged(cards([62.0 + n % 3 / 10 for n in range(64)], per_node=8))
    assert failed(found) == []
    (one,) = found
    assert (one.status, one.scope, one.basis, one.subject) == (Status.WARN, Scope.JOB, Basis.ABSOLUTE, "")
    assert "all 64 GPUs" in one.text
    assert "62% of the reference" in one.text


def test_where_nobody_reaches_the_reference_a_card_that_is_a_little_behind_only_warns() -> None:
    limited = [80.0] * 15  # by a lower power limit
    found = judged(cards([*limited, 73.0], per_node=8))
    assert (failed(found), warned(found)) == ([], ["node 1 (host-1), GPU 7", ""])
    assert failed(judged(cards([*limited, 40.0], per_node=8))) == ["node 1 (host-1), GPU 7"]


def test_slower_than_the_others_but_as_fast_as_it_should_be_only_warns() -> None:
    found = judged(cards([110.0] * 7 + [95.0]))
    assert failed(found) == []
    assert warned(found) == ["node 7 (host-7), GPU 0"]
    assert found[0].basis is Basis.PEER


def test_an_unknown_model_is_compared_with_its_peers_alone_and_said_to_be_unknown() -> None:
    well = judged(cards([50.0] * 4, UNKNOWN))
    assert [one.status for one in well] == [Status.UNKNOWN]
    assert "no reference tells of this model" in well[0].text
    found = judged(cards([50.0] * 7 + [25.0], UNKNOWN))
    assert warned(found) == ["node 7 (host-7), GPU 0"]
    assert failed(found) == []


def test_a_single_card_is_judged_by_the_reference_and_named_in_the_evidence() -> None:
    assert [one.status for one in judged(cards([99.0]))] == [Status.PASS]
    (one,) = judged(cards([50.0]))
    assert (one.status, one.scope, one.evidence) == (
        Status.WARN,
        Scope.JOB,
        ("node 0 (host-0), GPU 0: 50 TFLOP/s",),
    )
    assert [one.status for one in judged(cards([50.0], UNKNOWN))] == [Status.UNKNOWN]


def test_of_two_cards_the_slow_one_stands_out() -> None:
    assert failed(judged(cards([50.0, 100.0]))) == ["node 0 (host-0), GPU 0"]
    assert warned(judged(cards([100.0, 50.0], UNKNOWN))) == ["node 1 (host-1), GPU 0"]


def together(*rates: float, gpus: int = 8) -> list[list[Measure]]:
    """Nodes whose GPUs add together at these rates."""
    return [[Measure(f"allreduce-{gpus}", rate, "GB/s", H200, None)] for rate in rates]


def test_a_node_whose_links_are_slow_is_named_by_its_reference_and_by_the_other_nodes() -> None:
    (one,) = judged(together(468.0, 470.0, 210.0, 465.0), load_table(None))
    assert (one.check, one.subject, one.scope, one.fault) == ("allreduce", NODE_2, Scope.NODE, Fault.NODE)
    assert one.text.startswith(
        f"{NODE_2} delivers 210 GB/s (allreduce-8, NVIDIA H200): 45% of the reference 467.6 "
    )
    assert one.remedy == "DRAIN"


def test_nodes_without_nvls_or_with_fewer_gpus_are_not_faulty_for_that() -> None:
    without = judged(together(*[365.0] * 4), load_table(None))  # NVLS is off: each at 78 % of what it gives
    assert [one.status for one in without] == [Status.PASS]
    slower_job = judged(together(*[300.0] * 4), load_table(None))
    assert [(one.status, one.scope) for one in slower_job] == [(Status.WARN, Scope.JOB)]
    halves = judged([*together(*[468.0] * 3), *together(*[250.0] * 3, gpus=4)], load_table(None))
    assert failed(halves) == warned(halves) == []
    assert [one.status for one in judged(together(9.0, gpus=4), load_table(None))] == [Status.SKIPPED]


def test_a_card_that_is_slow_only_when_it_is_hot_is_held_against_the_same_reference() -> None:
    hot = [[Measure("gemm-burn", value, "TFLOP/s", H200, gpu) for gpu, value in enumerate((660.0, 400.0, 655.0))]]
    (one,) = judged(hot, load_table(None))
    assert (one.check, one.subject, one.fault) == ("gemm", "node 0 (host-0), GPU 1", Fault.NODE)


healthy = st.lists(st.floats(0.93, 1.08), min_size=1, max_size=80)


@given(healthy, st.sampled_from([1, 4, 8]))
def test_no_healthy_card_is_accused_whatever_the_noise(noise: list[float], per_node: int) -> None:
    assert failed(judged(cards([100 * one for one in noise], per_node=per_node))) == []


@given(st.lists(st.floats(0.97, 1.03), min_size=1, max_size=80), st.sampled_from(["M", UNKNOWN]))
def test_a_tight_cluster_is_not_flagged_at_all(noise: list[float], model: str) -> None:
    found = judged(cards([100 * one for one in noise], model))
    assert failed(found) == warned(found) == []


@given(st.lists(st.floats(0.95, 1.05), min_size=2, max_size=80), st.data())
def test_a_card_at_half_speed_is_always_named_also_where_most_are_bad(
    noise: list[float], data: st.DataObject
) -> None:
    bad = data.draw(st.sets(st.integers(0, len(noise) - 1), min_size=1, max_size=len(noise) - 1))
    values = [100 * one * (0.5 if at in bad else 1) for at, one in enumerate(noise)]
    assert failed(judged(cards(values))) == [f"node {at} (host-{at}), GPU 0" for at in sorted(bad)]


@given(st.lists(st.floats(0.97, 1.03), min_size=3, max_size=80), st.data())
def test_of_an_unknown_model_the_minority_at_half_speed_is_always_named(
    noise: list[float], data: st.DataObject
) -> None:
    bad = data.draw(st.sets(st.integers(0, len(noise) - 1), min_size=1, max_size=(len(noise) - 1) // 2))
    values = [100 * one * (0.5 if at in bad else 1) for at, one in enumerate(noise)]
    assert warned(judged(cards(values, UNKNOWN))) == [f"node {at} (host-{at}), GPU 0" for at in sorted(bad)]


def test_thousands_of_healthy_cards_accuse_nobody_and_are_one_sentence() -> None:
    dice = random.Random(1)
    found = judged(cards([dice.gauss(100, 2) for _ in range(32_768)], per_node=8))
    assert failed(found) == []
    assert len([one for one in found if one.scope is Scope.JOB]) <= 1


BUILT_IN = load_table(None)


@pytest.mark.parametrize("rate", [33.0, 5.0])
@pytest.mark.parametrize(("n_cards", "n_far"), [(8, 4), (8, 8), (8, 2), (2, 1), (1, 1)])
def test_the_cards_that_are_far_from_the_pods_cpus_are_not_faulty(n_cards: int, n_far: int, rate: float) -> None:
    """Where all CPUs are of one socket, cards of the other one share the way between both; never for a tenth.

    Where they are of both, a card's test runs on either by chance.
    """
    values = [[Measure("h2d", 55.0, "GB/s", H200, gpu) for gpu in range(n_cards)] for _ in range(8)]
    far = [Measure("h2d", rate if gpu < n_far else 55.0, "GB/s", H200, gpu) for gpu in range(n_cards)]
    found = judged([*values, far], BUILT_IN)
    assert (len(failed(found)), len(warned(found))) == ((0, 1) if rate == 33.0 else (1, 0))


def h200(name: str, values: Sequence[float], unit: str) -> list[list[Measure]]:
    return [[Measure(name, value, unit, H200, 0)] for value in values]


def test_a_power_capped_h200_is_healthy_in_a_burst_and_sustained() -> None:
    """A check against the burst's 776 TFLOP/s at -5 % fails every healthy card that is warm."""
    for value in (776.0, 694.0, 665.0, 0.997 * 665):
        assert failed(judged(h200("gemm", [value] * 8, "TFLOP/s"), BUILT_IN)) == []
        assert warned(judged(h200("gemm", [value] * 8, "TFLOP/s"), BUILT_IN)) == []


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("hbm-copy", 4170.0, Status.FAIL),
        ("h2d", 55.1, Status.WARN),  # it may be far from its pod's CPUs
        ("d2h", 55.1, Status.WARN),
    ],
)
def test_what_a_healthy_h200_gave_passes_and_half_of_it_does_not(name: str, value: float, status: Status) -> None:
    found = judged(h200(name, [value] * 4, "GB/s"), BUILT_IN)
    assert [one.status for one in found] == [Status.PASS]
    found = judged(h200(name, [value, value, value / 2], "GB/s"), BUILT_IN)
    assert [(one.subject, one.status) for one in found] == [("node 2 (host-2), GPU 0", status)]
