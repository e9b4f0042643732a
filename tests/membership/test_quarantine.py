"""Which nodes are not admitted again: those whose own evidence names them, and nobody who only looks guilty."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.membership.world import World
from trainer_launch.membership import protocol as msg
from trainer_launch.membership.quarantine import nodes_in
from trainer_launch.membership.state import JobPhase, status

ECC = "CUDA error: uncorrectable ECC error encountered"


def machine(rank):
    return f"machine-{rank}"


def running(nodes=2, spares=1, **fields):
    """A job that runs, and its nodes' peers; the last ones are spares."""
    world = World(nodes, spares=spares, **{"max_restarts": 99, **fields})
    peers = {rank: call(world, rank) for rank in range(nodes + spares)}
    world.open_store()
    return world, peers


def call(world, rank, where=None, **fields):
    peer = world.call(rank, machine=where or machine(rank), **fields)
    world.join(peer)
    return peer


def fails(world, peers, rank, proof=ECC):
    """A node's worker fails, then all members join again."""
    number, before = world.number, members(world)
    world.say(peers[rank], msg.Failed(number, rank, None, 9))
    for key in sorted(before, key=lambda key: key == rank):
        join = msg.Join(world.incarnations[peers[key]], number, failed=key == rank)
        world.say(peers[key], replace(join, device_fault=proof if key == rank else ""))
    if world.phase is JobPhase.FORMED:
        world.open_store()


def members(world):
    return tuple(world.state.run.members)


def listed(world):
    return [(entry.host, entry.machine) for entry in status(world.state, world.now_s).quarantined]


def test_a_failed_device_quarantines_its_machine_and_the_spare_takes_over():
    world, peers = running()
    fails(world, peers, 1)
    refused = world.last(peers[1], msg.Refused)
    assert refused == msg.Quarantined(f"this node is quarantined: {ECC}", retry=False)
    assert peers[1] in world.cut
    assert (world.phase, members(world)) == (JobPhase.RUNNING, (0, 2))
    assert listed(world) == [("pod-1", "machine-1")]
    assert f"node 1 (pod-1) is quarantined: {ECC}" in world.said
    assert world.state.restarts == 1, "a failure costs a restart, whatever caused it"


def test_it_is_refused_again_while_the_job_can_do_without_and_admitted_on_another_machine():
    world, peers = running()
    fails(world, peers, 1)
    assert world.last(call(world, 1), msg.Quarantined)
    assert world.last(call(world, 1, "machine-9"), msg.Welcome)
    world.pass_time(5)
    assert world.state.nodes[1].joined


def test_a_job_that_needs_the_node_takes_it_back_after_it_has_waited_for_another_one():
    world, peers = running(2, spares=0)
    fails(world, peers, 1)
    assert world.phase is JobPhase.GATHERING
    assert world.last(call(world, 1), msg.Quarantined), "first the platform may replace it"
    world.pass_time(31)
    peers[1] = call(world, 1)
    assert (members(world), listed(world)) == ((0, 1), [])
    world.open_store()
    fails(world, peers, 1)
    assert listed(world) == [("pod-1", "machine-1")], "it is not trusted more than before"


def test_an_elastic_job_goes_on_without_it():
    world = World(1, 3, max_restarts=99)
    peers = {rank: call(world, rank) for rank in range(3)}
    world.open_store()
    fails(world, peers, 2)
    world.pass_time(1)
    assert members(world) == (0, 1)


@pytest.mark.parametrize(("nodes", "spares"), [(2, 1), ((1, 3), 0)], ids=["spare", "elastic"])
def test_a_node_0_whose_device_failed_serves_the_coordinator_on_and_the_others_train(nodes, spares):
    """If it ended, the coordinator's list would end with it, and its pod would come back to the same machine."""
    world = World(*(nodes if isinstance(nodes, tuple) else (nodes,)), spares=spares, max_restarts=99)
    peers = {rank: call(world, rank) for rank in range(3)}
    world.open_store()
    fails(world, peers, 0)
    world.pass_time(6)
    assert (members(world), world.last(peers[0], msg.Refused)) == ((1, 2), None)
    world.open_store()
    world.pass_time(60)
    assert (world.number, world.phase) == (2, JobPhase.RUNNING), "nothing stops to let it join"


def test_a_job_that_needs_node_0_trains_there_again_until_its_budget_is_used_up():
    world, peers = running(2, spares=0, max_restarts=1)
    fails(world, peers, 0)
    assert members(world) == (0, 1)
    fails(world, peers, 0)
    assert world.last(peers[0], msg.GiveUp).rank == 0


def test_a_failure_that_proves_nothing_about_a_device_quarantines_nobody():
    world, peers = running()
    for _ in range(12):
        fails(world, peers, 1, proof="")
        world.pass_time(20)
    assert listed(world) == []
    assert all(world.last(peer, msg.Refused) is None for peer in peers.values())


def test_lost_pods_and_pods_that_are_asked_to_stop_do_not_count():
    world, peers = running(2, spares=0)
    for how in (None, "asked to stop") * 4:
        number = world.number
        world.say(peers[1], msg.Leave(how)) if how else None
        world.gone(peers[1])
        world.join(peers[0], after=number)
        peers[1] = call(world, 1)
        world.open_store()
        world.pass_time(20)
    assert listed(world) == []


def test_a_proof_counts_even_if_a_peer_was_faster_to_tell_that_it_lost_the_node():
    world, peers = running()
    world.say(peers[0], msg.Failed(1, 0, 1, None, lost_peer=True))
    world.join(peers[0])
    world.say(peers[1], msg.Join(world.incarnations[peers[1]], 1, failed=True, device_fault=ECC))
    assert (members(world), listed(world)) == ((0, 2), [("pod-1", "machine-1")])


def test_a_node_beside_it_on_the_same_machine_is_not_quarantined_with_it():
    world = World(2, spares=1, max_restarts=99)
    peers = {rank: call(world, rank, "machine-0" if rank < 2 else None) for rank in range(3)}
    world.open_store()
    fails(world, peers, 1)
    assert listed(world) == [("pod-1", "")]
    assert members(world) == (0, 2)


def test_a_node_whose_preflight_failed_when_it_came_back_is_not_admitted():
    world, _ = running()
    assert world.last(call(world, 1, "machine-9", fault="gpu-ecc: 3 uncorrected errors"), msg.Refused).reason == (
        "this node is quarantined: its preflight failed: gpu-ecc: 3 uncorrected errors"
    )
    first = World(2, spares=1)
    assert first.last(call(first, 1, fault="gpu-ecc"), msg.Refused) is None, "at first the preflight's mode decides"


def test_preflights_list_is_honoured_but_for_the_node_that_serves_the_coordinator():
    world = World(2, spares=2, failing=nodes_in("pod-1\npod-0\n\n<script>\n"))
    zero, one = call(world, 0), call(world, 1)
    assert world.last(zero, msg.Refused) is None
    assert world.last(one, msg.Quarantined)
    call(world, 2)
    call(world, 3)
    world.pass_time(6)
    assert members(world) == (2, 3), "node 0 is the last that is chosen"


def test_a_healthy_machine_that_gets_the_name_of_a_pod_on_preflights_list_is_admitted():
    listed = nodes_in("pod-1\tmachine-1\npod-2\tunknown\n")
    world = World(2, spares=1, failing=listed)
    call(world, 0)
    assert world.last(call(world, 1), msg.Quarantined)
    again = World(3, spares=1, failing=listed)
    peers = [call(again, 0), call(again, 1, "machine-7"), call(again, 2), call(again, 3, "machine-1")]
    assert [again.last(peer, msg.Quarantined) is None for peer in peers] == [True, True, True, False]
    assert members(again) == (0, 1, 2)


def test_a_job_of_one_node_has_no_quarantine():
    world, peers = running(1, spares=0)
    fails(world, peers, 0)
    assert (world.phase, listed(world)) == (JobPhase.RUNNING, [])
