"""The command of torchrun's documentation, equal on every node: which machine serves the coordinator."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.planning.requests import given, request
from trainer_launch.host import network
from trainer_launch.model import Endpoint, Job, NodeRange, Plan
from trainer_launch.model.errors import UsageError
from trainer_launch.planning import engines
from trainer_launch.planning.reading import has_name

TYPED = "torchrun --nnodes={} --rdzv-id=j --rdzv-backend=c10d --rdzv-endpoint={} train.py"


def planned(
    nodes: str = "2", endpoint: str = "head:29400", *, is_head: bool = False, job: Job | None = None
) -> Plan:
    task = request(TYPED.format(nodes, endpoint), job or Job(contract="unknown"))
    return engines.plan(replace(task, topology=replace(task.topology, is_coordinator=is_head)))


@pytest.mark.parametrize(("typed", "nodes"), [("2", NodeRange(2, 2)), ("1:4", NodeRange(1, 4))])
def test_the_machine_that_the_endpoint_names_serves_and_the_others_get_ranks_from_it(
    typed: str, nodes: NodeRange
) -> None:
    head, other = planned(typed, is_head=True), planned(typed)
    hosting = given(head.hosting)
    assert (hosting.job, hosting.port, hosting.nodes, hosting.by_arrival) == ("j", 29400, nodes, True)
    assert other.hosting is None
    for plan in (head, other):
        membership = given(plan.membership)
        assert (membership.node_rank, membership.coordinator) == (None, Endpoint("head", 29400))


def test_on_one_machine_nodes_reach_each_other_on_loopback() -> None:
    assert given(planned(endpoint="localhost:29400").membership).address == "127.0.0.1"
    assert given(planned().membership).address is None


@pytest.mark.parametrize("told", [{"node_rank": 1}, {"hostname_index": 1}, {"completion_index": 1}])
def test_a_rank_that_anybody_tells_is_the_nodes_rank(told: dict[str, Any]) -> None:
    plan = planned(job=Job(contract="unknown", **told))
    assert given(plan.membership).node_rank == 1
    assert plan.hosting is None


@pytest.mark.parametrize(
    ("addresses", "hostname", "serves"),
    [
        ((("10.0.0.1",), ()), "any", True),
        (((), ("10.0.0.1",)), "any", False),
        (((), ()), "any", False),
        (((), ()), "head", True),
        (((), ("10.96.0.1",)), "head.default.svc", True),
    ],
    ids=["own address", "another's", "no such name yet", "own name before DNS has it", "own name behind a Service"],
)
def test_a_machine_knows_the_endpoint_as_its_own(
    addresses: tuple[tuple[str, ...], tuple[str, ...]],
    hostname: str,
    serves: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "here_and_elsewhere", lambda host: addresses)
    assert has_name(hostname, "head.train") is serves


def test_a_name_of_several_machines_is_refused_by_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "here_and_elsewhere", lambda host: (("10.0.0.1",), ("10.0.0.2",)))
    with pytest.raises(UsageError, match=r"several machines \(10.0.0.1, 10.0.0.2\), and this is one of them"):
        has_name("train-x7k2p", "train")


def test_machines_called_by_their_addresses_are_not_taken_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "here_and_elsewhere", lambda host: ((), (host,)))
    assert not has_name("10.0.0.12", "10.0.0.1")
