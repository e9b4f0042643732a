"""The fork server that is started before the pod has been read: for whom, and what becomes of a wrong guess."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from tests.cli.launching import launch
from trainer_launch.pytorch import early_fork_server
from trainer_launch.pytorch.early_fork_server import guess
from trainer_launch.pytorch.messages import Ready

TORCH = ("--nproc-per-node", "2", "--", "train.py")
IMPORT_S = 60.0
TF_CONFIG = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    early_fork_server.end()
    assert psutil.Process().children() == []


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("--nproc-per-node 2 -- train.py --lr 1", "train.py"),
        ("--nodes=2 -- python train.py", "train.py"),
        ("--nodes 2 -- -m pkg.train", ("-m", "pkg.train")),
        ("-- torchrun --nproc-per-node=4 jobs/train.py", "jobs/train.py"),
        ("-- torchrun -m pkg.train", ("-m", "pkg.train")),
    ],
)
def test_a_server_is_begun_for_the_script_or_module_of_a_torch_job(
    line: str, program: str | tuple[str, str]
) -> None:
    found = guess(line.split(), {}, "/work")
    assert found is not None
    settings = found.settings
    assert (settings.script or ("-m", settings.module)) == program
    assert (settings.cwd, settings.python) == ("/work", sys.executable)


@pytest.mark.parametrize(
    "line",
    [
        "-- train.py",
        "--nodes 2 -- ./train.sh",
        "--nodes 2 -- python -u train.py",
        "--nodes 2 --start-method exec -- train.py",
        "--engine plain --nodes 2 -- train.py",
        "--nodes 2 -- torchrun --no-python train.py",
        "--nodes 2 -- torchrun --no-such-option train.py",
        "--nodes 2",
        "--nodes 2 --",
        "",
    ],
)
def test_no_server_is_begun_where_the_plan_may_ask_for_none(line: str) -> None:
    assert guess(line.split(), {}, "/") is None


@pytest.mark.parametrize(
    "env", [{"PET_NNODES": "2"}, {"MASTER_ADDR": "a", "RANK": "0", "WORLD_SIZE": "2"}], ids=["trainer", "v1"]
)
def test_variables_of_the_platform_tell_a_torch_job(env: dict[str, str]) -> None:
    assert guess(["train.py"], env, "/") is not None
    assert guess(["train.py"], {"TF_CONFIG": "{}"}, "/") is None


def test_several_workers_get_one_thread_each_as_with_torchrun() -> None:
    for workers, threads in (("1", None), ("2", "1"), ("gpu", "1")):
        found = guess(["--nproc-per-node", workers, "--", "train.py"], {}, "/")
        assert found is not None
        assert found.env.get("OMP_NUM_THREADS") == threads
    own = guess(TORCH, {"OMP_NUM_THREADS": "8"}, "/")
    assert own is not None
    assert own.env["OMP_NUM_THREADS"] == "8"


@pytest.mark.process
@pytest.mark.torch
def test_the_plan_takes_the_server_that_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    early_fork_server.begin(TORCH, os.environ)
    wanted = guess(TORCH, os.environ, str(tmp_path))
    assert wanted is not None
    server = early_fork_server.take(wanted.settings, {**wanted.env, "PET_NNODES": "1"})
    assert server is not None
    try:
        assert select.select([server.fd], [], [], IMPORT_S)[0]
        assert isinstance(server.answer(), Ready)
    finally:
        server.close()
        server.popen.wait()
    assert early_fork_server.take(wanted.settings, wanted.env) is None


@pytest.mark.process
@pytest.mark.torch
@pytest.mark.parametrize("workers", ["1", "2"])
def test_run_uses_the_server_that_it_has_begun(workers: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    words = ("run", "--log-level", "debug", "--nproc-per-node", workers, "--", "train.py")
    ended = launch(*words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("trained") == int(workers)
    assert "the fork server was started before the plan was made" in ended.stderr


@pytest.mark.process
@pytest.mark.parametrize("change", ["script", "threads"])
def test_a_server_that_was_guessed_wrong_is_ended(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    early_fork_server.begin(TORCH, os.environ)
    wanted = guess(TORCH, os.environ, str(tmp_path))
    assert wanted is not None
    settings = replace(wanted.settings, script="other.py") if change == "script" else wanted.settings
    env = {**wanted.env, "OMP_NUM_THREADS": "7"} if change == "threads" else wanted.env
    assert len(psutil.Process().children()) == 1
    assert early_fork_server.take(settings, env) is None
    assert psutil.Process().children() == []


@pytest.mark.process
def test_a_server_that_the_plan_has_no_use_for_is_ended_before_the_program_starts(tmp_path: Path) -> None:
    """The contract says that it is a TFJob, which the command line does not show."""
    (tmp_path / "train.py").write_text("import psutil, os\nprint(len(psutil.Process(os.getppid()).children()))")
    env = {"PET_NNODES": "1", "TRAINER_LAUNCH_CONTRACT": "tfjob-v1", "TF_CONFIG": TF_CONFIG}
    ended = launch("run", "--", "train.py", env=env, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr
