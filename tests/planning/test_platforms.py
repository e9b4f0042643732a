"""Pods of each platform, through to their plans; a pod that shows several nodes never trains alone."""

from __future__ import annotations

import pytest

from tests.contracts.pods import CASES, pod_of
from tests.contracts.test_cases import read
from tests.planning.requests import GPU_MACHINE, MACHINE, request
from trainer_launch.contracts import read_job
from trainer_launch.contracts.snapshot import pod_from_snapshot
from trainer_launch.model import Host, Origin
from trainer_launch.model.errors import ContractError, LaunchError
from trainer_launch.planning import engines
from trainer_launch.planning.command import parse_command, starts_launchers
from trainer_launch.planning.job import overlay

SKYPILOT = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"}
AZURE = {"AZUREML_RUN_ID": "a", "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.4"}
# What shows several nodes, and the variables of the pod.
INCOMPLETE = {
    "skypilot without a rank": ("SKYPILOT_NUM_NODES", SKYPILOT),
    "dstack without a rank": ("DSTACK_NODES_NUM", {"DSTACK_NODES_NUM": "2"}),
    "leaderworkerset without a leader": ("LWS_GROUP_SIZE", {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0"}),
    "leaderworkerset without a size": ("LWS_LEADER_ADDRESS", {"LWS_LEADER_ADDRESS": "train-0.train"}),
    "sagemaker without this host": ("SM_HOSTS", {"SM_HOSTS": '["a", "b"]'}),
    "volcano with a foreign host name": ("VC_W_HOSTS", {"VC_W_HOSTS": "j-w-0.j,j-w-1.j"}),
    "volcano with several tasks": ("VC_PS_HOSTS", {"VC_PS_HOSTS": "j-ps-0.j", "VC_W_HOSTS": "j-w-0.j"}),
    "azure ml without a size": ("NODE_RANK", AZURE),
    "azure ml without a rank": ("AZUREML_NODE_COUNT", {"AZUREML_RUN_ID": "a", "AZUREML_NODE_COUNT": "2"}),
    "a manifest of one's own": ("NODE_RANK", {"NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "train-0"}),
}
COMMANDS = ("train.py", "torchrun --nproc-per-node 2 train.py")
FLAGS = {"nnodes": "2", "node_rank": "1", "master_addr": "train-0"}


@pytest.mark.parametrize("line", COMMANDS)
@pytest.mark.parametrize("name", INCOMPLETE)
def test_an_incomplete_pod_of_several_nodes_is_refused_with_what_to_set(name: str, line: str) -> None:
    shown_by, env = INCOMPLETE[name]
    with pytest.raises(ContractError) as caught:
        engines.plan(request(line, read_job(pod_of(env)), env))
    message = str(caught.value)
    assert shown_by in message
    assert "; set --" in message
    assert "--node-rank" in message or "--nodes" in message or "--master-addr" in message


@pytest.mark.parametrize("line", COMMANDS)
@pytest.mark.parametrize("name", INCOMPLETE)
def test_an_incomplete_pod_is_a_node_of_the_job_that_flags_describe(name: str, line: str) -> None:
    _, env = INCOMPLETE[name]
    job = overlay(read_job(pod_of(env)), FLAGS, Origin.FLAG)
    plan = engines.plan(request(line, job, env))
    assert plan.membership is not None
    assert (plan.membership.node_rank, plan.membership.coordinator.host) == (1, "train-0")


@pytest.mark.parametrize("typed", [FLAGS, {**FLAGS, "nproc_per_node": "2"}], ids=["nodes", "nodes and workers"])
def test_an_indexed_job_without_an_address_of_its_own_starts_the_workers_that_are_typed(
    typed: dict[str, str],
) -> None:
    env = {"JOB_COMPLETION_INDEX": "1"}
    assert engines.plan(request("train.py", read_job(pod_of(env)), env)).engine == "plain"
    plan = engines.plan(request("train.py", overlay(read_job(pod_of(env)), typed, Origin.FLAG), env))
    assert plan.workers is not None
    assert (plan.engine, plan.workers.count) == ("torch", int(typed.get("nproc_per_node", "1")))


@pytest.mark.parametrize(
    "env",
    [
        {"SKYPILOT_NUM_NODES": "1"},
        {"DSTACK_NODES_NUM": "1"},
        {"LWS_GROUP_SIZE": "1"},
        {"SM_HOSTS": '["a"]'},
        {"VC_W_HOSTS": "j-w-0.j"},
        {"AZUREML_RUN_ID": "a", "AZUREML_NODE_COUNT": "1"},
        {**AZURE, "WORLD_SIZE": "1"},
        {"NODE_RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost"},
    ],
    ids=str,
)
@pytest.mark.parametrize("line", COMMANDS)
def test_a_pod_that_shows_one_node_runs_alone(env: dict[str, str], line: str) -> None:
    made = request(line, read_job(pod_of(env)), env)
    engines.plan(made)
    assert made.topology.pods == 1


@pytest.mark.parametrize(("machine", "workers"), [(GPU_MACHINE, 4), (MACHINE, 1)], ids=["4 GPUs", "no GPU"])
@pytest.mark.parametrize("case", ["azureml/node-0", "vertex-ai/primary-replica"])
def test_a_cloud_that_counts_no_gpus_has_a_worker_for_each_gpu_of_the_node(
    case: str, machine: Host, workers: int
) -> None:
    env = CASES[case]["pod"]["env"]
    job = read_job(pod_of(env))
    for line in ("train.py", "torchrun train.py"):
        plan = engines.plan(request(line, job, env, host=machine))
        assert plan.workers is not None
        assert plan.workers.count == workers
    typed = request("torchrun --nproc-per-node 2 train.py", job, env, host=machine)
    assert typed.topology.local_world_size == 2


@pytest.mark.parametrize(("line", "engine"), [("train.py", "plain"), ("torchrun train.py", "torch")])
def test_a_replica_of_vertex_with_tf_config_runs_a_program_as_tensorflow_needs_it(line: str, engine: str) -> None:
    env = CASES["vertex-ai/tf-config-without-ranks-may-be-tensorflow"]["pod"]["env"]
    job = read_job(pod_of(env))
    assert engines.plan(request(line, job, env)).engine == engine
    torch = request(line, job, env, engine="torch")
    assert engines.plan(torch).engine == "torch"


POD = CASES["flyte-clustered/third-of-four"]["pod"]
NODE_0 = "f-abc123-workers-0-0.f-abc123.project-development.svc.cluster.local"
TORCHRUN = (
    "torchrun --nnodes=4 --nproc-per-node=8 --node-rank=2 --rdzv-backend=static --rdzv-id=f-abc123-1 "
    f"--rdzv-endpoint={NODE_0}:29500 --no-python -- a0 --inputs x"
)


@pytest.mark.parametrize("command", ["train.py", "torchrun train.py", TORCHRUN])
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_all_nodes_of_the_task_meet_at_its_first_pod(command: str, backend: str) -> None:
    env = {**POD["env"], "RDZV_BACKEND": backend}
    job = read_job(pod_from_snapshot({**POD, "env": env}))
    plan = engines.plan(request(command.replace("=static", f"={backend}"), job, env))
    assert plan.engine == "torch"
    assert plan.workers is not None
    assert plan.workers.count == 8
    assert plan.membership is not None
    member = plan.membership
    assert (member.nodes, member.node_rank, str(member.coordinator)) == (4, 2, f"{NODE_0}:29500")
    assert member.job == "f-abc123-1", "another in each attempt, as Flyte has it"


def test_flytes_entry_point_finds_the_shim_of_torchrun() -> None:
    assert starts_launchers(parse_command(["clustered", "--inputs", "x"]))


READABLE = [pytest.param(case, id=name) for name, case in CASES.items() if "error" not in case]


@pytest.mark.parametrize("case", READABLE)
def test_a_training_script_is_planned_or_refused_with_what_to_set(case: dict[str, object]) -> None:
    job, env = read(case), case["pod"]["env"]  # type: ignore[index]
    refused, plan = "", None
    try:
        plan = engines.plan(request("python train.py", job, env, host=GPU_MACHINE))
    except LaunchError as problem:
        refused = str(problem)
    if plan is None:
        assert "set --" in refused
    else:
        assert (plan.workers or plan.processes[0]).argv[-1] == "train.py"
        assert (
            plan.engine == ({"torchrun": plan.engine, "mpirun": "mpi"}.get(str(job.engine), "plain"))
            or job.engine is None
        )
