"""Flags over what the platform said."""

from __future__ import annotations

import pytest

from tests.contracts.pods import V2_TORCH, pod_of
from tests.planning.requests import MACHINE, given, request
from trainer_launch.contracts import read_job
from trainer_launch.model import Endpoint, Job, Member, NodeRange, Origin, Rendezvous
from trainer_launch.model.errors import UsageError
from trainer_launch.planning import engines
from trainer_launch.planning.job import overlay, place, with_minimum

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
    listed = Job(contract="pytorchjob-v1", members=(Member("job-worker-0"), Member("job-worker-1")))
    assert overlay(listed, {"master_port": "1234"}, Origin.FLAG).coordinator == Endpoint("job-worker-0", 1234)


def test_any_free_port_will_do_for_one_node_only() -> None:
    overlay(Job(contract="unknown", nodes=NodeRange(1, 1)), {"master_port": "0"}, Origin.COMMAND)
    with pytest.raises(UsageError, match="--master-port is '0'; expected a port from 1 to 65535"):
        overlay(TOLD, {"master_port": "0"}, Origin.COMMAND)


def test_a_dynamic_rendezvous_takes_torchs_default_port_and_a_static_one_needs_its_own() -> None:
    typed = {"rdzv_backend": "c10d", "rdzv_endpoint": "there"}
    assert given(overlay(TOLD, typed, Origin.COMMAND).rendezvous).endpoint == Endpoint("there", 29400)
    with pytest.raises(UsageError, match="--rdzv-endpoint"):
        overlay(TOLD, {"rdzv_endpoint": "there"}, Origin.COMMAND)


@pytest.mark.parametrize(
    ("told", "typed", "met_at"),
    [
        ({}, "--master-addr=there", "there:29500"),
        ({}, "--master-port=9", "job-node-0-0.job:9"),
        ({}, "--rdzv-endpoint=there:9", "there:9"),
        ({}, "--rdzv-endpoint=fd00::1:9", "[fd00::1]:9"),
        ({}, "--master-addr=[fd00::1]", "[fd00::1]:29500"),
        ({}, "--rdzv-endpoint=there:9 --master-addr=elsewhere", "there:9"),
        ({}, "--rdzv-backend=c10d --rdzv-endpoint=there", "there:29400"),
        ({}, "--rdzv-backend=c10d --rdzv-endpoint=there:9", "there:9"),
        ({}, "--rdzv-backend=c10d", "job-node-0-0.job:29500"),
        ({}, "--rdzv-id=x", "job-node-0-0.job:29500"),
        ({"PET_RDZV_ENDPOINT": "told:7"}, "--rdzv-id=x", "told:7"),
        ({"PET_RDZV_ENDPOINT": "told:7"}, "--master-addr=there", "there:7"),
        ({"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "told:7"}, "--master-addr=there", "there:7"),
    ],
)
def test_a_given_address_is_where_a_trainjobs_nodes_meet_whatever_the_platform_says(told, typed, met_at) -> None:
    job = read_job(pod_of(V2_TORCH | told, hostname="job-node-0-1"))
    plan = engines.plan(request(f"torchrun {typed} train.py", job))
    assert str(given(plan.membership).coordinator) == met_at
    assert str(given(plan.meeting)[1]) == met_at


def test_an_etcd_server_is_no_coordinator() -> None:
    job = overlay(TOLD, {"rdzv_backend": "etcd-v2", "rdzv_endpoint": "etcd:2379"}, Origin.COMMAND)
    assert place(job, MACHINE).coordinator == Endpoint("zero", 29500)
    assert given(job.rendezvous).endpoint == Endpoint("etcd", 2379)


def test_standalone_leaves_one_node_that_meets_nobody() -> None:
    job = overlay(TOLD, {"standalone": "1"}, Origin.COMMAND)
    assert (job.nodes, job.node_rank, job.coordinator, job.rendezvous) == (NodeRange(1, 1), 0, None, None)
    assert overlay(TOLD, {"standalone": "0"}, Origin.COMMAND).nodes == NodeRange(2, 2)


def test_a_minimum_lets_a_fixed_job_shrink() -> None:
    assert with_minimum(TOLD, None) is TOLD
    job = with_minimum(TOLD, 1)
    assert (job.nodes, job.world_size, job.facts[-1].name) == (NodeRange(1, 2), None, "--min-nodes")
    assert with_minimum(TOLD, 2).world_size == 4
    for least, told in ((3, TOLD), (1, Job(contract="x"))):
        with pytest.raises(UsageError, match="--min-nodes"):
            with_minimum(told, least)
