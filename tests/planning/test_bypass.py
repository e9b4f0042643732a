"""Commands that are not Python: workers where their number is given, else a warning that says what is lost."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from msgspec.structs import replace

from tests.planning.requests import request
from trainer_launch.model import Endpoint, Job, NodeRange, Origin
from trainer_launch.model.errors import ContractError, LaunchError, UsageError
from trainer_launch.planning import engines
from trainer_launch.planning.command import starts_launchers
from trainer_launch.planning.job import overlay

BARE = Job(contract="unknown")
TORCH = Job(contract="trainer-v2-torch", nodes=NodeRange(2, 2), node_rank=0, nproc_per_node=4, engine="torchrun")
JAX = Job(contract="trainer-v2-jax", nodes=NodeRange(1, 1), engine="plain")
MPI = Job(contract="mpijob-v1", engine="mpirun")


def asked(job: Job) -> Job:
    """The job with --nproc-per-node 2."""
    return overlay(job, {"nproc_per_node": "2"}, Origin.FLAG)


def warning(line: str, job: Job, **changes: Any) -> str:
    """The only warning of the plan for a command, or nothing."""
    plan = engines.plan(request(line, job, **changes))
    assert plan.engine == "plain"
    assert len(plan.warnings) <= 1
    return "".join(plan.warnings)


@pytest.mark.parametrize("line", ["./w.sh x", "env A=1 python t.py", "uv run t.py", "python -c pass", "bash -c t"])
def test_any_program_is_started_as_workers_where_their_number_is_given(line: str) -> None:
    plan = engines.plan(request(line, asked(BARE)))
    assert plan.workers is not None
    assert (plan.workers.argv, plan.workers.count) == (tuple(shlex.split(line)), 2)
    assert engines.plan(request(line, BARE)).engine == "plain"
    assert engines.plan(request(line, TORCH)).engine == "plain", "it may be meant for a torchrun inside"


def test_a_program_from_standard_input_has_one_worker() -> None:
    with pytest.raises(UsageError, match="2 workers cannot read one program from standard input"):
        engines.plan(request("python -", asked(BARE)))
    with pytest.raises(UsageError, match="standard input"):
        engines.plan(request("python -u", asked(BARE)))
    one = overlay(BARE, {"nproc_per_node": "1"}, Origin.FLAG)
    assert engines.plan(request("python -", one)).engine == "torch"


@pytest.mark.parametrize(
    ("line", "job", "typed"),
    [
        ("composer x.py --lr 1", BARE, "--nproc-per-node N -- SCRIPT.py"),
        ("composer x.py --lr 1", asked(BARE), "--nproc-per-node N -- SCRIPT.py"),
        ("deepspeed --include localhost:0 x.py --lr 1", TORCH, "--nproc-per-node N -- SCRIPT.py"),
        ("python -m torch.distributed.launch x.py", TORCH, "--nproc-per-node N -- SCRIPT.py"),
        ("deepspeed --num_nodes 2 -m pkg", asked(TORCH), "--nproc-per-node N -- SCRIPT.py"),
        ("bash -c 'torchrun x.py'", TORCH, "Put `trainer-launch run --` directly in front of torchrun"),
        ("env A=1 torchrun x.py", asked(BARE), "Put `trainer-launch run --` directly in front of torchrun"),
        ("bash -c 'mpirun x'", MPI, "Put `trainer-launch run --` directly in front of mpirun"),
    ],
)
def test_who_starts_workers_itself_is_told_what_is_lost_and_what_to_type(line: str, job: Job, typed: str) -> None:
    said = warning(line, job)
    assert "starts the workers itself" in said
    assert "cannot restart a failed worker" in said
    assert typed in said


def test_a_number_of_workers_that_has_no_effect_is_said() -> None:
    assert "--nproc-per-node 2 has no effect" in warning("deepspeed x.py", asked(BARE))
    assert "--nproc-per-node 2 has no effect" in warning("python train.py", asked(JAX))
    assert "has no effect" not in warning("deepspeed --hostfile h x.py", TORCH)


@pytest.mark.parametrize("line", ["deepspeed x.py", "composer x.py --lr 1", "lightning run model x.py"])
def test_a_launcher_that_would_train_on_each_node_alone_is_refused(line: str) -> None:
    with pytest.raises(
        ContractError, match=r"train on each of the 2 nodes alone .* --nproc-per-node N -- SCRIPT\.py"
    ):
        engines.plan(request(line, TORCH))
    assert "alone" not in warning(line, replace(TORCH, nodes=NodeRange(1, 1)))
    assert warning(line, TORCH, engine="plain") == "", "that was asked for"


@pytest.mark.parametrize(
    ("line", "env"),
    [
        ("deepspeed --hostfile hosts x.py", {}),
        ("composer --world_size 16 --node_rank 1 --master_addr a x.py", {}),
        ("lightning run model --num-nodes 2 --main-address a x.py", {}),
        ("composer x.py", {"WORLD_SIZE": "16", "NODE_RANK": "1"}),
        ("bash -c 'export NODE_RANK=1; composer x.py'", {}),
    ],
)
def test_a_launcher_that_may_know_the_other_nodes_is_left_to_itself(line: str, env: dict[str, str]) -> None:
    (said,) = engines.plan(request(line, TORCH, env)).warnings
    assert "Each of the 2 nodes trains alone unless" in said


def test_torchrun_in_a_script_reads_the_platforms_variables_and_trains_alone_nowhere() -> None:
    assert "alone" not in warning("bash -c 'torchrun x.py'", TORCH)


MEETING = Job(
    contract="trainer-v2-torch",
    nodes=NodeRange(2, 2),
    node_rank=1,
    nproc_per_node=4,
    engine="torchrun",
    coordinator=Endpoint("job-node-0-0.job", 29500),
)


def test_who_starts_torchrun_by_variables_of_its_own_gets_the_jobs_nodes() -> None:
    env = engines.plan(request("llamafactory-cli train a.yaml", MEETING, {"NPROC_PER_NODE": "2"})).processes[0].env
    expected = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "job-node-0-0.job", "MASTER_PORT": "29500"}
    assert expected.items() <= env.items()
    assert (env["NPROC_PER_NODE"], env["FORCE_TORCHRUN"]) == ("2", "1"), "what the pod says stands"
    job = replace(MEETING, nodes=NodeRange(1, 1), node_rank=0)
    assert "NNODES" not in engines.plan(request("llamafactory-cli train a.yaml", job)).processes[0].env


def test_so_does_a_script_that_runs_such_a_program() -> None:
    line = "bash -c 'cd /data && llamafactory-cli train a.yaml'"
    assert engines.plan(request(line, MEETING)).processes[0].env["NNODES"] == "2"
    assert "NNODES" not in engines.plan(request(line, replace(MEETING, node_rank=None))).processes[0].env
    assert "NNODES" not in engines.plan(request("bash -c 'python x.py'", MEETING)).processes[0].env


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"coordinator": None}, "the address of node 0 is unknown"),
        ({"node_rank": None}, "the rank of this node is unknown"),
        ({"nodes": NodeRange(2, 4)}, "starts torchrun on a fixed number of nodes"),
    ],
)
def test_who_cannot_be_told_the_jobs_nodes_does_not_train_alone(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        engines.plan(request("swift sft --model m", replace(MEETING, **changes)))


def test_a_shell_in_a_torch_pod_hears_that_it_runs_once_and_what_to_type() -> None:
    said = warning("bash train.sh", TORCH)
    assert "bash runs once on this node" in said
    assert "put `trainer-launch run --` in front of the training command" in said
    assert "--nproc-per-node 4" in said
    assert "To start its workers, add --nproc-per-node 4" in warning("env A=1 python x.py", TORCH)


@pytest.mark.parametrize(
    ("line", "script", "typed"),
    [
        ("bash -c 'torchrun x.py'", None, ""),
        ("bash -c 'cd /x && exec mpirun x'", None, ""),
        ("env A=1 accelerate launch x.py", None, ""),
        ("bash start.sh", "cd /x\ntorchrun x.py", ""),
        ("bash start.sh", "trainer-launch run -- x.py", ""),
        ("bash start.sh", "/opt/bin/torchrun x.py", "directly in front of torchrun"),
        ("bash start.sh", "python -m torch.distributed.run x.py", "directly in front of torch.distributed.run"),
        ("bash start.sh", "tune run recipe", ""),
        ("bash start.sh", "dlrover-run x.py", "dlrover-run starts the workers itself"),
        ("bash start.sh", "python x.py", "put `trainer-launch run --` in front of the training command"),
        ("deepspeed --include localhost:0 x.py", None, "deepspeed starts the workers itself"),
        ("uv run python -m torch.distributed.run x.py", None, "directly in front of torch.distributed.run"),
        ("uv run x.py", None, "add --nproc-per-node 4."),
        ("conda run -n a python x.py", None, "add --nproc-per-node 4."),
        ("nsys profile -o f python x.py", None, "add --nproc-per-node 4."),
        ("swift sft --model m", None, ""),
    ],
)
def test_a_launcher_that_is_found_as_a_shim_needs_no_warning(line: str, script: str | None, typed: str) -> None:
    asked_for = request(line, replace(TORCH, coordinator=Endpoint("a", 1)), shims="/s")
    plan = engines.plan(replace(asked_for, command=replace(asked_for.command, shell=script)))
    assert (plan.warnings == ()) == (typed == ""), plan.warnings
    assert typed in "".join(plan.warnings)
    assert plan.processes[0].env["PATH"] == "/s:/usr/bin:/bin"


@pytest.mark.parametrize(
    ("line", "started"),
    [
        ("bash -lc 'torchrun x.py'", "bash -lc 'PATH=/s:$PATH; torchrun x.py'"),
        ("env A=1 bash -l -c 'torchrun x.py' name", "env A=1 bash -l -c 'PATH=/s:$PATH; torchrun x.py' name"),
        ("bash -ic 'cd /x; ./y'", "bash -ic 'PATH=/s:$PATH; cd /x; ./y'"),
        ("bash -c 'torchrun x.py; exit'", "bash -c 'torchrun x.py; exit'"),
        ("bash -l start.sh", "bash -l start.sh"),
        ("uv run --with x torchrun x.py", "uv run --with x /s/torchrun x.py"),
        ("nsys profile -o f mpirun x", "nsys profile -o f /s/mpirun x"),
        ("uv run /opt/bin/torchrun x.py", "uv run /opt/bin/torchrun x.py"),
        ("uv run python -m torch.distributed.run x", "uv run python -m torch.distributed.run x"),
    ],
)
def test_shims_are_found_where_something_else_comes_first_in_path(line: str, started: str) -> None:
    plan = engines.plan(request(line, TORCH, shims="/s"))
    assert plan.processes[0].argv == tuple(shlex.split(started))


@pytest.mark.parametrize(
    ("line", "job", "changes"),
    [
        ("bash train.sh", BARE, {}),
        ("bash train.sh", JAX, {}),
        ("bash train.sh", Job(contract="mpi-operator", engine="sshd"), {}),
        ("bash train.sh", Job(contract="torchrun-child", role="rank", engine="plain", nproc_per_node=2), {}),
        ("bash train.sh", TORCH, {"engine": "plain"}),
        ("bash -c 'exec trainer-launch run -- torchrun x.py'", TORCH, {}),
        ("horovodrun --help", MPI, {}),
        ("python train.py", BARE, {}),
        ("tune run recipe", Job(contract="trainer-v2-torchtune", engine="plain", nproc_per_node=2), {}),
    ],
)
def test_nothing_is_said_where_nothing_is_lost_or_it_was_asked_for(
    line: str, job: Job, changes: dict[str, Any]
) -> None:
    assert warning(line, job, **changes) == ""


@pytest.mark.parametrize(
    ("line", "is_told"),
    [
        ("python train.py", True),
        ("mpirun train.py", True),
        ("/usr/sbin/sshd -De", False),
        ("sh -c 'sshd -D'", False),
    ],
)
def test_a_pod_that_mpirun_has_to_reach_and_that_runs_no_sshd_is_told_so(line: str, is_told: bool) -> None:
    plan = engines.plan(request(line, Job(contract="trainer-v2-mpi", role="node", engine="sshd")))
    assert any("set the command to: trainer-launch sshd" in warning for warning in plan.warnings) is is_told


@pytest.mark.parametrize(
    "line", ["runuser -u app -- torchrun x.py", "su app -c 'torchrun x.py'", "chroot /r torchrun x"]
)
def test_a_launcher_that_another_user_or_root_starts_is_said_to_run_without_ours(line: str) -> None:
    asked_for = request(line, TORCH)
    assert not starts_launchers(asked_for.command)
    assert "directly in front of torchrun" in warning(line, TORCH)


def test_a_program_that_is_told_a_launcher_finds_the_shim_in_its_place() -> None:
    job = replace(TORCH, coordinator=Endpoint("node-0", 29500))
    plan = engines.plan(request("some-wrapper --x 1 torchrun x.py", job, shims="/s"))
    assert starts_launchers(request("some-wrapper --x 1 torchrun x.py", TORCH).command)
    assert plan.warnings == ()
    assert plan.processes[0].argv == ("some-wrapper", "--x", "1", "torchrun", "x.py"), "its words are its own"


def test_help_of_torchrun_is_no_launcher_that_has_escaped() -> None:
    assert warning("torchrun --help", BARE) == ""
