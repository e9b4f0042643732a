"""Programs that start workers themselves are recognised wherever a command's name can stand, and nowhere else."""

from __future__ import annotations

import shlex

import pytest

from trainer_launch.planning.command import launcher_in


@pytest.mark.parametrize(
    ("line", "name", "is_inside"),
    [
        ("torchrun x.py", "torchrun", False),
        ("/opt/venv/bin/torchrun x.py", "torchrun", False),
        ("env A=1 torchrun x.py", "torchrun", True),
        ("nice -n 5 torchrun x.py", "torchrun", True),
        ("uv run torchrun x.py", "torchrun", True),
        ("timeout 60 python -u -m torch.distributed.run x.py", "torch.distributed.run", True),
        ("bash -c 'pip install x && torchrun --nproc-per-node 2 x.py'", "torchrun", True),
        ("""bash -c 'cat > x.py << EOM\nprint("it is")\nEOM\ntorchrun "x.py"'""", "torchrun", True),
        ("bash -euc 'A=1 exec python3 -m torch.distributed.run x.py'", "torch.distributed.run", True),
        ("env A=1 sh -c 'torchrun x.py'", "torchrun", True),
        ("bash -lc 'torchrun --version; exec trainer-launch run -- torchrun x.py'", "trainer-launch", True),
        ("accelerate launch --cpu x.py", "accelerate launch", False),
        ("python -m accelerate.commands.launch x.py", "accelerate.commands.launch", False),
        ("-m torch.distributed.launch x.py", "torch.distributed.launch", False),
        ("deepspeed --num_gpus 2 x.py", "deepspeed", False),
        ("sh -c 'mpirun -np 2 x'", "mpirun", True),
        ("trl sft --config c.yaml", "trl sft", False),
        ("uv run accelerate-launch x.py", "accelerate-launch", True),
    ],
)
def test_a_launcher_is_recognised(line: str, name: str, is_inside: bool) -> None:
    found = launcher_in(shlex.split(line))
    assert found is not None
    assert (found.name, found.is_inside) == (name, is_inside)


@pytest.mark.parametrize(
    "line",
    [
        "accelerate config",
        "trl env",
        "./train.sh --launcher deepspeed",
        "uv run --with deepspeed train.py",
        "env A=1 python train.py deepspeed",
        "env A=torchrun python train.py",
        "python -c 'import torchrun'",
        "python train.py -m torch.distributed.run",
        "bash train.sh",
        "bash -c 'echo torchrun'",
        "bash -c 'pip install deepspeed; python train.py'",
        "bash",
        "bash -c",
        "env",
    ],
)
def test_a_word_that_names_no_launcher_is_none(line: str) -> None:
    assert launcher_in(shlex.split(line)) is None


@pytest.mark.parametrize(
    ("line", "script"),
    [
        ("accelerate launch --num_processes 2 src/x.py --lr 1", "src/x.py"),
        ("accelerate launch -m pkg.train", "-m pkg.train"),
        ("deepspeed train", "SCRIPT.py"),
    ],
)
def test_the_script_that_a_launcher_starts_is_named(line: str, script: str) -> None:
    found = launcher_in(shlex.split(line))
    assert found is not None
    assert found.script == script
