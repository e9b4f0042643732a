"""The ranks that the coordinator gives to workers are those that torchrun's agents settle among themselves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.membership.world import World
from trainer_launch.membership import protocol as msg
from trainer_launch.model.codec import MAX_NODES, MAX_RANKS

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
    most = MAX_NODES * MAX_RANKS
    told = msg.Formed(1, 0, MAX_NODES, 0, False, None, most, most, most, most)
    assert msg.parse(msg.render(told)) == told


RACKS = {0: "b/rack-1", 1: "a/rack-10", 2: "a/rack-2", 3: "", 4: "a/rack-10"}


def ranked(world, peers):
    """The nodes by group rank."""
    told = {rank: world.last(peer, msg.Formed) for rank, peer in peers.items()}
    return sorted(peers, key=lambda rank: told[rank].group_rank)


def test_nodes_are_ranked_by_label_part_by_part_and_who_has_none_comes_last():
    world = World(5)
    peers = {rank: world.call(rank, workers=2, label=RACKS[rank]) for rank in (4, 2, 0, 3, 1)}
    world.join(*peers.values())
    assert ranked(world, peers) == [2, 1, 4, 0, 3]
    assert world.last(peers[0], msg.Formed).first_rank == 6
    assert "ranks by topology: node 2 (pod-2) at a/rack-2, node 1 (pod-1) at a/rack-10" in "".join(world.said)
    assert "node 3 (pod-3) has no topology label, and the last ranks; set --topology-label" in "".join(world.said)


def test_without_any_label_ranks_follow_node_numbers_and_nobody_is_named():
    world = World(2)
    peers = {rank: world.call(rank, workers=1) for rank in (1, 0)}
    world.join(*peers.values())
    assert ranked(world, peers) == [0, 1]
    assert "topology" not in "".join(world.said)


def test_a_node_that_stays_keeps_its_order_while_others_go_and_come_back():
    world = World(2, 4, shrink_after_s=0.0)
    peers = {rank: world.call(rank, workers=1, label=RACKS[rank]) for rank in (0, 1, 2, 4)}
    world.join(*peers.values())
    assert ranked(world, peers) == [2, 1, 4, 0]
    world.open_store()
    world.gone(peers.pop(1))
    world.join(*peers.values())
    world.pass_time(30)
    assert ranked(world, peers) == [2, 4, 0]
    world.open_store()
    peers[1] = world.call(1, workers=1, label=RACKS[1])
    world.join(peers[1], after=0)
    world.pass_time(30)
    world.join(*(peers[rank] for rank in (0, 2, 4)))
    world.pass_time(30)
    assert ranked(world, peers) == [2, 1, 4, 0]
