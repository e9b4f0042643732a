"""A front end that calls torch.distributed.run becomes the launcher, with its options, variables and process."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.cli.launching import Started, ends_of, launch, launched, program, start
from tests.contracts.pods import V2_TORCH
from tests.ports import free_port

pytestmark = [pytest.mark.process, pytest.mark.torch]
WORKER = """
import json, os
names = ("RANK", "WORLD_SIZE", "LT_DEVICES")
print(json.dumps({**{name: os.environ.get(name) for name in names}, "parent": os.getppid()}), flush=True)
"""
START = """
import os, subprocess, sys, time
print("pid", os.getpid(), flush=True)
import torch.distributed.run as torchrun
os.environ["LT_DEVICES"] = "2"
"""
BODIES = {
    "list": "torchrun.main('--nproc_per_node=2 --nnodes=1 --node_rank=0 --master_port=29400 worker.py'.split())",
    "namespace": "torchrun.run(torchrun.get_args_parser().parse_args(['--nproc-per-node', '2', 'worker.py']))",
    "head": "torchrun.main('--nnodes=2 --node_rank=0 --master_addr=head.invalid worker.py'.split())",
    "child": "subprocess.Popen([sys.executable, 'worker.py'], env={**os.environ, 'RANK_IS': '0'}).wait()",
    "cpu": "subprocess.Popen([sys.executable, 'worker.py'], env={**os.environ, 'MASTER_ADDR': '127.0.0.1'}).wait()",
    "wrong": "sys.exit(3)",
    "slow": "print('begins', flush=True); time.sleep(60)",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the worker, and a first folder of PATH for `fabric`."""
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path


def fabric(folder: Path, body: str) -> None:
    """A front end of the name, which does this."""
    program(folder / "bin" / "fabric", START + BODIES[body], sys.executable)


def test_a_front_end_behind_a_wrapper_is_one_too_but_a_script_of_a_shell_is_a_program(folder: Path) -> None:
    fabric(folder, "child")
    ended = launch("run", "--", "env", "LT_DEVICES=3", "fabric", "run", "worker.py", cwd=folder)
    assert (ended.returncode, "engine=plain" in ended.stderr, "parent" in ended.stdout) == (0, True, True), ended
    (folder / "bin" / "fabric").write_text("#!/bin/sh\necho a shell\n")
    ended = launch("run", "--", "fabric", "run", "worker.py", cwd=folder)
    assert (ended.returncode, ended.stdout) == (0, "a shell\n"), ended.stderr


@pytest.mark.parametrize("body", ["list", "namespace"])
def test_its_call_of_torchrun_becomes_the_launcher_with_what_was_typed_and_set(folder: Path, body: str) -> None:
    fabric(folder, body)
    ended = launched("run", "--start-method", "exec", "--prefix", "--", "fabric", "run", "worker.py", cwd=folder)
    lines = re.findall(r"^\[0:\d\] (\{.*)", ended.stdout, re.MULTILINE)
    workers = [json.loads(line) for line in lines]
    assert sorted(worker["RANK"] for worker in workers) == ["0", "1"]
    assert {(worker["WORLD_SIZE"], worker["LT_DEVICES"]) for worker in workers} == {("2", "2")}
    assert {worker["parent"] for worker in workers} == {int(re.findall(r"pid (\d+)", ended.stdout)[0])}, (
        "PID 1 stays"
    )
    assert "engine=torch node=0/1 workers=2" in ended.stderr


def test_a_script_that_it_starts_as_a_child_runs_under_the_launcher(folder: Path) -> None:
    fabric(folder, "child")
    ended = launched("run", "--nproc-per-node", "1", "--", "fabric", "run", "worker.py", cwd=folder)
    (worker,) = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert (worker["RANK"], worker["LT_DEVICES"]) == ("0", "2")


def test_a_loopback_address_that_it_makes_up_for_its_child_is_not_the_jobs(folder: Path) -> None:
    """As of `accelerate launch --cpu --num_machines 2 --main_process_ip 127.0.0.1` in the pods of a PyTorchJob."""
    fabric(folder, "cpu")
    pod = {"MASTER_ADDR": "head.invalid", "MASTER_PORT": "23456", "RANK": "1", "WORLD_SIZE": "2"}
    pod |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "1"}
    pod |= {f"PET_{name}": pod[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    ended = launch("run", "--wait-timeout", "1", "--", "fabric", "run", "worker.py", cwd=folder, env=pod)
    assert "node=1/2 workers=1 coordinator=head.invalid:23456" in ended.stderr


def test_one_node_in_a_pod_of_several_is_an_error_in_words(folder: Path) -> None:
    fabric(folder, "list")
    message = folder / "message"
    message.touch()
    words = ("run", "--termination-log", str(message), "--", "fabric", "run", "worker.py")
    ended = launched(*words, cwd=folder, env=V2_TORCH | {"PET_NNODES": "2"}, code=2)
    said = (
        "fabric run: it starts 1 node (--nnodes=1), but the job has 2 nodes (contract trainer-v2-torch); set "
        "--num-nodes, or --nodes 1 (TRAINER_LAUNCH_NODES) to train on this node alone"
    )
    assert said in ended.stderr
    assert message.read_text() == f"{said}\n"


def test_outside_a_platform_the_first_machine_keeps_the_rank_that_was_typed(folder: Path) -> None:
    fabric(folder, "head")
    words = ("run", "--wait-timeout", "1", "--", "fabric", "run", "worker.py")
    ended = launch(*words, cwd=folder)
    assert "engine=torch node=0/2 workers=1 coordinator=head.invalid:29500" in ended.stderr


def test_its_own_failure_is_its_own(folder: Path) -> None:
    fabric(folder, "wrong")
    message = folder / "message"
    message.touch()
    launched("run", "--termination-log", str(message), "--", "fabric", "run", "worker.py", cwd=folder, code=3)
    assert message.read_text() == "fabric run: it ended with 3 before the training began\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_asked_to_stop_before_the_training_it_ends_at_once(folder: Path, number: int, code: int) -> None:
    fabric(folder, "slow")
    with start("run", "--", "fabric", "run", "worker.py", cwd=folder) as job:
        job.read_until("begins")
        job.signal(number)
        job.ends_with(code, timeout_s=30)


def test_a_program_that_starts_torchrun_as_a_child_finds_the_launchers(folder: Path) -> None:
    """As LLaMA-Factory and ms-swift do."""
    text = "import subprocess, sys\nsys.exit(subprocess.call(['torchrun', *sys.argv[2:]]))"
    program(folder / "bin" / "swift", text, sys.executable)
    ended = launched("run", "--", "swift", "sft", "--nproc-per-node", "2", "worker.py", cwd=folder)
    assert "engine=plain" in ended.stderr
    assert "engine=torch node=0/1 workers=2" in ended.stderr


LLAMA_FACTORY = """
import os, subprocess, sys
get = os.environ.get
if not get("FORCE_TORCHRUN"):
    sys.exit("trains alone")
names = "NNODES NODE_RANK NPROC_PER_NODE MASTER_ADDR MASTER_PORT".split()
words = [word for name in names for word in ("--" + name.lower(), get(name, "1"))]
sys.exit(subprocess.call(["torchrun", *words, "worker.py"]))
"""


def test_a_program_that_has_variables_of_its_own_for_nodes_trains_with_the_jobs(folder: Path) -> None:
    """As LLaMA-Factory does, which knows no PET_*."""
    program(folder / "bin" / "llamafactory-cli", LLAMA_FACTORY, sys.executable)
    job = {**V2_TORCH, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    words = ("run", "--start-method", "exec", "--no-prefix", "--", "llamafactory-cli", "train", "a.yaml")
    ranks = [{"PET_NODE_RANK": rank, "JOB_COMPLETION_INDEX": rank} for rank in ("1", "0")]
    nodes = [Started(words, env={**job, **rank}, cwd=folder) for rank in ranks]
    ends = ends_of(nodes)
    assert [code for code, _ in ends] == [0, 0], ends
    workers = [json.loads(line) for _, output in ends for line in output.splitlines() if line.startswith("{")]
    assert [(worker["RANK"], worker["WORLD_SIZE"]) for worker in workers] == [("1", "2"), ("0", "2")]
