"""Which nodes are not admitted again: those whose own evidence names them, and nobody who only looks guilty."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.membership.world import World
from trainer_launch.membership import protocol as msg
from trainer_launch.membership.quarantine import hosts_in
from trainer_launch.membership.state import Gone, Phase, status

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


def fails(world, peers, rank, fault=msg.MACHINE, evidence="rank 0 was ended by SIGSEGV", also=(), **fields):
    """A node's worker fails, then all members join again; `also` are those whose workers failed by themselves."""
    number, before = world.number, members(world)
    world.say(peers[rank], msg.Failed(number, rank, None, 9, fault=fault, evidence=evidence, **fields))
    for key in sorted(before, key=lambda key: key == rank):
        world.say(peers[key], msg.Join(world.incarnations[peers[key]], number, failed=key in (*also, rank)))
    if world.phase is Phase.FORMED:
        world.open_store()


def members(world):
    return world.state.run and world.state.run.members


def listed(world):
    return [(host, where) for host, where, _ in status(world.state, world.now_s).quarantined]


def test_a_failed_device_quarantines_its_machine_and_the_spare_takes_over():
    world, peers = running()
    fails(world, peers, 1, msg.DEVICE, ECC)
    refused = world.last(peers[1], msg.Refused)
    assert refused == msg.Quarantined(f"this node is quarantined: {ECC}", retry=False)
    assert peers[1] in world.cut
    assert (world.phase, members(world)) == (Phase.RUNNING, (0, 2))
    assert listed(world) == [("pod-1", "machine-1")]
    assert f"node 1 (pod-1) is quarantined: {ECC}" in world.said
    assert world.state.restarts == 1, "a failure costs a restart, whatever caused it"


def test_it_is_refused_again_while_the_job_can_do_without_and_admitted_on_another_machine():
    world, peers = running()
    fails(world, peers, 1, msg.DEVICE, ECC)
    assert world.last(call(world, 1), msg.Quarantined)
    assert world.last(call(world, 1, "machine-9"), msg.Welcome)
    world.pass_time(5)
    assert world.state.nodes[1].joined


def test_a_job_that_needs_the_node_takes_it_back_after_it_has_waited_for_another_one():
    world, peers = running(2, spares=0)
    fails(world, peers, 1, msg.DEVICE, ECC)
    assert world.phase is Phase.GATHERING
    assert world.last(call(world, 1), msg.Quarantined), "first the platform may replace it"
    world.pass_time(31)
    peers[1] = call(world, 1)
    assert (members(world), listed(world)) == ((0, 1), [])
    world.open_store()
    fails(world, peers, 1, msg.DEVICE, ECC)
    assert listed(world) == [("pod-1", "machine-1")], "it is not trusted more than before"


def test_an_elastic_job_goes_on_without_it():
    world = World(1, 3, max_restarts=99)
    peers = {rank: call(world, rank) for rank in range(3)}
    world.open_store()
    fails(world, peers, 2, msg.DEVICE, ECC)
    world.pass_time(1)
    assert members(world) == (0, 1)


def test_the_third_incident_of_its_own_within_an_hour_quarantines():
    world, peers = running()
    for count in (1, 2, 3):
        assert listed(world) == []
        fails(world, peers, 1)
        world.pass_time(60 * count)
    assert listed(world) == [("pod-1", "machine-1")]
    assert "3 incidents of its own within an hour" in world.last(peers[1], msg.Refused).reason


def test_incidents_of_different_hours_do_not_add_up():
    world, peers = running()
    for _ in range(6):
        fails(world, peers, 1)
        world.now_s += 1900
        for peer in world.state.peers:
            world.say(peer, msg.Renew())
    assert listed(world) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"fault": None},  # the program's own error, a signal that somebody sent, memory: the node says nothing
        {"lost_peer": True, "fault": msg.MACHINE},
        {"also": (0,)},  # an error of the program on every rank
        {"also": (0,), "fault": msg.DEVICE, "evidence": ECC},
    ],
)
def test_who_only_looks_faulty_is_never_quarantined(fields):
    world, peers = running()
    for _ in range(12):
        fails(world, peers, 1, **fields)
        world.pass_time(20)
    assert listed(world) == []
    assert all(world.last(peer, msg.Refused) is None for peer in peers.values())


def test_deaths_that_go_round_are_no_nodes_fault():
    world, peers = running(3, spares=0)
    for count in range(12):
        fails(world, peers, count % 3)
        world.pass_time(20)
    assert listed(world) == []


def test_deaths_because_another_node_was_lost_do_not_count():
    world, peers = running(3, spares=0)
    for _ in range(5):
        number = world.number
        world.say(peers[1], msg.Failed(number, 1, None, 6, fault=msg.MACHINE))
        world.play(Gone(peers[2]))
        peers[2] = call(world, 2)
        world.join(peers[0], peers[1], after=number)
        world.open_store()
        world.pass_time(20)
    assert (listed(world), world.state.incidents) == ([], ())


def test_lost_pods_and_pods_that_are_asked_to_stop_do_not_count():
    world, peers = running(2, spares=0)
    for how in (None, "asked to stop") * 4:
        number = world.number
        world.say(peers[1], msg.Leave(how)) if how else None
        world.play(Gone(peers[1]))
        world.join(peers[0], after=number)
        peers[1] = call(world, 1)
        world.open_store()
        world.pass_time(20)
    assert (listed(world), world.state.incidents) == ([], ())


def test_nobody_is_judged_before_all_members_have_told_how_their_workers_ended():
    world, peers = running(3, spares=1)
    world.say(peers[1], msg.Failed(1, 1, None, 9, fault=msg.DEVICE, evidence=ECC))
    world.join(peers[0], peers[1])
    world.pass_time(40)  # as long as workers may take to stop
    assert (world.phase, listed(world)) == (Phase.FORMED, [])


def test_a_proof_counts_even_if_a_peer_was_faster_to_tell_that_it_lost_the_node():
    world, peers = running()
    world.say(peers[0], msg.Failed(1, 0, 1, None, lost_peer=True))
    world.join(peers[0])
    world.say(peers[1], msg.Join(world.incarnations[peers[1]], 1, failed=True, fault=msg.DEVICE, evidence=ECC))
    assert (members(world), listed(world)) == ((0, 2), [("pod-1", "machine-1")])


def test_a_node_beside_it_on_the_same_machine_is_not_quarantined_with_it():
    world = World(2, spares=1, max_restarts=99)
    peers = {rank: call(world, rank, "machine-0" if rank < 2 else None) for rank in range(3)}
    world.open_store()
    fails(world, peers, 1, msg.DEVICE, ECC)
    assert listed(world) == [("pod-1", "")]
    assert members(world) == (0, 2)


def test_a_new_coordinator_learns_of_them_from_those_that_call_but_not_of_who_is_here_already():
    world, peers = running()
    fails(world, peers, 1, msg.DEVICE, ECC)
    known = world.last(peers[0], msg.Formed).quarantined
    new = World(2, spares=1)
    call(new, 0, quarantined=known, generation=world.number)
    assert new.last(call(new, 1), msg.Quarantined)
    late = World(2, spares=1)
    call(late, 1)
    call(late, 0, quarantined=known, generation=world.number)
    assert listed(late) == []
    assert late.state.run is not None or late.phase is Phase.GATHERING


def test_a_node_whose_preflight_failed_when_it_came_back_is_not_admitted():
    world, _ = running()
    assert world.last(call(world, 1, "machine-9", fault="gpu-ecc: 3 uncorrected errors"), msg.Refused).reason == (
        "this node is quarantined: its preflight failed: gpu-ecc: 3 uncorrected errors"
    )
    first = World(2, spares=1)
    assert first.last(call(first, 1, fault="gpu-ecc"), msg.Refused) is None, "at first the preflight's mode decides"


def test_preflights_list_is_honoured_but_for_the_node_that_serves_the_coordinator():
    world = World(2, spares=2, failing=hosts_in("pod-1\npod-0\n\n<script>\n"))
    zero, one = call(world, 0), call(world, 1)
    assert world.last(zero, msg.Refused) is None
    assert world.last(one, msg.Quarantined)
    call(world, 2)
    call(world, 3)
    world.pass_time(6)
    assert members(world) == (2, 3), "node 0 is the last that is chosen"


def test_a_job_of_one_node_has_no_quarantine():
    world, peers = running(1, spares=0)
    fails(world, peers, 0, msg.DEVICE, ECC)
    assert (world.phase, listed(world)) == (Phase.RUNNING, [])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 2]),
            st.sampled_from([None, msg.MACHINE]),
            st.booleans(),
            st.floats(1, 2000),
        ),
        max_size=30,
    )
)
def test_in_no_history_is_a_machine_quarantined_while_another_had_such_deaths_within_the_hour(script):
    world, peers = running(3, spares=0, rejoin_timeout_s=1e6)
    seen: list[tuple[float, int]] = []
    for rank, fault, also, seconds in script:
        others = ((rank + 1) % 3,) if also else ()
        fails(world, peers, rank, fault, also=others)
        if fault and not also:
            seen.append((world.now_s, rank))
        recent = [one for at_s, one in seen if at_s > world.now_s - 3600]
        may = {one for one in recent if recent.count(one) >= 3 and len(set(recent)) == 1}
        assert {where for _, where in listed(world)} <= {machine(one) for one in may}
        if listed(world):
            return
        world.now_s += seconds
        for peer in world.state.peers:
            world.say(peer, msg.Renew())
