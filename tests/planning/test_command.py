"""What the user typed after --, recognised."""

from __future__ import annotations

import shlex

import pytest

from trainer_launch.model.errors import UsageError
from trainer_launch.planning.command import Kind, parse_command


@pytest.mark.parametrize(
    ("line", "kind", "python", "program"),
    [
        ("train.py --lr 1", Kind.SCRIPT, "", "train.py --lr 1"),
        ("./train.py", Kind.SCRIPT, "", "./train.py"),
        ("-m pkg.mod --lr 1", Kind.MODULE, "", "pkg.mod --lr 1"),
        ("python train.py", Kind.SCRIPT, "python", "train.py"),
        ("/usr/bin/python3.11 -u -X dev train.py -v", Kind.SCRIPT, "/usr/bin/python3.11 -u -X dev", "train.py -v"),
        ("python3 -m pkg.mod -v", Kind.MODULE, "python3", "pkg.mod -v"),
        ("python -uW ignore train.py", Kind.SCRIPT, "python -uW ignore", "train.py"),
        ("python -Wignore -X dev -m mod x", Kind.MODULE, "python -Wignore -X dev", "mod x"),
        ("python -um mod x", Kind.MODULE, "python -u", "mod x"),
        ("python -mmod x", Kind.PROGRAM, "", "python -mmod x"),
        ("python '-cprint(1)' x", Kind.PROGRAM, "", "python '-cprint(1)' x"),
        ("python --version x", Kind.PROGRAM, "", "python --version x"),
        ("python -c pass", Kind.PROGRAM, "", "python -c pass"),
        ("python -", Kind.PROGRAM, "", "python -"),
        ("python", Kind.PROGRAM, "", "python"),
        ("bash -c 'torchrun train.py'", Kind.PROGRAM, "", "bash -c 'torchrun train.py'"),
        ("mpirun -np 2 python train.py", Kind.PROGRAM, "", "mpirun -np 2 python train.py"),
        ("pythonista.sh", Kind.PROGRAM, "", "pythonista.sh"),
    ],
)
def test_a_command_is_recognised(line: str, kind: Kind, python: str, program: str) -> None:
    command = parse_command(shlex.split(line))
    assert command.kind is kind
    assert command.python == tuple(shlex.split(python))
    assert command.program == tuple(shlex.split(program))
    assert command.argv == tuple(shlex.split(line))


def test_a_module_may_be_glued_to_its_flag() -> None:
    assert parse_command(("-mpkg.mod", "x")) == parse_command(("-m", "pkg.mod", "x"))


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nnodes=2 -m pkg.mod x",
        "python -m torch.distributed.run --nnodes 2 -m pkg.mod x",
        "-m torch.distributed.run --nnodes 2 -m pkg.mod x",
    ],
)
def test_torchrun_is_taken_apart_however_it_is_called(line: str) -> None:
    torchrun = parse_command(shlex.split(line)).torchrun
    assert torchrun is not None
    assert dict(torchrun.options) == {"nnodes": "2", "module": "1"}
    assert torchrun.program == ("pkg.mod", "x")


@pytest.mark.parametrize(
    ("line", "is_worker"),
    [
        ("train.py", True),
        ("-m pkg.mod", True),
        ("python -m pkg.mod torch.distributed.launch", True),
        ("python -m torch.distributed.launch --nproc_per_node=8 train.py", False),
        ("-m accelerate.commands.launch train.py", False),
        ("python3 -u -m accelerate.commands.accelerate_cli launch train.py", False),
        ("python -m deepspeed.launcher.runner train.py", False),
        ("torchrun train.py", False),
        ("deepspeed train.py", False),
    ],
)
def test_a_module_that_starts_workers_itself_is_no_worker(line: str, is_worker: bool) -> None:
    assert parse_command(shlex.split(line)).is_worker is is_worker


@pytest.mark.parametrize("words", [[], [""], ["--lr", "1"], ["-c", "pass"]])
def test_no_command_is_an_error_that_says_how_to_write_one(words: list[str]) -> None:
    with pytest.raises(UsageError, match=r"--|program"):
        parse_command(words)


def test_an_option_of_the_launcher_after_the_entrypoints_dashes_is_named_as_a_variable() -> None:
    with pytest.raises(UsageError, match=r"goes before --, or into TRAINER_LAUNCH_NPROC_PER_NODE$"):
        parse_command(["--nproc-per-node=2", "train.py"])
