"""Nodes that are configured otherwise than their job, or have another version: what they hear, and the others."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.membership.world import World, running
from trainer_launch import __version__
from trainer_launch.membership import protocol as msg
from trainer_launch.membership.client import inquire
from trainer_launch.membership.membership import note_refused
from trainer_launch.model import Endpoint
from trainer_launch.model.exit_codes import MISCONFIGURED
from trainer_launch.pytorch.worker_ends import end_of


def waited(world: World) -> msg.GiveUp:
    """What node 0 hears when it has waited for long enough."""
    peer = world.come(0)[0]
    world.pass_time(601)
    end = world.last(peer, msg.GiveUp)
    assert isinstance(end, msg.GiveUp)
    return end


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"nodes": 3}, "the coordinator's job has 2 nodes, this node's job 3"),
        ({"rank": 5}, "this job has nodes 0 to 1, there is no node 5"),
    ],
)
def test_a_node_that_was_told_another_job_is_misconfigured(fields: dict[str, int], word: str) -> None:
    world = World(2)
    refused = world.last(world.call(**{"rank": 1, **fields}), msg.Refused)
    end = end_of(refused)
    assert isinstance(end, msg.GiveUp)
    assert (end.cause, end.exit_code) == ("Misconfigured", MISCONFIGURED)
    assert word in end.reason


@pytest.mark.parametrize("told", [0, 2])
def test_numbers_that_agree_or_may_vary_are_no_reason(told: int) -> None:
    world = World(2)
    assert world.last(world.call(1, nodes=told), msg.Refused) is None


def test_an_elastic_job_takes_nodes_that_were_told_another_number() -> None:
    world = World(1, 4)
    assert world.last(world.call(1, nodes=2), msg.Refused) is None


def test_the_others_end_as_misconfigured_too_and_say_what_the_coordinator_knew() -> None:
    world = World(2)
    world.call(1, nodes=3)
    end = waited(world)
    assert (end.cause, end.exit_code) == ("Misconfigured", MISCONFIGURED)
    assert end.reason == (
        "waited 600 s for node 1; pod-1 was refused: the coordinator's job has 2 nodes, this node's job 3"
    )


@pytest.mark.parametrize("rank", [1, None])
def test_a_wrong_secret_is_remembered_with_the_rank_that_it_came_for(rank: int | None) -> None:
    world = World(2)
    hello = msg.Hello(msg.VERSION, "job", rank, "pod-1", "x")
    note_refused(world.state, hello, msg.Refused("its secret differs from the job's", retry=False), proven=False)
    assert waited(world).reason.endswith("pod-1 was refused: its secret differs from the job's")


def test_a_stranger_without_the_secret_does_not_cover_up_a_node_that_is_misconfigured() -> None:
    world = World(2)
    world.call(1, nodes=3)
    hello = msg.Hello(msg.VERSION, "job", 1, "stranger", "y")
    note_refused(world.state, hello, msg.Refused("its secret differs from the job's", retry=False), proven=False)
    end = waited(world)
    assert end.reason.endswith("pod-1 was refused: the coordinator's job has 2 nodes, this node's job 3")
    assert end.cause == "Misconfigured"


@pytest.mark.parametrize("fields", [{"job": "another"}, {"rank": 7}, {"rank": 0, "host": "other"}])
def test_strangers_do_not_make_a_job_misconfigured_that_waits_for_a_lost_node(fields: dict[str, object]) -> None:
    """Of another job, of no rank of this one, or beside a node that is there."""
    world = World(2)
    zero = world.come(0)[0]
    world.call(**{"rank": 1, **fields})
    world.pass_time(601)
    assert world.last(zero, msg.GiveUp).cause is None


def test_a_node_that_was_corrected_and_is_lost_later_was_not_misconfigured() -> None:
    world = World(2)
    world.call(1, nodes=3)
    zero, one = world.come(0, 1)
    world.open_store()
    world.gone(one)
    world.join(zero)
    world.pass_time(601)
    assert world.last(zero, msg.GiveUp).cause is None


def test_a_process_that_was_replaced_by_a_newer_one_may_be_started_again() -> None:
    world, peers = running(2)
    world.call(1)
    refused = world.last(peers[1], msg.Refused)
    end = end_of(refused)
    assert isinstance(end, msg.GiveUp)
    assert end.cause is None


SAME = "install the same trainer-launch in all pods"
OURS = f"this node (trainer-launch {__version__}) {msg.VERSION}"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            f"the coordinator speaks version 3, not {msg.VERSION}",
            f"the coordinator (trainer-launch 0.1) uses protocol version 3, {OURS}; {SAME}",
        ),
        (
            f"the coordinator (trainer-launch 0.2.0) uses protocol version 6, this node {msg.VERSION}; {SAME}",
            f"the coordinator (trainer-launch 0.2.0) uses protocol version 6, {OURS}; {SAME}",
        ),
        ("this coordinator serves job a, not b", "this coordinator serves job a, not b"),
    ],
    ids=["0.1", "0.2", "another job"],
)
def test_a_refusal_by_another_version_names_both(said: str, shown: str) -> None:
    assert msg.with_own_version(said) == shown


def test_a_launcher_of_0_3_0_is_refused_which_cannot_read_what_ranks_do_now() -> None:
    refused = msg.refused_version("the coordinator", msg.VERSION, 9)
    assert refused is not None
    assert "uses protocol version 10, this node 9" in refused.reason


def test_a_coordinator_of_0_1_is_named_with_its_version_and_ours() -> None:
    def answer(server: socket.socket) -> None:
        sock, _ = server.accept()
        with sock:
            sock.sendall(b'{"kind": "challenge", "nonce": ""}\n')
            sock.makefile("rb").readline()
            reason = f"the coordinator speaks version 2, not {msg.VERSION}"
            sock.sendall(b'{"kind": "refused", "reason": "%s", "retry": false}\n' % reason.encode())

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        told = inquire(Endpoint("127.0.0.1", server.getsockname()[1]), "job")
        thread.join()
    assert isinstance(told, msg.Refused)
    assert "(trainer-launch 0.1) uses protocol version 2" in told.reason
    assert OURS in told.reason
