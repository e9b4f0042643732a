"""How the job stands, for who asks: the table as pure values, and asked of real servers."""

from __future__ import annotations

import socket

import pytest
from msgspec.structs import replace

from tests.membership.test_server import Cluster, await_, cluster  # noqa: F401  a fixture
from tests.membership.world import World, running
from trainer_launch.diagnosis.lateness import Lateness
from trainer_launch.diagnosis.stragglers import MAX_SUSPECTS, STRAGGLERS, StragglerJudge
from trainer_launch.membership import protocol as msg
from trainer_launch.membership import server, state
from trainer_launch.membership.candidates import ask
from trainer_launch.model import Endpoint
from trainer_launch.model.codec import MAX_LINE_BYTES
from trainer_launch.model.errors import NodeError


def states(world):
    return [(rank, word) for rank, _, word, _ in state.status(world.state, world.now_s).nodes]


def test_nodes_that_have_not_called_are_missing():
    world = World(3)
    assert states(world) == [(0, "missing"), (1, "missing"), (2, "missing")]
    world.call(1)
    world.come(2)
    assert states(world) == [(1, "connected"), (2, "joined"), (0, "missing")]


def test_a_running_job_has_its_generation_and_its_budget():
    world, _ = running(2)
    now = state.status(world.state, world.now_s)
    assert (now.phase, now.generation, now.restarts, now.max_restarts) == ("running", 1, 0, 3)
    assert (now.min_nodes, now.max_nodes, now.n_nodes) == (2, 2, 2)
    assert states(world) == [(0, "running"), (1, "running")]


def test_a_lost_node_is_lost_since_a_while_and_back_when_it_is():
    world, peers = running(2)
    world.gone(peers[1])
    world.now_s += 7.0
    assert state.status(world.state, world.now_s).nodes[1] == (1, "pod-1", "lost", 7.0)
    world.come(1)
    assert (1, "joined") in states(world)


def test_a_node_that_is_done_stays_so_when_its_connection_ends_with_the_job():
    world, peers = running(2)
    world.say(peers[0], msg.Done(1))
    assert states(world) == [(0, "done"), (1, "running")]
    world.say(peers[1], msg.Done(1))
    world.gone(peers[1])
    now = state.status(world.state, world.now_s)
    assert (now.phase, now.end) == ("over", "all nodes are done")
    assert states(world) == [(0, "done"), (1, "done")]


def test_a_job_that_was_given_up_says_why():
    world, _ = running(2)
    world.close("the budget is spent")
    assert state.status(world.state, world.now_s).end == "the budget is spent"


def test_a_table_that_does_not_fit_shows_the_absent_first():
    world, peers = running(2000)
    world.gone(peers[1999])
    world.gone(peers[500])
    now = state.status(world.state, world.now_s)
    assert now.n_nodes == 2000
    assert len(msg.render(now)) <= MAX_LINE_BYTES
    assert 300 < len(now.nodes) < 2000
    assert [row[0] for row in now.nodes if row[2] == "lost"] == [500, 1999]
    ranks = [row[0] or 0 for row in now.nodes]
    assert ranks == sorted(ranks)


def test_a_table_fits_beside_all_else_that_nodes_have_told():
    world, _ = running(2000)
    late = tuple(Lateness(rank=rank) for rank in range(MAX_SUSPECTS))
    quarantined = (msg.Quarantine("h" * 253, "m" * 253, '"' * 200),) * msg.MAX_QUARANTINED
    judges = {STRAGGLERS: StragglerJudge(every_s=60.0, named=late)}
    now = state.status(replace(world.state, judges=judges, quarantined=quarantined), world.now_s)
    assert len(msg.render(now)) <= MAX_LINE_BYTES
    assert now.notes[STRAGGLERS].stragglers == late
    assert 100 < len(now.nodes) < 2000


@pytest.mark.parametrize(
    "query", [msg.StatusQuery(msg.VERSION + 1, "job"), msg.StatusQuery(msg.VERSION, "another")]
)
def test_who_asks_for_something_else_is_refused(query):
    assert isinstance(state.why_stranger("job", query), msg.Refused)


# -- asked of real servers --------------------------------------------------------------------


def at(cluster: Cluster) -> Endpoint:  # noqa: F811
    return Endpoint("localhost", cluster.port)


def test_a_running_job_can_be_asked(cluster):  # noqa: F811
    clients = cluster.running(2)
    now = ask(at(cluster), "job")
    assert [row[:3] for row in now.nodes] == [(0, "pod-0", "running"), (1, "pod-1", "running")]
    assert [client.receive(0) for client in clients] == [None, None]


def test_an_answer_that_is_too_long_ends_the_connection_of_who_asked_alone(cluster, monkeypatch):  # noqa: F811
    clients = cluster.running(2)
    with monkeypatch.context() as patched:
        patched.setattr(server, "status", lambda *_: msg.Waiting(1, 9999, ("x" * 200,) * 9999))
        with pytest.raises(NodeError):
            ask(at(cluster), "job")
    assert ask(at(cluster), "job").phase == "running"
    assert [client.receive(0) for client in clients] == [None, None]


def test_nobody_there_is_an_error_of_one_sentence():
    with pytest.raises(NodeError, match="cannot be asked: Connection refused"):
        ask(Endpoint("127.0.0.1", 1), "job")
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(NodeError, match="does not answer"):
        ask(Endpoint("127.0.0.1", mute.getsockname()[1]), "job", timeout_s=0.2)
