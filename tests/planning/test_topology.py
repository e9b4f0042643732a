"""Who this node is among whom, and how many workers it starts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.contracts.pods import V2_TORCH, pod_of
from tests.planning.requests import MACHINE
from trainer_launch.contracts import read_job
from trainer_launch.model import Cpus, Endpoint, Gpus, Host, Job, Member, NodeRange, Origin, Rendezvous
from trainer_launch.planning.job import hosts_no_rank, overlay, place


def machine(cpus: int = 8, quota: float | None = None, gpus: int = 0, device: str = "cuda") -> Host:
    there = Gpus(count=gpus, reason=f"{gpus} in /dev", device=device)
    return replace(MACHINE, cpus=Cpus(affinity=cpus, quota=quota), gpus=there)


def job(**fields: object) -> Job:
    return Job(**({"contract": "test"} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("word", "host", "workers"),
    [
        (None, machine(), 1),
        (3, machine(), 3),
        ("auto", machine(gpus=4), 4),
        ("auto", machine(cpus=8), 8),
        ("auto", machine(cpus=96, quota=4.0), 4),
        ("auto", machine(cpus=96, quota=3.7), 4),  # rounded up as Kubeflow Trainer does
        ("auto", machine(cpus=96, quota=0.5), 1),
        ("cpu", machine(cpus=2, quota=16.0), 2),
        ("cpu", machine(cpus=6, gpus=2), 6),
        ("gpu", machine(gpus=2), 2),
        ("auto", machine(gpus=2, device="hpu"), 2),
        ("gpu", machine(gpus=2, device="hpu"), None),
        ("xpu", machine(gpus=2, device="xpu"), 2),
        ("xpu", machine(gpus=2), None),
    ],
)
def test_workers_per_node_come_from_what_the_container_really_has(
    word: object, host: Host, workers: int | None
) -> None:
    assert place(job(nproc_per_node=word), host).local_world_size == workers


def test_a_pod_of_another_replicated_job_is_no_node() -> None:
    foreign = place(read_job(pod_of(V2_TORCH, hostname="job-checker-0-1")), machine())
    assert foreign.node_rank is None
    rank = foreign.because["node_rank"]
    assert rank.startswith("none (this pod belongs to another replicatedJob")


@pytest.mark.parametrize("hostname", ["j-master-0", "j-worker-0", "j-worker-1"])
def test_nobody_is_given_a_rank_among_paddles_servers_and_trainers(hostname: str) -> None:
    count = "PADDLE_SERVER_NUM" if "master" in hostname else "PADDLE_TRAINER_NUM"
    env = {"PADDLE_JOB_ID": "j", "PADDLE_NNODES": "3", "PADDLE_MASTER": "j-master-0:8080", count: "1"}
    placed = place(read_job(pod_of(env, hostname=hostname)), machine())
    assert (placed.node_rank, placed.is_coordinator) == (None, hostname == "j-master-0")


@pytest.mark.parametrize("hostname", ["j-0", "j-node-0-0", "gpu-machine-7-3"])  # the last with hostNetwork
@pytest.mark.parametrize(
    ("env", "flags"),
    [
        ({"PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "j-0.j:29400"}, {}),
        ({}, {"nnodes": "2", "master_addr": "j-0.j"}),
    ],
)
def test_pod_0_of_any_indexed_job_is_node_0_where_something_speaks_of_nodes(hostname, env, flags) -> None:
    told = read_job(pod_of({"JOB_COMPLETION_INDEX": "0"} | env, hostname=hostname))
    placed = place(overlay(told, flags, Origin.FLAG), machine())
    assert (placed.node_rank, placed.is_coordinator) == (0, True)


def test_a_rank_and_an_address_that_the_user_gave_are_not_said_to_be_the_platforms() -> None:
    env = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a"}
    told = place(read_job(pod_of(env)), machine())
    assert all(told.because[name].endswith(" (set by the platform)") for name in ("node_rank", "coordinator"))
    typed = overlay(read_job(pod_of(env)), {"node_rank": "1", "master_addr": "b"}, Origin.FLAG)
    assert place(typed, machine()).because["node_rank"] == "1 (as given)"
    assert place(typed, machine()).because["coordinator"] == "b:29500 (as given)"


def test_an_index_without_a_number_of_nodes_leaves_that_number_unknown() -> None:
    """PlainML and XGBoost pods know their index only."""
    placed = place(job(node_rank=199), machine())
    assert (placed.node_rank, placed.nodes, placed.world_size, placed.is_coordinator) == (199, None, None, False)


def test_pod_0_of_a_job_of_several_processes_does_not_know_how_many_nodes_there_are() -> None:
    """An XGBoost TrainJob counts its processes and not its nodes."""
    env = {"DMLC_TRACKER_URI": "j-node-0-0.j", "DMLC_TRACKER_PORT": "29500", "DMLC_TASK_ID": "0"}
    many, one = (read_job(pod_of(env | {"DMLC_NUM_WORKER": count})) for count in ("8", "1"))
    assert (place(many, machine()).nodes, place(many, machine()).node_rank) == (None, 0)
    assert place(one, machine()).nodes == NodeRange(1, 1)


def test_a_list_that_leaves_the_others_out_makes_no_job_of_one_node() -> None:
    """A worker of a TFJob with dynamic workers is told of itself alone."""
    placed = place(job(sparse=True), machine())
    assert (placed.node_rank, placed.nodes, placed.coordinator) == (None, None, None)


def test_the_coordinator_is_told_or_the_rendezvous_or_the_first_member() -> None:
    two = NodeRange(2, 2)
    told = Endpoint("told", 1)
    meeting = Rendezvous(kind="dynamic", backend="c10d", endpoint=Endpoint("meeting", 2))
    members = (Member("first"), Member("second"))
    assert place(job(nodes=two, coordinator=told, rendezvous=meeting), machine()).coordinator == told
    assert place(job(nodes=two, rendezvous=meeting, members=members), machine()).coordinator == meeting.endpoint
    assert place(job(nodes=two, members=members), machine()).coordinator == Endpoint("first", 29500)


@pytest.mark.parametrize(
    ("hosts", "none_here"),
    [
        ("job-worker-0.job slots=2\n", True),
        ("job-launcher.job slots=2\njob-worker-0.job slots=2\n", False),
        ("", False),
    ],
)
def test_an_mpi_launcher_hosts_ranks_where_its_hostfile_names_it(hosts: str, none_here: bool) -> None:
    env = {"K_MPI_JOB_ROLE": "launcher", "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"}
    launcher = read_job(pod_of(env, hostname="job-launcher", files={"/etc/mpi/hostfile": hosts}), None)
    assert hosts_no_rank(launcher) == none_here
