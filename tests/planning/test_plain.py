"""The plain engine, and which engine runs what."""

from __future__ import annotations

import pytest

from tests.planning.requests import request
from trainer_launch.model import Job, NodeRange
from trainer_launch.planning import engines

BARE = Job(contract="unknown")
TORCH = Job(contract="trainer-v2-torch", nodes=NodeRange(1, 1), nproc_per_node="auto", engine="torchrun")
JAX = Job(contract="trainer-v2-jax", nodes=NodeRange(1, 1), engine="plain")
RANK = Job(contract="torchrun-child", role="rank", engine="plain")
RUN_DIR = {"TRAINER_LAUNCH_RUN_DIR": "/scratch"}


@pytest.mark.parametrize(
    ("line", "job", "engine"),
    [
        ("train.py", BARE, "plain"),
        ("train.py", Job(contract="unknown", nproc_per_node=2), "torch"),
        ("train.py", Job(contract="unknown", nodes=NodeRange(1, 1)), "torch"),
        ("torchrun train.py", BARE, "torch"),
        ("torchrun train.py", JAX, "torch"),
        ("torchrun train.py", RANK, "plain"),
        ("train.py", TORCH, "torch"),
        ("python train.py", TORCH, "torch"),
        ("-m pkg", TORCH, "torch"),
        ("bash -c 'torchrun train.py'", TORCH, "plain"),
        ("tune run x", TORCH, "plain"),
        ("-m torch.distributed.run train.py", BARE, "torch"),
        ("python -m torch.distributed.launch --nproc_per_node=8 train.py", TORCH, "plain"),
        ("-m accelerate.commands.launch train.py", TORCH, "front end"),
        ("python -m deepspeed.launcher.runner train.py", Job(contract="mpijob-v1", engine="mpirun"), "plain"),
        ("python train.py", JAX, "plain"),
        ("mpirun -np 2 train", Job(contract="trainer-v2-mpi", engine="mpirun"), "mpi"),
        ("mpirun -np 2 train", BARE, "mpi"),
        ("/opt/mpi/bin/mpiexec.hydra -n 2 train", BARE, "mpi"),
        ("python train.py", Job(contract="trainer-v2-mpi", engine="mpirun"), "mpi"),
        ("bash -c 'mpirun train'", Job(contract="trainer-v2-mpi", engine="mpirun"), "plain"),
    ],
)
def test_the_engine_follows_the_command_and_the_contract(line: str, job: Job, engine: str) -> None:
    plan = engines.plan(request(line, job))
    assert plan.engine == engine
    assert plan.reasons


def test_a_named_engine_wins() -> None:
    assert engines.plan(request("train.py", TORCH, engine="plain")).engine == "plain"
    assert engines.plan(request("train.py", BARE, engine="torchrun")).engine == "torchrun"


@pytest.mark.parametrize(
    ("line", "argv"),
    [
        ("train.py x", ("/venv/bin/python", "train.py", "x")),
        ("-m pkg x", ("/venv/bin/python", "-m", "pkg", "x")),
        ("-m torch.distributed.launch x", ("/venv/bin/python", "-m", "torch.distributed.launch", "x")),
        ("python3 -u train.py", ("python3", "-u", "train.py")),
        ("echo a 'b c'", ("echo", "a", "b c")),
    ],
)
def test_the_program_is_started_as_typed_and_python_is_put_before_a_script(
    line: str, argv: tuple[str, ...]
) -> None:
    (process,) = engines.plan(request(line, JAX)).processes
    assert process.argv == argv


def test_a_torchrun_inside_a_shell_finds_numbers_that_it_can_use() -> None:
    env = {"PET_NPROC_PER_NODE": "auto", "PET_STANDALONE": "", "OTHER": "x"}
    (process,) = engines.plan(request("bash -c 'torchrun train.py'", TORCH, env)).processes
    assert process.env == {"PET_NPROC_PER_NODE": "8", "PET_STANDALONE": "1", "OTHER": "x", **RUN_DIR}


def test_other_programs_get_the_environment_and_the_runs_folder() -> None:
    env = {"PET_STANDALONE": "", "OTHER": "x"}
    (process,) = engines.plan(request("train", JAX, env)).processes
    assert process.env == {**env, **RUN_DIR}
