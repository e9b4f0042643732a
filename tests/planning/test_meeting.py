"""Where the nodes of a torch job meet: who hosts a coordinator, by which name, and whom each node asks."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.contracts.pods import pod_of
from tests.planning.requests import MACHINE, given, request
from tests.planning.test_torchrun import ALONE, ETCD, FIXED
from trainer_launch.contracts import read_job
from trainer_launch.model import Endpoint, Hosting, Job, NodeRange, Origin, PortRange
from trainer_launch.model.errors import ContractError, LaunchError
from trainer_launch.model.exit_codes import MISCONFIGURED
from trainer_launch.planning import engines
from trainer_launch.planning.job import overlay


def test_by_default_nodes_meet_at_the_coordinator_that_node_0_hosts() -> None:
    plan = engines.plan(request("train.py", FIXED))
    assert plan.hosting is None
    zero = engines.plan(request("train.py", replace(FIXED, node_rank=0, is_coordinator=True)))
    assert zero.hosting == Hosting(
        job="job-node-0-0.job-29500",
        host="",
        port=29500,
        nodes=NodeRange(2, 2),
        max_restarts=3,
        rejoin_timeout_s=600.0,
        finds_stragglers=True,
    )


def test_a_single_node_hosts_its_coordinator_on_loopback() -> None:
    plan = engines.plan(request("train.py", ALONE))
    hosting = given(plan.hosting)
    assert (hosting.host, hosting.port, hosting.nodes) == ("127.0.0.1", 4242, NodeRange(1, 1))


def node_rank_of(job: Job) -> int:
    """This node's rank in the plan of a script."""
    return given(given(engines.plan(request("train.py", job)).membership).node_rank)


def with_a_master(nodes: str, hostname: str, env: dict[str, str] | None = None) -> Job:
    """A PyTorchJob with a Master, two Workers and an elasticPolicy; PET_NNODES counts Workers only."""
    told = {
        "PET_RDZV_ENDPOINT": "e-worker-0:23456",
        "PET_RDZV_BACKEND": "c10d",
        "PET_NNODES": nodes,
        "MASTER_ADDR": "e-master-0",
        "MASTER_PORT": "23456",
        "RANK": "0",
        "WORLD_SIZE": "3",
    }
    return read_job(pod_of(told | (env or {}), hostname=hostname))


@pytest.mark.parametrize(
    ("home", "own", "rank", "pattern"),
    [
        ("job-worker-0", "job-worker-2", 2, "job-worker-#/0/3"),
        ("job-node-0-0.job", "job-node-0-1", 1, "job-node-0-#.job/0/3"),
        ("job-master-0", "job-worker-0", 1, "job-worker-#/-1/3"),
        ("job-worker-0", "machine-7", 2, None),
        ("10.0.0.1", "job-worker-2", 2, None),
    ],
)
def test_every_node_of_an_elastic_job_hosts_a_coordinator_if_names_tell_the_index(home, own, rank, pattern) -> None:
    job = replace(FIXED, nodes=NodeRange(1, 3), coordinator=Endpoint(home, 29500), node_rank=rank)
    machine = replace(MACHINE, hostname=own)
    plan = engines.plan(request("train.py", job, host=machine))
    seats = given(plan.membership).seats
    assert (None if seats is None else f"{seats.pattern}/{seats.offset}/{seats.count}") == pattern
    if pattern is None:
        assert plan.hosting is None
    else:
        hosting = given(plan.hosting)
        assert hosting.seat == rank
        assert given(hosting.seats).endpoint(0) == Endpoint(home, 29500)
        assert given(hosting.seats).endpoint(rank).host.startswith(own)


@pytest.mark.parametrize(
    ("env", "rank"),
    [
        ({}, 2),
        ({"PET_NPROC_PER_NODE": "auto"}, 2),
        ({"PET_NPROC_PER_NODE": "8", "WORLD_SIZE": "24"}, 2),
        ({"PET_NPROC_PER_NODE": "8"}, 2),  # operators up to 1.6 count pods
    ],
)
def test_the_master_of_an_elastic_job_comes_behind_its_workers(env: dict[str, str], rank: int) -> None:
    master = with_a_master("2:3", "e-master-0", env)
    assert node_rank_of(master) == rank
    assert engines.plan(request("train.py", master)).hosting is None
    assert node_rank_of(with_a_master("2:3", "e-worker-0", env)) == 0


@pytest.mark.parametrize("env", [{}, {"PET_NPROC_PER_NODE": "8", "WORLD_SIZE": "24"}])
def test_a_master_for_whom_the_workers_leave_no_room_is_refused_with_what_to_do(env: dict[str, str]) -> None:
    full = with_a_master("2:2", "e-master-0", env)
    with pytest.raises(
        ContractError, match=r"maxReplicas by one, remove the Master, or set --nodes 2:3 in all pods"
    ):
        engines.plan(request("train.py", full))
    assert engines.plan(request("sshd -De", full)).engine == "plain"
    roomier = overlay(full, {"nnodes": "2:3"}, Origin.FLAG)
    assert node_rank_of(roomier) == 2
    engines.plan(request("train.py", with_a_master("2:2", "e-worker-1", env)))


def test_each_node_knows_where_to_ask_how_the_job_stands() -> None:
    one = engines.plan(request("train.py", FIXED))
    assert one.meeting == ("job-node-0-0.job-29500", Endpoint("job-node-0-0.job", 29500))
    zero = engines.plan(request("train.py", replace(FIXED, node_rank=0, is_coordinator=True)))
    assert zero.meeting == ("job-node-0-0.job-29500", Endpoint("localhost", 29500)), "its own name may not resolve"
    alone = engines.plan(request("train.py", ALONE))
    assert alone.meeting == ("127.0.0.1-4242", Endpoint("localhost", 4242))
    assert engines.plan(request("train.py", ETCD)).meeting is None


@pytest.mark.parametrize("rank", [0, 1])
def test_nodes_that_are_told_localhost_are_of_one_job_on_one_machine(rank: int) -> None:
    job = replace(FIXED, node_rank=rank, is_coordinator=rank == 0, coordinator=Endpoint("127.0.0.1", 29500))
    made = engines.plan(request("train.py", job))
    assert given(made.meeting)[0] == "here-29500", "an old operator tells the others node 0's name"


@pytest.mark.parametrize(
    ("address", "name"), [("fd00::1", "fd00-1-29500"), ("job-node-0-0.job", "job-node-0-0.job-29500")]
)
def test_the_run_id_has_no_colon_because_torch_names_the_folders_of_log_dir_after_it(address, name) -> None:
    job = replace(FIXED, coordinator=Endpoint(address, 29500))
    made = engines.plan(request("train.py", job))
    assert given(made.membership).job == name


@pytest.mark.parametrize(
    ("line", "typed", "ports"),
    [
        ("torchrun --master-port=29638 train.py", {}, PortRange(29638, 29638)),
        ("train.py", {"master_port": "29638"}, PortRange(29638, 29638)),
        ("torchrun --rdzv-endpoint=localhost:29638 train.py", {}, None),
        ("torchrun --master-port=0 --rdzv-endpoint= train.py", {}, None),
        ("torchrun --nnodes=2 --node-rank=0 --master-addr=a --master-port=29638 train.py", {}, None),
    ],
    ids=["typed for torchrun", "for the launcher", "of the agents alone", "any port", "where several nodes meet"],
)
def test_a_typed_port_of_one_node_is_the_stores_because_scripts_may_name_it_as_well(
    line: str, typed: dict[str, str], ports: PortRange | None
) -> None:
    job = overlay(Job(contract="unknown", nodes=NodeRange(1, 1)), typed, Origin.FLAG)
    assert given(engines.plan(request(line, job)).membership).ports == ports


def test_a_rank_above_0_does_not_train_alone_because_nobody_says_how_many_nodes_there_are() -> None:
    typed = (overlay(Job(contract="unknown"), {"node_rank": rank}, Origin.FLAG) for rank in "01")
    first, second = (request("train.py", job) for job in typed)
    assert engines.plan(first).engine == "plain"
    for made in (second, request("train.py", read_job(pod_of({"PET_NODE_RANK": "1"})))):
        with pytest.raises(ContractError, match=r"the number of nodes is unknown .*; set --nodes"):
            engines.plan(made)


LONG = "x" * 254


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--rdzv-id=jöb", "(--rdzv-id) is 'jöb'; expected at most 253 printable ASCII characters"),
        (f"--rdzv-id={LONG}", "(--rdzv-id) is 'xxx"),
        (f"--role={LONG}", "--role is 'xxx"),
        ("--local-addr=hötel", "--local-addr is 'hötel'; expected a host name or an IP address"),
        (f"--local-addr={LONG}", "--local-addr is 'xxx"),
        ("--nproc-per-node=1025", "--nproc-per-node is '1025'; expected at most 1024 workers on a node"),
        ("--nnodes=65537", "--nodes is '65537'; expected at most 65536, spares included"),
        ("--rdzv-backend=c10d --rdzv-endpoint=h:0", "cannot meet at h:0: port 0 stands for any free port"),
        ("--rdzv-endpoint=h:0", "write the port, such as h:29500"),
        ("--engine-torchrun --rdzv-backend=c10d --rdzv-endpoint=h:0", "cannot meet at h:0"),
    ],
)
def test_what_would_let_nodes_wait_for_each_other_in_vain_is_refused(line: str, says: str) -> None:
    words = line.removeprefix("--engine-torchrun ")
    asked = request(f"torchrun {words} train.py", FIXED, engine="auto" if words == line else "torchrun")
    with pytest.raises(LaunchError) as refused:
        engines.plan(asked)
    assert says in str(refused.value)
    assert refused.value.exit_code == MISCONFIGURED


def test_a_single_node_may_have_any_free_port() -> None:
    line = "torchrun --nnodes=1 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --role=höch train.py"
    assert engines.plan(request(line, ALONE)).workers is not None
