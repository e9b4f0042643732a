"""What stands in front of a training command: taken off where that is safe, and left where it is not."""

from __future__ import annotations

import shlex

import pytest

from trainer_launch.model import NodeRange
from trainer_launch.model.errors import UsageError
from trainer_launch.planning.wrappers import as_torchrun, see_through, typed_launcher


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


@pytest.mark.parametrize(
    ("line", "command", "env"),
    [
        ("accelerate launch --num_processes 4 t.py --x 1", "torchrun --nproc-per-node=4 t.py --x 1", {}),
        (
            "accelerate launch --multi_gpu --num-processes=8 --num_machines 2 --machine_rank 1 "
            "--main_process_ip a --main_process_port 99 -m pkg",
            "torchrun --nproc-per-node=4 --nnodes=2 --node-rank=1 --master-addr=a --master-port=99 -m pkg",
            {},
        ),
        (
            "accelerate launch --cpu --num_processes 2 --mixed_precision bf16 t.py",
            "torchrun --nproc-per-node=2 t.py",
            {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "bf16"},
        ),
        ("accelerate-launch --num_processes 2 t.py", "torchrun --nproc-per-node=2 t.py", {}),
        (
            "python -u -m accelerate.commands.launch --num_processes 2 t.py",
            "python -u -m torch.distributed.run --nproc-per-node=2 t.py",
            {},
        ),
        ("-m accelerate.commands.launch --num_processes 2 t.py", "torchrun --nproc-per-node=2 t.py", {}),
        (
            "deepspeed --num_gpus 2 --num_nodes=2 --master_port 99 t.py --x 1",
            "torchrun --nproc-per-node=2 --nnodes=2 --master-port=99 t.py --local_rank=${local_rank} --x 1",
            {},
        ),
        ("deepspeed --num_gpus 2 --no_local_rank --module pkg", "torchrun --nproc-per-node=2 -m pkg", {}),
        (
            "python -m deepspeed.launcher.runner --num_gpus 2 --no_local_rank t.py",
            "python -m torch.distributed.run --nproc-per-node=2 t.py",
            {},
        ),
        (
            "tune run --nproc_per_node 2 --rdzv_endpoint=a:1 lora_finetune_distributed --config c rank=16",
            "torchrun --nproc-per-node=2 --rdzv-endpoint=a:1 -m torchtune._cli.tune run lora_finetune_distributed "
            "--config c rank=16",
            {},
        ),
    ],
)
def test_options_of_accelerate_deepspeed_and_torchtune_that_have_an_equivalent_are_taken_over(
    line: str, command: str, env: dict[str, str]
) -> None:
    assert taken_over(line) == (tuple(shlex.split(command)), env)


def taken_over(line: str, nodes: NodeRange | None = None) -> tuple[tuple[str, ...], dict[str, str]] | None:
    typed = typed_launcher(shlex.split(line))
    assert typed is not None
    return as_torchrun(typed, nodes)


@pytest.mark.parametrize(("nodes", "workers"), [(1, 4), (2, 2), (4, 1)])
def test_accelerates_number_of_processes_is_that_of_all_nodes(nodes: int, workers: int) -> None:
    seen = taken_over("accelerate launch --num_processes 4 t.py", NodeRange(nodes, nodes))
    assert seen == (("torchrun", f"--nproc-per-node={workers}", "t.py"), {})


def test_a_number_of_processes_that_the_nodes_cannot_share_is_refused() -> None:
    with pytest.raises(
        UsageError, match="--num_processes is 3, the total of all nodes, which 2 nodes cannot share"
    ):
        taken_over("accelerate launch --num_processes 3 t.py", NodeRange(2, 2))
    assert taken_over("accelerate launch --num_processes 4 t.py", NodeRange(1, 2)) is None, "nobody knows how many"


def test_deepspeeds_number_of_gpus_is_that_of_each_node() -> None:
    seen = taken_over("deepspeed --num_gpus 3 --no_local_rank t.py", NodeRange(2, 2))
    assert seen == (("torchrun", "--nproc-per-node=3", "t.py"), {})


@pytest.mark.parametrize(
    ("line", "env", "path"),
    [
        ("accelerate launch t.py", {"HOME": "/h"}, "/h/.cache/huggingface/accelerate/default_config.yaml"),
        ("accelerate launch t.py", {"XDG_CACHE_HOME": "/c"}, "/c/huggingface/accelerate/default_config.yaml"),
        ("accelerate launch t.py", {"HF_HOME": "/f", "HOME": "/h"}, "/f/accelerate/default_config.yaml"),
        ("accelerate launch --cpu t.py", {"HOME": "/h"}, None),
        ("deepspeed t.py", {"HOME": "/h"}, "/job/hostfile"),
        ("tune run --nnodes 2 r", {"HOME": "/h"}, None),
    ],
)
def test_where_options_come_from_that_were_not_typed(line: str, env: dict[str, str], path: str | None) -> None:
    typed = typed_launcher(line.split())
    assert typed is not None
    assert typed.defaults(env) == path


@pytest.mark.parametrize(
    "line",
    [
        *("accelerate config", "torchrun t.py", "python t.py", "-m pkg", "accelerate", ""),
        *("tune ls", "tune run", "tune run r --config c", "tune run --help"),
    ],
)
def test_other_commands_have_no_such_options(line: str) -> None:
    assert typed_launcher(line.split()) is None


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
    assert taken_over(f"accelerate launch {options} t.py") is None


@pytest.mark.parametrize("options", ["", "--num_gpus 0", "--include localhost:0 --num_gpus 1", "-H f --num_gpus 1"])
def test_deepspeed_stays_likewise(options: str) -> None:
    assert taken_over(f"deepspeed {options} t.py") is None
