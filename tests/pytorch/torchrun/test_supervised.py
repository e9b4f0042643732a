"""`run --engine torchrun` in one pod: signals, stops, exit codes and the first failure; torchrun is unmodified."""

from __future__ import annotations

import importlib.util
import json
import signal
from pathlib import Path

import psutil
import pytest

from tests.cli.launching import RECORDED, launch, script, start
from tests.conftest import require
from trainer_launch.planning import programs

pytestmark = [pytest.mark.torch, pytest.mark.process]
LONG = pytest.mark.long("tests/pytorch/torchrun/test_supervised.py")
RUN = ("run", "--engine", "torchrun", "--nproc-per-node", "2")
SAVE = r"""
import os, signal, sys, time
def say(word):
    os.write(1, f"{word} {os.environ['RANK']}\n".encode())  # in one piece, unlike print()
def save(*_):
    say("saves")
    time.sleep(SECONDS)
    say("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, lambda *_: say("checkpoint"))
say("up")
while True:
    time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def need_torch() -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    require(programs.loads_plug_ins(), "torchrun of this torch loads no plug-ins")


@pytest.fixture
def last_words(tmp_path: Path) -> Path:
    """The termination message."""
    return tmp_path / "last-words"


@LONG
def test_a_signal_that_torchrun_would_die_of_reaches_the_workers_and_the_job_goes_on(tmp_path: Path) -> None:
    train = script(tmp_path, SAVE.replace("SECONDS", "0"))
    with start(*RUN, "--signals", "USR1=checkpoint", "--", train) as run:
        run.read_until(r"^up \d", 2)
        run.signal(signal.SIGUSR1)
        run.read_until(r"^checkpoint \d", 2)
        run.signal(signal.SIGTERM)
        code, output = run.end()
    assert code == 143, output
    assert "restarting it" not in output, "torchrun has not died"


def test_workers_have_the_grace_to_save_and_the_pod_was_stopped(tmp_path: Path, last_words: Path) -> None:
    train = script(tmp_path, SAVE.replace("SECONDS", "3"))
    env = {"TRAINER_LAUNCH_TERMINATION_LOG": str(last_words)}
    with start(*RUN, "--grace", "30", "--", train, env=env) as run:
        run.read_until(r"^up \d", 2)
        run.signal(signal.SIGTERM)
        code, output = run.end()
    assert code == 143, output
    assert output.count("saved") == 2
    assert last_words.read_text().startswith("reason=Stopped ")


def test_a_killed_launcher_leaves_neither_torchrun_nor_a_worker(tmp_path: Path) -> None:
    with start(*RUN, "--", script(tmp_path, SAVE.replace("SECONDS", "0"))) as run:
        run.read_until(r"^up \d", 2)
        below = psutil.Process(run.pid).children(recursive=True)
        assert len(below) == 3
        run.signal(signal.SIGKILL)
        gone, alive = psutil.wait_procs(below, timeout=30)
        assert alive == [], gone


def test_a_killed_torchrun_leaves_no_worker_and_is_started_again(tmp_path: Path) -> None:
    with start(*RUN, "--", script(tmp_path, SAVE.replace("SECONDS", "0"))) as run:
        run.read_until(r"^up \d", 2)
        (torchrun,) = psutil.Process(run.pid).children()
        workers = torchrun.children()
        torchrun.kill()
        run.read_until(r"restarting it \(restart 1 of at most 3 per hour\)")
        assert not [worker for worker in workers if worker.is_running()]
        run.read_until(r"^up \d", 2)
        run.signal(signal.SIGTERM)
        assert run.end()[0] == 143


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("raise ValueError('no luck')", 1, "rank 1 ended with exit code 1: ValueError: no luck"),
        pytest.param("sys.exit(9)", 9, "rank 1 ended with exit code 9", marks=LONG),
        pytest.param("os.kill(os.getpid(), 11)", 139, "rank 1 ended with signal SIGSEGV", marks=LONG),
    ],
)
def test_the_first_failed_workers_code_is_the_pods(
    tmp_path: Path, last_words: Path, end: str, code: int, said: str
) -> None:
    fail = f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {end}\ntime.sleep(60)\n"
    env = {"TRAINER_LAUNCH_TERMINATION_LOG": str(last_words)}
    done = launch(*RUN, "--max-restarts", "0", "--", script(tmp_path, fail), env=env)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in last_words.read_text()


@LONG
def test_with_a_rendezvous_of_torchs_own_the_code_is_in_the_error_file_of_record(
    tmp_path: Path, last_words: Path
) -> None:
    env = {"TRAINER_LAUNCH_TERMINATION_LOG": str(last_words)}
    done = launch(*RUN, "--rendezvous", "torch", "--", script(tmp_path, RECORDED), env=env)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ValueError: no luck" in last_words.read_text()


@LONG
def test_a_platforms_error_file_is_written_too(tmp_path: Path) -> None:
    wanted = tmp_path / "error.json"
    wanted.write_text("of an older start")
    fail = script(tmp_path, "import sys\nsys.exit(9)\n")
    done = launch(*RUN, "--max-restarts", "0", "--", fail, env={"TORCHELASTIC_ERROR_FILE": str(wanted)})
    assert done.returncode == 9, done.stdout + done.stderr
    assert json.loads(wanted.read_text())["message"]["errorCode"] == 9
