"""Front ends such as `accelerate launch` run as they are, in front of the launcher; `deepspeed` is a table."""

from __future__ import annotations

import json
import shlex

import pytest

from tests.planning.requests import request
from trainer_launch.model import Job, NodeRange
from trainer_launch.model.errors import UsageError
from trainer_launch.planning import engines
from trainer_launch.planning.command import CommandKind, parse_command

BARE = Job(contract="unknown")
PAIR = Job(contract="trainer-v2-torch", nodes=NodeRange(2, 2), node_rank=0, nproc_per_node=4, engine="torchrun")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("accelerate launch t.py", "accelerate launch"),
        ("/opt/bin/accelerate launch --config_file c.yaml t.py", "accelerate launch"),
        ("accelerate-launch t.py", "accelerate-launch"),
        ("python -m accelerate.commands.launch t.py", "accelerate.commands.launch"),
        (
            "python3 -u -m accelerate.commands.accelerate_cli launch t.py",
            "accelerate.commands.accelerate_cli launch",
        ),
        ("-m accelerate.commands.launch t.py", "accelerate.commands.launch"),
        ("fabric run --devices 2 t.py", "fabric run"),
        ("python -m lightning.fabric.cli run t.py", "lightning.fabric.cli run"),
        ("tune run --nproc_per_node 2 recipe --config c", "tune run"),
        ("trl sft --model m", "trl sft"),
    ],
)
def test_a_front_end_is_recognised_and_decides_on_the_command(line: str, name: str) -> None:
    command = parse_command(shlex.split(line))
    assert (command.kind, command.front_end) == (CommandKind.FRONT_END, name)
    plan = engines.plan(request(line, PAIR, front_end=("/opt/python3", "/opt/bin/x")))
    assert plan.engine == "front end"
    assert f"{name} decides on the command" in plan.reasons
    assert "trainer-launch run … -- torchrun …" in " ".join(plan.reasons)


@pytest.mark.parametrize(
    "line",
    [
        "accelerate config",
        "accelerate",
        "fabric",
        "tune ls",
        "tune run",
        "tune run r --config c",
        "tune run --help",
        "trl env",
    ],
)
def test_what_starts_no_workers_is_a_program(line: str) -> None:
    assert parse_command(line.split()).kind is CommandKind.PROGRAM


def test_a_front_end_runs_in_its_own_python_as_it_was_typed() -> None:
    plan = engines.plan(
        request("accelerate launch t.py --x 1", BARE, front_end=("/opt/python3", "/opt/bin/accelerate"))
    )
    python, ours, orders, *words = plan.processes[0].argv
    assert (python, words) == ("/opt/python3", ["/opt/bin/accelerate", "launch", "t.py", "--x", "1"])
    assert ours.endswith("/pytorch/front_end.py")
    assert json.loads(orders)["launcher"] == ["trainer-launch", "run", "--"]
    typed = engines.plan(request("python -u -m lightning.fabric.cli run t.py", BARE))
    assert typed.processes[0].argv[:2] == ("python", "-u")
    assert typed.processes[0].argv[4:] == ("-m", "lightning.fabric.cli", "run", "t.py")


@pytest.mark.parametrize(("line", "engine"), [("accelerate launch t.py", "plain"), ("fabric run t.py", "mpi")])
def test_with_another_engine_it_is_a_program(line: str, engine: str) -> None:
    assert engines.plan(request(line, BARE, engine=engine)).engine == engine


def test_a_rank_of_a_running_job_becomes_no_launcher() -> None:
    rank = Job(contract="torchrun-child", role="rank", engine="plain")
    assert engines.plan(request("accelerate launch t.py", rank)).engine == "plain"


@pytest.mark.parametrize(
    "line", ["accelerate launch --num_processes 8 t.py", "trl sft --num-processes=8 --model m"]
)
def test_a_total_of_workers_for_one_of_several_nodes_is_refused_with_what_to_add(line: str) -> None:
    with pytest.raises(UsageError, match=r"counts the workers of all nodes, .* 2 nodes .*; add --num_machines 2"):
        engines.plan(request(line, PAIR))
    head, _, rest = line.partition(" --")
    assert engines.plan(request(f"{head} --num_machines 2 --{rest}", PAIR)).engine == "front end"
    assert engines.plan(request(line, PAIR, nproc_per_node="4")).engine == "front end"
    assert engines.plan(request(line, BARE)).engine == "front end"


@pytest.mark.parametrize(
    ("line", "options", "program"),
    [
        (
            "deepspeed --num_gpus 2 --num_nodes=2 --master_port 99 t.py --x 1",
            {"nproc_per_node": "2", "nnodes": "2", "master_port": "99"},
            "t.py --local_rank=${local_rank} --x 1",
        ),
        (
            "deepspeed --num_gpus 2 --no_local_rank --module pkg",
            {"nproc_per_node": "2", "module": "1"},
            "pkg",
        ),
        ("python -m deepspeed.launcher.runner --num_gpus 3 --no_local_rank t.py", {"nproc_per_node": "3"}, "t.py"),
    ],
)
def test_options_of_deepspeed_that_torchrun_has_are_torchruns(
    line: str, options: dict[str, str], program: str
) -> None:
    command = parse_command(shlex.split(line))
    assert (command.kind, command.is_deepspeed) == (CommandKind.TORCHRUN, True)
    assert command.torchrun is not None
    assert (dict(command.torchrun.options), " ".join(command.torchrun.program)) == (options, program)


@pytest.mark.parametrize(
    "options", ["", "--num_gpus 0", "--num_gpus", "--include localhost:0 --num_gpus 1", "-H f --num_gpus 1"]
)
def test_deepspeed_stays_a_program_where_an_option_has_no_equivalent_or_nobody_says_how_many(options: str) -> None:
    assert parse_command(f"deepspeed {options} t.py".split()).kind is CommandKind.PROGRAM
