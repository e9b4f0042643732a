"""A pod that dies again and again, as it does where memory.oom.group ends the launcher with its workers."""

from __future__ import annotations

import pytest

from tests.membership.world import World
from trainer_launch.membership import protocol as msg

RESTARTS = 3


NODES = (0, 1)


@pytest.fixture
def world():
    return World(2, 2, max_restarts=RESTARTS)


def survived(world, *losses_s, node=1, leaves=False, peer_fails_first=False):
    """How often a job of two nodes goes on although the pod of a node dies so long after its workers' start."""
    peers = world.come(*NODES)
    for count, after_s in enumerate(losses_s):
        world.open_store()
        world.pass_time(after_s)
        other, lost = peers[1 - node], peers[node]
        if peer_fails_first:
            world.say(other, msg.Failed(world.number, 1 - node, 1, None, lost_peer=True))
        if leaves:
            world.say(lost, msg.Leave("asked to stop"))
        world.gone(lost)
        world.join(other)
        world.pass_time(3.0)
        if world.is_over:
            return count
        peers[node] = world.call(node)
        world.join(peers[node])
        world.pass_time(1.0)
    return len(losses_s)


@pytest.mark.parametrize(
    "peer_fails_first", [False, True], ids=["its end is noticed first", "its peer fails first"]
)
@pytest.mark.parametrize("after_s", [1.0, 45.0, 3600.0])
def test_a_pod_that_dies_at_the_same_stage_each_time_costs_the_budget(world, after_s, peer_fails_first):
    times = [after_s * share for share in (1.0, 1.1, 0.95, 1.05, 1.0, 0.98, 1.0, 1.0, 1.0)]
    free = 4
    assert survived(world, *times, peer_fails_first=peer_fails_first) == free + RESTARTS
    end = world.state.end
    assert "the pod of node 1 (pod-1) died 8 times in a row" in end.reason
    assert end.reason.endswith("see whether it was OOMKilled; the restart budget is used up (3 restarts)")


def test_each_loss_that_costs_a_restart_is_logged(world):
    survived(world, *[60.0] * 5)
    assert any("node 1 (pod-1) died 5 times in a row, now 60 s after" in text for text in world.said)


@pytest.mark.parametrize(
    ("losses_s", "leaves"),
    [
        ([100.0, 700.0, 60.0, 1500.0, 90.0, 900.0, 300.0, 2000.0, 150.0], False),
        ([60.0] * 9, True),
    ],
    ids=["a spot machine that is taken at any time", "a pod that is asked to stop each time"],
)
def test_preemption_costs_nothing(world, losses_s, leaves):
    assert survived(world, *losses_s, leaves=leaves) == len(losses_s)
    assert world.state.restarts == 0


def test_losses_of_different_nodes_are_not_one_pods(world):
    peers = world.come(*NODES)
    for turn in range(9):
        node = turn % 2
        world.open_store()
        world.pass_time(60.0)
        world.gone(peers[node])
        world.join(peers[1 - node])
        world.pass_time(3.0)
        peers[node] = world.call(node)
        world.join(peers[node])
        world.pass_time(1.0)
    assert not world.is_over
    assert world.state.restarts == 0
