"""The ranks that the coordinator gives to workers are those that torchrun's agents settle among themselves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.membership.world import World
from trainer_launch.membership import protocol as msg
from trainer_launch.membership.protocol import MAX_NODES

CASES = {
    "alike": [(8, "default"), (8, "default"), (8, "default")],
    "uneven": [(1, "default"), (8, "default"), (3, "default")],
    "roles": [(2, "actor"), (4, "learner"), (1, "actor"), (1, ""), (3, "learner")],
    "one": [(4, "default")],
}


def formed(nodes):
    """What the coordinator tells nodes of so many workers and these roles, each rank's first and its world."""
    world = World(len(nodes))
    peers = [world.call(rank, workers=workers, role=role) for rank, (workers, role) in enumerate(nodes)]
    world.join(*peers)
    told = [world.last(peer, msg.Formed) for peer in peers]
    return [(f.first_rank, f.world_size, f.first_role_rank, f.role_world_size) for f in told]


@pytest.mark.torch
@pytest.mark.parametrize("nodes", CASES.values(), ids=CASES)
def test_ranks_are_those_of_torchrun(nodes):
    from torch.distributed import HashStore
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    store = HashStore()

    def agent(rank):
        spec = SimpleNamespace(local_world_size=nodes[rank][0], role=nodes[rank][1])
        return SimpleElasticAgent._assign_worker_ranks(None, store, rank, len(nodes), spec)

    with ThreadPoolExecutor(len(nodes)) as pool:
        ranked = pool.map(agent, range(len(nodes)))
    firsts = [workers[0] for workers in ranked]
    assert formed(nodes) == [(w.global_rank, w.world_size, w.role_rank, w.role_world_size) for w in firsts]


def test_roles_are_numbered_apart_and_in_the_order_of_nodes():
    assert formed(CASES["roles"]) == [(0, 11, 0, 3), (2, 11, 0, 7), (6, 11, 2, 3), (7, 11, 0, 1), (8, 11, 4, 7)]


def test_ranks_are_unknown_where_a_node_has_not_said_how_many_workers_it_has():
    assert formed([(8, "default"), (0, "")]) == [(0, 0, 0, 0)] * 2


def test_a_pod_that_comes_back_with_fewer_workers_moves_the_ranks_after_it():
    world = World(3)
    zero, one, two = (world.call(rank, workers=8) for rank in range(3))
    world.join(zero, one, two)
    assert world.last(two, msg.Formed).first_rank == 16
    back = world.call(1, incarnation="new", workers=4)
    world.join(zero, back, two)
    assert [world.last(peer, msg.Formed).first_rank for peer in (zero, back, two)] == [0, 8, 12]
    assert world.last(back, msg.Formed).world_size == 20


def test_the_ranks_of_the_largest_job_fit_into_a_message():
    most = MAX_NODES * msg.MAX_RANKS
    told = msg.Formed(1, 0, MAX_NODES, 0, False, None, most, most, most, most)
    assert msg.parse(msg.render(told)) == told
