"""What a plain torchrun is told about our rendezvous, and who hosts the coordinator. Pure."""

from __future__ import annotations

import pytest

from trainer_launch.model import Endpoint, NodeRange, PortRange, Seats
from trainer_launch.model.errors import UsageError
from trainer_launch.pytorch.torchrun_rendezvous_options import ANY_PORT, Conf, is_host, read

TWO = NodeRange(2, 2)


def conf(endpoint="pod-0:29500", nodes=TWO, env=None, **told) -> Conf:
    return read(endpoint, nodes, "none", told, env or {})


def test_everything_that_may_be_told() -> None:
    assert conf(
        node_rank="1", is_host="false", patience=30, max_restarts="0", secret_file="/s", ports="5-6"
    ) == Conf(
        endpoint=Endpoint("pod-0", 29500),
        nodes=TWO,
        run_id="none",
        node_rank=1,
        is_host=False,
        patience_s=30,
        max_restarts=0,
        secret_file="/s",
        ports=PortRange(5, 6),
    )


def test_the_nodes_rank_may_come_from_the_platform_and_the_option_wins() -> None:
    assert conf(env={"PET_NODE_RANK": "1"}).node_rank == 1
    assert conf(env={"PET_NODE_RANK": "1"}, node_rank=0).node_rank == 0
    assert conf(env={"PET_NODE_RANK": " "}).node_rank is None


def test_a_single_node_hosts_on_any_port_whatever_the_endpoint_says() -> None:
    alone = conf(endpoint="nobody:1", nodes=NodeRange(1, 1))
    assert (alone.endpoint, alone.node_rank, alone.is_host) == (ANY_PORT, 0, True)


def test_a_launcher_hosts_the_coordinator_of_a_single_node_too_and_tells_where() -> None:
    below = conf(endpoint="127.0.0.1:4242", nodes=NodeRange(1, 1), is_host="false", host="pod-0")
    assert (below.endpoint, below.is_host, below.host) == (Endpoint("127.0.0.1", 4242), False, "pod-0")


def test_the_launcher_tells_where_each_nodes_coordinator_is() -> None:
    home = Endpoint("job-worker-0.job", 23456)
    told = conf(endpoint=str(home), nodes=NodeRange(1, 3), seats="job-worker-#.job/0/3")
    assert told.seats == Seats(home, "job-worker-#.job", 0, 3)


def test_torchs_own_options_are_no_error_and_torchs_port_is_the_default() -> None:
    assert conf(endpoint="pod-0", timeout=900, join_timeout=600, last_call_timeout=1).endpoint.port == 29400


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"node_rank": "x"}, "node_rank of --rdzv-conf is 'x'"),
        ({"node_rank": 2}, "expected a rank from 0 to 1"),
        ({"is_host": "maybe"}, "expected true or false"),
        ({"patience": "-1"}, "expected whole seconds"),
        ({"max_restart": 1}, "did you mean max_restarts?"),
        ({"colour": 1}, "expected one of node_rank"),
        ({"secret_file": "s"}, "absolute path"),
        ({"ports": "5"}, "expected LOW-HIGH"),
        ({"seats": "pod-#/1/3"}, "expected NAME-#/OFFSET/COUNT"),
        ({"seats": "pod-0/0/3"}, "expected NAME-#/OFFSET/COUNT"),
        ({"host": " "}, "expected this node's name"),
        ({"endpoint": ""}, "--rdzv-endpoint is missing"),
        ({"endpoint": "a:b"}, "--rdzv-endpoint is 'a:b'"),
        ({"endpoint": "a:0"}, "--rdzv-endpoint is 'a:0'"),
    ],
)
def test_what_does_not_fit_is_named(told, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        conf(**told)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("told", "here", "hosts"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"endpoint": "me:1"}, False, True),
        ({"endpoint": "me.job.ns.svc:1"}, False, True),
        ({"endpoint": "me-too:1"}, False, False),
        ({"endpoint": "localhost:1"}, False, True),
        ({"node_rank": 1, "endpoint": "localhost:1"}, True, False),
        ({"node_rank": 0}, False, True),
        ({"node_rank": 1, "is_host": "1"}, False, True),
        ({"node_rank": 0, "is_host": "0"}, True, False),
    ],
)
def test_the_node_that_the_endpoint_names_hosts(told, here: bool, hosts: bool) -> None:
    assert is_host(conf(**told), frozenset({"me"}), lambda host: here) is hosts
