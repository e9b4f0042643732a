"""Whose bits differ: only cards of one kind are compared, and only a majority accuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some
from msgspec.structs import replace

from trainer_launch.model.findings import Checksum, Fault, Scope, Status
from trainer_launch.preflight.gpu_collect import GpuFacts, GpuTest
from trainer_launch.preflight.gpu_judgement import differing

H200, H100 = "NVIDIA H200, driver 580", "NVIDIA H100, driver 580"


def node(*values: str, kind: str = H200) -> list[Checksum]:
    return [Checksum(gpu, f"GPU-{gpu}", kind, value) for gpu, value in enumerate(values)]


def test_the_card_that_differs_is_named_with_its_node() -> None:
    (found,) = differing({"node 0 (a)": node("1", "1"), "node 1 (b)": node("1", "2")})
    assert (found.status, found.fault, found.scope) == (Status.FAIL, Fault.NODE, Scope.GPU)
    assert found.subject == "node 1 (b), GPU 1"
    assert found.text.startswith("GPU 1 of node 1 (b) (GPU-1) computes wrong results: 3 others of its kind")


def test_alone_it_is_named_by_its_number() -> None:
    (found,) = differing({"": node("1", "2", "1")})
    assert found.subject == "GPU 1"


def test_other_cards_and_other_libraries_may_come_to_other_bits() -> None:
    (found,) = differing({"a": node("1", "1"), "b": node("2", "2", kind=H100)})
    assert (found.status, found.scope) == (Status.PASS, Scope.JOB)


@pytest.mark.parametrize(
    "own", [{"settings": "cdef0123"}, {"SMs": "114"}, {"cublas": "12.9"}, {"model": "NVIDIA H20"}]
)
def test_a_card_with_other_libraries_or_settings_may_come_to_other_bits(own: dict[str, str]) -> None:
    usual = {"model": "NVIDIA H200", "SMs": "132", "settings": "01234567", "torch": "2.11", "cublas": "13.0"}
    tests = [GpuTest(gpu=gpu, checksum="1", facts=usual) for gpu in range(3)]
    tests.append(GpuTest(gpu=3, checksum="2", facts=usual | own))
    (found,) = differing({"a": GpuFacts(trouble="", driver="580", tests=tuple(tests)).checksums})
    assert found.status is Status.PASS
    tests[3] = replace(tests[3], facts=usual)
    (found,) = differing({"a": GpuFacts(trouble="", driver="580", tests=tuple(tests)).checksums})
    assert (found.status, found.subject, found.remedy) == (Status.FAIL, "a, GPU 3", "DRAIN")


def test_without_a_majority_nobody_is_accused() -> None:
    (found,) = differing({"a": node("1"), "b": node("2")})
    assert (found.status, found.subject, found.scope) == (Status.FAIL, "", Scope.JOB)
    assert "no value has a majority" in found.text


def test_nothing_to_compare_says_nothing() -> None:
    assert list(differing({"a": [], "b": []})) == []


@given(some.lists(some.lists(some.sampled_from("1112"), max_size=4), max_size=6))
def test_who_is_accused_is_always_in_the_minority(values: list[list[str]]) -> None:
    nodes = {f"node {number} (h{number})": node(*its) for number, its in enumerate(values)}
    every = [value for its in values for value in its]
    for found in differing(nodes):
        if found.scope is Scope.GPU:
            assert found.status is Status.FAIL
            assert 2 * every.count(str(found.measured)) < len(every)
