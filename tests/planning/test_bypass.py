"""Commands that are not Python: workers where their number is given, else a warning that says what is lost."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from msgspec.structs import replace

from tests.planning.requests import request
from trainer_launch.model import Job, NodeRange, Origin
from trainer_launch.model.errors import UsageError
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
        ("composer x.py --lr 1", BARE, "trainer-launch run --nproc-per-node N -- x.py"),
        ("composer x.py --lr 1", asked(BARE), "trainer-launch run --nproc-per-node 2 -- x.py"),
        ("deepspeed --include localhost:0 x.py --lr 1", TORCH, "trainer-launch run -- x.py"),
        ("python -m torch.distributed.launch x.py", TORCH, "trainer-launch run -- x.py"),
        ("deepspeed -m pkg", asked(TORCH), "trainer-launch run --nproc-per-node 2 -- -m pkg"),
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
    assert "has no effect" not in warning("deepspeed x.py", TORCH)


def test_nodes_that_each_train_alone_are_said() -> None:
    assert "Each of the 2 nodes trains alone unless" in warning("deepspeed x.py", TORCH)
    assert "alone" not in warning("bash -c 'torchrun x.py'", TORCH), "torchrun reads the platform's variables"
    assert "alone" not in warning("deepspeed x.py", replace(TORCH, nodes=NodeRange(1, 1)))


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
    asked_for = request(line, TORCH, shims="/s")
    plan = engines.plan(replace(asked_for, command=replace(asked_for.command, shell=script)))
    assert (plan.warnings == ()) == (typed == ""), plan.warnings
    assert typed in "".join(plan.warnings)
    assert plan.processes[0].env["PATH"] == "/s:/usr/bin:/bin"


def test_a_launcher_in_a_script_gets_the_options_that_describe_the_job() -> None:
    plan = engines.plan(request("bash -c 'torchrun x.py'", asked(TORCH), shims="/s"))
    assert plan.warnings == ()
    assert plan.processes[0].env["TRAINER_LAUNCH_NPROC_PER_NODE"] == "2"


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
    "line", ["runuser -u app -- torchrun x.py", "su app -c 'torchrun x.py'", "chroot /r torchrun x"]
)
def test_a_launcher_that_another_user_or_root_starts_is_said_to_run_without_ours(line: str) -> None:
    asked_for = request(line, TORCH)
    assert not starts_launchers(asked_for.command)
    assert "directly in front of torchrun" in warning(line, TORCH)


def test_a_program_that_is_told_a_launcher_finds_the_shim_in_its_place() -> None:
    plan = engines.plan(request("some-wrapper --x 1 torchrun x.py", TORCH, shims="/s"))
    assert starts_launchers(request("some-wrapper --x 1 torchrun x.py", TORCH).command)
    assert plan.warnings == ()
    assert plan.processes[0].argv == ("some-wrapper", "--x", "1", "torchrun", "x.py"), "its words are its own"


def test_help_of_torchrun_is_no_launcher_that_has_escaped() -> None:
    assert warning("torchrun --help", BARE) == ""
