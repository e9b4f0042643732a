"""What stands in front of a training command: taken off where that is safe, and left where it is not."""

from __future__ import annotations

import shlex

import pytest

from trainer_launch.planning.wrappers import see_through


@pytest.mark.parametrize(
    ("line", "prefix", "command"),
    [
        ("env A=1 torchrun t.py", "env A=1", "torchrun t.py"),
        ("/usr/bin/env -u HOME A=b=c B= python3 t.py", "/usr/bin/env -u HOME A=b=c B=", "python3 t.py"),
        ("nice -n 5 ionice -c2 -n 0 train.py --lr 1", "nice -n 5 ionice -c2 -n 0", "train.py --lr 1"),
        ("nice -10 torchrun t.py", "nice -10", "torchrun t.py"),
        ("numactl -N 0 --membind=0 torchrun t.py", "numactl -N 0 --membind=0", "torchrun t.py"),
        ("numactl --cpunodebind 0 -l -- python t.py", "numactl --cpunodebind 0 -l --", "python t.py"),
        ("taskset -c 0-3 python t.py", "taskset -c 0-3", "python t.py"),
        ("taskset 0xf torchrun t.py", "taskset 0xf", "torchrun t.py"),
        ("stdbuf -oL -e0 mpirun -np 2 t", "stdbuf -oL -e0", "mpirun -np 2 t"),
        ("nohup horovodrun -np 2 t", "nohup", "horovodrun -np 2 t"),
        ("tini -s -- torchrun t.py", "", "torchrun t.py"),
        ("tini -g torchrun t.py", "", "torchrun t.py"),
        ("dumb-init -c -- env A=1 torchrun t.py", "env A=1", "torchrun t.py"),
        ("bash -c 'torchrun --nproc-per-node 2 t.py \"a b\"'", "", "torchrun --nproc-per-node 2 t.py 'a b'"),
        ("sh -euxc 'exec python t.py'", "", "python t.py"),
        ("tini -- bash -c 'numactl -N 0 torchrun t.py'", "numactl -N 0", "torchrun t.py"),
    ],
)
def test_a_wrapper_that_becomes_the_command_stands_in_front_of_the_launcher(
    line: str, prefix: str, command: str
) -> None:
    seen = see_through(shlex.split(line))
    assert (seen.prefix, seen.command) == (tuple(shlex.split(prefix)), tuple(shlex.split(command)))


@pytest.mark.parametrize(
    "line",
    [
        "train.py",
        "torchrun t.py",
        "env",
        "env A=1",
        "env -S 'torchrun t.py'",
        "env -i torchrun t.py",
        "env --split-string=x torchrun t.py",
        "env A=1 ./program",
        "nice ./program",
        "numactl --touch 3 torchrun t.py",
        "numactl --hardware",
        "taskset -p 0xf 1234",
        "stdbuf --help",
        "timeout 60 torchrun t.py",
        "uv run torchrun t.py",
        "conda run -n x python t.py",
        "poetry run torchrun t.py",
        "bash train.sh",
        "bash -c 'torchrun t.py' name argument",
        "bash -lc 'torchrun t.py | tee log'",
        "bash -c 'A=1 torchrun t.py'",
        "bash -c 'torchrun t.py $ARGS'",
        "bash -c 'cd /x; torchrun t.py'",
        "bash -c 'torchrun t.py > log 2>&1'",
        "bash -c 'torchrun *.py'",
        "bash -c 'torchrun \"t.py'",
        "bash -c ./program",
        "bash -c 'time torchrun t.py'",
        "bash -c ''",
        "bash -c",
        "bash",
        "tini --",
    ],
)
def test_a_command_stays_as_it_is_where_something_would_be_lost(line: str) -> None:
    words = tuple(shlex.split(line))
    assert see_through(words) == ((), words, {})


def test_no_command_is_no_command() -> None:
    assert see_through(()) == ((), (), {})


@pytest.mark.parametrize(
    ("line", "command", "env"),
    [
        ("accelerate launch --num_processes 4 t.py --x 1", "torchrun --nproc-per-node=4 t.py --x 1", {}),
        (
            "accelerate launch --multi_gpu --num-processes=8 --num_machines 2 --machine_rank 1 "
            "--main_process_ip a --main_process_port 99 -m pkg",
            "torchrun --nproc-per-node=4 --nnodes 2 --node-rank 1 --master-addr a --master-port 99 -m pkg",
            {},
        ),
        (
            "accelerate launch --cpu --num_processes 2 --mixed_precision bf16 t.py",
            "torchrun --nproc-per-node=2 t.py",
            {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "bf16"},
        ),
    ],
)
def test_options_of_accelerate_launch_that_have_an_equivalent_are_taken_over(
    line: str, command: str, env: dict[str, str]
) -> None:
    assert see_through(shlex.split(line)) == ((), tuple(shlex.split(command)), env)


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--use_fsdp --num_processes 2",
        "--config_file c.yaml --num_processes 2",
        "--num_processes 3 --num_machines 2",
        "--num_processes 0",
        "--num_processes",
        "--num_processes x",
        "--tpu --num_processes 2",
    ],
)
def test_accelerate_launch_stays_where_an_option_has_none_or_nobody_says_how_many(options: str) -> None:
    words = tuple(f"accelerate launch {options} t.py".split())
    assert see_through(words) == ((), words, {})
