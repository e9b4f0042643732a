"""Flags over what the platform said."""

from __future__ import annotations

import pytest

from trainer_launch.errors import UsageError
from trainer_launch.model import Endpoint, Job, NodeRange, Origin, Rendezvous
from trainer_launch.overlay import overlay, with_minimum

TOLD = Job(
    contract="trainer-v2-torch",
    nodes=NodeRange(2, 2),
    node_rank=1,
    nproc_per_node=2,
    world_size=4,
    is_coordinator=False,
    coordinator=Endpoint("zero", 29500),
    rendezvous=Rendezvous(kind="static"),
)


def test_nothing_given_changes_nothing() -> None:
    assert overlay(TOLD, {"tee": "3"}, Origin.FLAG) is TOLD


def test_sizes_replace_what_was_told_and_the_world_follows() -> None:
    job = overlay(TOLD, {"nnodes": "3", "nproc_per_node": "5"}, Origin.FLAG)
    assert (job.nodes, job.nproc_per_node, job.world_size) == (NodeRange(3, 3), 5, 15)
    assert overlay(TOLD, {"nnodes": "1:3"}, Origin.FLAG).world_size is None


def test_a_rank_of_zero_makes_a_coordinator() -> None:
    assert overlay(TOLD, {"node_rank": "0"}, Origin.FLAG).is_coordinator is True
    assert overlay(TOLD, {"max_restarts": "0"}, Origin.FLAG).is_coordinator is False


def test_half_an_address_keeps_the_other_half() -> None:
    assert overlay(TOLD, {"master_port": "1234"}, Origin.FLAG).coordinator == Endpoint("zero", 1234)
    bare = overlay(Job(contract="unknown"), {"master_addr": "there"}, Origin.FLAG)
    assert bare.coordinator == Endpoint("there", 29500)


def test_a_dynamic_rendezvous_takes_torchs_default_port_and_a_static_one_needs_its_own() -> None:
    given = {"rdzv_backend": "c10d", "rdzv_endpoint": "there"}
    dynamic = overlay(TOLD, given, Origin.COMMAND).rendezvous
    assert dynamic is not None
    assert dynamic.endpoint == Endpoint("there", 29400)
    with pytest.raises(UsageError, match="--rdzv-endpoint"):
        overlay(TOLD, {"rdzv_endpoint": "there"}, Origin.COMMAND)


def test_a_static_endpoint_is_where_the_nodes_meet() -> None:
    assert overlay(TOLD, {"rdzv_endpoint": "there:9"}, Origin.COMMAND).coordinator == Endpoint("there", 9)


def test_standalone_leaves_one_node_that_meets_nobody() -> None:
    job = overlay(TOLD, {"standalone": "1"}, Origin.COMMAND)
    assert (job.nodes, job.node_rank, job.coordinator, job.rendezvous) == (NodeRange(1, 1), 0, None, None)
    assert overlay(TOLD, {"standalone": "0"}, Origin.COMMAND).nodes == NodeRange(2, 2)


def test_each_given_option_is_remembered_with_where_it_came_from() -> None:
    (fact,) = overlay(TOLD, {"nnodes": "3"}, Origin.FLAG).facts
    assert (fact.name, fact.value, fact.origin) == ("--nnodes", "3", Origin.FLAG)


def test_a_minimum_lets_a_fixed_job_shrink() -> None:
    assert with_minimum(TOLD, None) is TOLD
    job = with_minimum(TOLD, 1)
    assert (job.nodes, job.world_size, job.facts[-1].name) == (NodeRange(1, 2), None, "--min-nodes")
    assert with_minimum(TOLD, 2).world_size == 4
    for least, told in ((3, TOLD), (1, Job(contract="x"))):
        with pytest.raises(UsageError, match="--min-nodes"):
            with_minimum(told, least)
