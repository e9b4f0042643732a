"""What stands in front of a training command: taken off where that is safe, and left where it is not."""

from __future__ import annotations

import shlex

import pytest

from trainer_launch.planning.command import see_through


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
        "bash -lc 'torchrun t.py'",
        "bash -l -c 'torchrun t.py'",
        "bash -ic 'torchrun t.py'",
        "bash --login -c 'torchrun t.py'",
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
    assert see_through(words) == ((), words)


def test_an_empty_command_stays_empty() -> None:
    assert see_through(()) == ((), ())
