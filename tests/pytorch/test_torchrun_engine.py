"""`run --engine torchrun`: the image's own torchrun, supervised as any program."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.cli.launching import RECORDED, launched, script, start

pytestmark = [pytest.mark.torch, pytest.mark.process]
LONG = pytest.mark.long("tests/pytorch/test_torchrun_engine.py")
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
say("up")
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def last_words(tmp_path: Path) -> Path:
    """The termination message."""
    return tmp_path / "last-words"


def test_workers_have_the_grace_to_save_and_the_pod_was_stopped(tmp_path: Path, last_words: Path) -> None:
    train = script(tmp_path, SAVE.replace("SECONDS", "3"))
    env = {"TRAINER_LAUNCH_TERMINATION_LOG": str(last_words)}
    with start(*RUN, "--grace", "30", "--", train, env=env) as run:
        run.read_until(r"^up \d", 2)
        run.signal(signal.SIGTERM)
        output = run.ends_with(143)
    assert output.count("saved") == 2
    assert last_words.read_text().startswith("reason=Stopped ")


def test_the_termination_message_has_the_error_that_record_left_and_the_pod_its_exit_code(
    tmp_path: Path, last_words: Path
) -> None:
    env = {"TRAINER_LAUNCH_TERMINATION_LOG": str(last_words)}
    launched(*RUN, "--", script(tmp_path, RECORDED), env=env, code=1)
    assert "ValueError: no luck" in last_words.read_text()


@LONG
def test_a_killed_torchrun_ends_the_pod_and_leaves_no_worker(tmp_path: Path) -> None:
    with start(*RUN, "--", script(tmp_path, SAVE.replace("SECONDS", "0"))) as run:
        run.read_until(r"^up \d", 2)
        (torchrun,) = psutil.Process(run.pid).children()
        workers = torchrun.children()
        torchrun.kill()
        assert run.end()[0] == 137
        assert not [worker for worker in workers if worker.is_running()]
