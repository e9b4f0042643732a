"""How many nodes train, and how many wait: by --spares, or where the platform has more nodes than --nodes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.planning.requests import MACHINE, given, request
from tests.refusals import refusal
from trainer_launch.model import Endpoint, Job, NodeRange, Origin, Rendezvous
from trainer_launch.model.errors import ContractError, LaunchError, UsageError
from trainer_launch.planning import engines
from trainer_launch.planning.job import overlay, place, with_spares

TOLD = Job(
    contract="trainer-v2-torch",
    nodes=NodeRange(3, 3),
    node_rank=2,
    nproc_per_node=2,
    world_size=6,
    is_coordinator=False,
    coordinator=Endpoint("job-node-0-0.job", 29500),
    rendezvous=Rendezvous(kind="static"),
    engine="torchrun",
)


def spared(job: Job, asked: int | None, **options: str) -> Job:
    return with_spares(overlay(job, options, Origin.FLAG), asked, job.nodes)


@pytest.mark.parametrize(
    ("told", "options", "asked", "nodes", "spares"),
    [
        (NodeRange(3, 3), {}, None, NodeRange(3, 3), 0),
        (NodeRange(3, 3), {}, 0, NodeRange(3, 3), 0),
        (NodeRange(3, 3), {}, 1, NodeRange(2, 2), 1),
        (NodeRange(1, 3), {}, 1, NodeRange(1, 2), 1),
        (NodeRange(3, 3), {"nnodes": "2"}, 1, NodeRange(2, 2), 1),
        (NodeRange(3, 3), {"nnodes": "2"}, None, NodeRange(2, 2), 1),
        (NodeRange(3, 3), {"nnodes": "2"}, 0, NodeRange(2, 2), 0),
        (NodeRange(3, 3), {"nnodes": "1"}, None, NodeRange(1, 1), 0),  # each node alone
        (NodeRange(3, 3), {"nnodes": "3"}, 2, NodeRange(3, 3), 2),
        (None, {"nnodes": "8"}, 1, NodeRange(8, 8), 1),
    ],
)
def test_spares_are_added_to_typed_nodes_and_taken_from_the_platforms(told, options, asked, nodes, spares) -> None:
    job = spared(replace(TOLD, nodes=told), asked, **options)
    assert (job.nodes, job.spares) == (nodes, spares)
    assert job.world_size == (None if nodes.fixed is None else nodes.max * 2)


@pytest.mark.parametrize(
    ("told", "asked", "says"),
    [
        (NodeRange(3, 3), 3, "--spares is 3, but the platform has 3 nodes (contract trainer-v2-torch); at least 1"),
        (NodeRange(2, 3), 2, "--spares is 2, but the platform has 3 nodes (contract trainer-v2-torch); at least 2"),
        (None, 1, "the number of nodes is unknown; set --nodes"),
    ],
)
def test_too_many_spares_are_one_clear_error(told, asked, says) -> None:
    assert says in refusal(lambda: spared(replace(TOLD, nodes=told), asked))


def test_a_rank_beyond_the_job_is_a_spares_and_no_higher_one() -> None:
    topology = place(spared(TOLD, 1), MACHINE)
    assert (topology.node_rank, topology.nodes, topology.pods) == (2, NodeRange(2, 2), 3)
    with pytest.raises(ContractError, match="at most 2 nodes and 1 spare; expected a rank from 0 to 2"):
        place(spared(replace(TOLD, node_rank=3), 1), MACHINE)


def test_with_spares_every_named_node_can_host_the_coordinator_and_one_node_is_not_alone() -> None:
    here = replace(MACHINE, hostname="job-node-0-2")
    plan = engines.plan(request("train.py", spared(TOLD, 1), host=here))
    hosting = given(plan.hosting)
    assert (hosting.spares, hosting.seat, given(hosting.seats).count) == (1, 2, 3)
    one = engines.plan(request("train.py", spared(TOLD, 2, nnodes="1"), host=here))
    assert given(one.membership).coordinator == TOLD.coordinator


@pytest.mark.parametrize("changes", [{"engine": "torchrun"}, {"engine": "plain"}])
def test_spares_without_our_coordinator_are_refused(changes) -> None:
    with pytest.raises(UsageError, match="--spares needs torch workers that meet"):
        engines.plan(request("train.py", spared(TOLD, 1), **changes))
    with pytest.raises(LaunchError, match="this node's rank is 2 but the job has 2 nodes"):
        engines.plan(request("train.py", spared(TOLD, None, nnodes="2"), **changes))


def test_the_refusal_of_spares_names_the_option_for_which_torchrun_starts_the_workers() -> None:
    with pytest.raises(UsageError, match=r"--spares needs .*--numa-binding node has torchrun bind .*; remove it$"):
        engines.plan(request("train.py", spared(TOLD, 1), env={"PET_NUMA_BINDING": "node"}))
