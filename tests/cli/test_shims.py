"""Programs called torchrun, mpirun, … that use the launcher; wrappers that `run` sees through."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launching import clean_env, launch, script
from tests.cli.test_platforms import TRAIN
from tests.conftest import require
from tests.ports import free_port
from trainer_launch.commands.install_shims import NAMES, decide

pytestmark = pytest.mark.process
torch = pytest.mark.torch


@pytest.fixture
def shims(tmp_path: Path) -> Path:
    """A folder of shims."""
    folder = tmp_path / "shims"
    assert launch("install-shims", str(folder)).returncode == 0
    return folder


def program(folder: Path, name: str, text: str = 'echo "real $0 $@"') -> Path:
    """A program of that name."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def run(words: list[str], path: list[Path], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run words with these folders first in PATH."""
    found = clean_env(env)
    found["PATH"] = os.pathsep.join([*map(str, path), found["PATH"]])
    return subprocess.run(words, env=found, capture_output=True, text=True, timeout=60)


def test_all_names_are_installed_and_installing_again_is_fine(shims: Path) -> None:
    assert sorted(path.name for path in shims.iterdir()) == sorted(NAMES)
    again = launch("install-shims", str(shims))
    assert again.returncode == 0
    assert f"export PATH={shims}:$PATH" in again.stdout


def test_a_real_program_is_never_overwritten(tmp_path: Path) -> None:
    real = program(tmp_path / "bin", "torchrun")
    before = real.read_text()
    ended = launch("install-shims", str(real.parent))
    assert ended.returncode == 2
    assert "has a torchrun that is no shim" in ended.stderr
    assert real.read_text() == before


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = launch("install-shims", str(tmp_path / "file" / "shims"))
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert launch("install-shims").returncode == 2


STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("words", "env", "above", "line"),
    [
        ("torchrun t.py", {}, None, "run -- torchrun t.py"),
        ("torchrun t.py", {"TRAINER_LAUNCH_SHIM": "off"}, None, None),
        ("torchrun t.py", {}, "plain", "run -- torchrun t.py"),
        ("torchrun t.py", {}, "torchrun", None),
        ("torchrun t.py", {}, "torch", None),
        ("torchrun t.py", {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "a"}, None, None),
        ("torchrun t.py", {"LOCAL_RANK": "0"}, None, "run -- torchrun t.py"),  # Azure ML's
        ("torchrun t.py", {"PMI_RANK": "0"}, None, None),
        ("torchrun t.py", {"PMI_RANK": "0", **STEP, "SLURM_STEP_NUM_TASKS": "8"}, None, None),
        ("torchrun t.py", {"PMI_RANK": "0", **STEP}, None, "run -- torchrun t.py"),
        ("mpirun -np 2 a", {"OMPI_COMM_WORLD_RANK": "0"}, None, None),
        ("mpirun -np 2 a", {}, None, "run -- mpirun -np 2 a"),
        ("horovodrun --check-build", {}, None, None),
        ("mpirun --version", {}, None, None),
        ("torchrun", {}, None, None),
        ("accelerate config", {}, None, None),
        ("accelerate launch t.py", {}, None, None),
        ("accelerate launch --num_processes 2 t.py", {}, None, "run -- accelerate launch --num_processes 2 t.py"),
        ("deepspeed t.py", {}, None, None),
    ],
)
def test_a_shim_uses_the_launcher_where_that_helps(
    words: str, env: dict[str, str], above: str | None, line: str | None
) -> None:
    assert decide(words.split(), env, above) == (None if line is None else tuple(line.split()))


def test_the_real_program_runs_unchanged_where_the_launcher_cannot_help(shims: Path, tmp_path: Path) -> None:
    real = program(tmp_path / "bin", "deepspeed", 'echo "real $0 $@"; exit 7')
    ended = run(["deepspeed", "t.py", "a b"], [shims, real.parent])
    assert (ended.returncode, ended.stdout) == (7, f"real {real} t.py a b\n")


def test_a_program_that_is_only_a_shim_is_not_found(shims: Path, tmp_path: Path) -> None:
    ended = run(["deepspeed", "t.py"], [shims, tmp_path])
    assert ended.returncode == 127
    assert "was not found in PATH behind its shim" in ended.stderr


JOB = """
apiVersion: batch/v1
kind: Job
metadata: {{name: asks}}
spec:
  template:
    spec:
      restartPolicy: Never
      containers: [{{name: main, image: any, command: [sh, -c, {command!r}]}}]
"""


def test_a_rehearsed_pod_finds_the_shims_before_our_own_python(shims: Path, tmp_path: Path) -> None:
    real = program(tmp_path / "bin", "python")
    path = os.pathsep.join(map(str, (shims, real.parent, "/usr/bin", "/bin")))
    job = tmp_path / "job.yaml"
    job.write_text(JOB.format(command="echo torchrun=$(command -v torchrun); echo python=$(command -v python)"))
    ended = launch("local", "-f", str(job), env={"PATH": path})
    assert f"torchrun={shims}/torchrun\n" in ended.stdout, ended.stderr
    assert f"python={os.path.dirname(sys.executable)}/python\n" in ended.stdout


def test_a_module_of_the_job_with_a_name_of_pythons_does_not_break_a_shim(shims: Path, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not mine')\n")
    real = program(tmp_path / "bin", "deepspeed")
    found = clean_env({"PATH": os.pathsep.join(map(str, (shims, real.parent, "/usr/bin", "/bin")))})
    ended = subprocess.run(
        ["deepspeed", "t.py"], env=found, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == f"real {real} t.py\n", ended.stderr


@torch
def test_what_an_sdk_writes_recovers_in_place_from_a_killed_worker(shims: Path, tmp_path: Path) -> None:
    """The container's command is a shell, as Kubeflow's SDK writes it: no ENTRYPOINT, no launcher typed."""
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    train = script(tmp_path, TRAIN)
    port = str(free_port())
    path = os.pathsep.join((str(shims), os.path.dirname(sys.executable), os.environ["PATH"]))
    both = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    pods = [
        subprocess.Popen(
            ["bash", "-c", f"true first; torchrun {train}; code=$?; echo end $code; exit $code"],
            env=clean_env({**both, "PET_NODE_RANK": str(rank), "JOB_COMPLETION_INDEX": str(rank), "PATH": path}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert pods[1].stdout is not None
        line = next(line for line in pods[1].stdout if "rank 1 of 2, restart 0" in line)
        os.kill(int(line.rpartition("pid ")[2].rstrip(".\n")), signal.SIGKILL)
        said = [pod.communicate(timeout=90)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert all(f"rank {rank} of 2, restart 1" in said[rank] for rank in range(2))


@torch
def test_run_sees_through_wrappers_and_a_shell(tmp_path: Path) -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    # One write for each line: the other worker writes as well.
    text = (
        "import os\n"
        "seen = os.environ['RANK'], os.environ['A'], os.sched_getaffinity(0)\n"
        "os.write(1, ('worker %s %s %s\\n' % seen).encode())\n"
    )
    train = script(tmp_path, text)
    cpu = min(os.sched_getaffinity(0))
    line = f"env A=x taskset -c {cpu} torchrun --nproc-per-node 2 {train}"
    ended = launch("run", "--log-level", "warning", "--", "bash", "-c", line)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"worker {rank} x {{{cpu}}}" for rank in range(2)]


@torch
def test_what_options_of_accelerate_stand_for_is_kept_behind_a_wrapper(tmp_path: Path) -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    train = script(tmp_path, "import os; print(os.environ['A'], os.environ['ACCELERATE_USE_CPU'])")
    ended = launch("run", "--", *f"env A=x accelerate launch --cpu --num_processes 1 {train}".split())
    assert (ended.returncode, ended.stdout) == (0, "x true\n"), ended.stderr


def test_a_wrapper_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    ended = launch("run", "--", "/nowhere/numactl", "-N", "0", script(tmp_path, ""))
    assert ended.returncode == 127
    assert "/nowhere/numactl" in ended.stderr


def test_explain_shows_the_command_without_its_wrappers(tmp_path: Path) -> None:
    train = script(tmp_path, "")
    ended = launch("explain", "--json", "--", "tini", "--", "bash", "-c", f"torchrun --nproc-per-node 3 {train}")
    assert json.loads(ended.stdout)["job"]["nproc_per_node"] == 3


@torch
def test_a_launcher_in_front_of_a_script_leaves_the_workers_and_the_message_to_the_one_in_it(
    shims: Path, tmp_path: Path
) -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    text = "import os, sys\nprint('restart', os.environ['TORCHELASTIC_RESTART_COUNT'])\nsys.exit(23)"
    line = f"cd {tmp_path}; torchrun --max-restarts 1 {script(tmp_path, text)}; exit $?"
    message = tmp_path / "message"
    path = os.pathsep.join((str(shims), os.path.dirname(sys.executable), os.environ["PATH"]))
    env = {"PATH": path, "TRAINER_LAUNCH_TERMINATION_LOG": str(message)}
    ended = launch("run", "--", "bash", "-c", line, env=env)
    assert ended.returncode == 23, ended.stderr
    assert [line for line in ended.stdout.splitlines() if "restart" in line] == ["restart 0", "restart 1"]
    assert "rank=0" in message.read_text().splitlines()[0], "the launcher that knows the ranks has told its end"


def test_an_old_message_is_replaced(tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text("reason=Failed of the run before\n")
    os.utime(message, (1, 1))
    assert launch("run", "--termination-log", str(message), "--", "sh", "-c", "exit 4").returncode == 4
    assert "exit=4" in message.read_text()
