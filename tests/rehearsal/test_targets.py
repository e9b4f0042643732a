"""Whom a fault is for."""

from __future__ import annotations

import pytest

from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.faults import grammar
from trainer_launch.rehearsal.faults.requests import target

NODES = ("job-node-0-0", "job-node-0-1", "job-node-0-2")
PODS = (*NODES, "job-launcher-0-0")


@pytest.mark.parametrize(
    ("text", "pod"),
    [
        ("kill pod", "job-node-0-2"),
        ("kill pod node=0", "job-node-0-0"),
        ("kill pod pod=job-launcher-0-0", "job-launcher-0-0"),
        ("kill pod pod=launcher-0-0", "job-launcher-0-0"),
        ("kill pod pod=node-0-1", "job-node-0-1"),
        ("delay dns 3s", None),
        ("add node", None),
        ("scale workers=1", None),
    ],
)
def test_a_fault_finds_its_pod(text: str, pod: str | None) -> None:
    assert target(grammar.parse(text), NODES, PODS) == pod


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("kill pod node=3", ["no node 3", "nodes 0 to 2"]),
        ("kill pod pod=job-node-0-3", ["no pod job-node-0-3", "did you mean job-node-0-"]),
        ("kill pod pod=zebra", ["no pod zebra", "job-node-0-0"]),
        ("kill pod pod=0", ["0 is ambiguous", "full name"]),
    ],
)
def test_a_pod_that_the_job_has_not_is_refused(text: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        target(grammar.parse(text), NODES, PODS)
    for part in parts:
        assert part in str(refused.value)
