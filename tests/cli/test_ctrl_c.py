"""Ctrl-C reaches programs as a terminal gives it, and the second one ends everything at once."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launching import clean_env, script, start
from tests.conftest import require

CAREFUL = """
import sys, time
try:
    print("ready\\n", end="", flush=True)
    while True: time.sleep(0.1)
except KeyboardInterrupt:
    print("interrupted\\n", end="", flush=True)
finally:
    print("tidied up\\n", end="", flush=True)
"""
# Data loaders of torch, and what a shell starts, are in the group that a terminal interrupts.
WITH_CHILD = """
import multiprocessing, time

def load():
    try:
        print("ready\\n", end="", flush=True)
        while True: time.sleep(0.1)
    except KeyboardInterrupt:
        print("interrupted\\n", end="", flush=True)
    print("tidied up\\n", end="", flush=True)

if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=load)
    child.start()
    load()
    child.join()
"""
DEAF = """
import time
while True:
    try:
        print("ready\\n", end="", flush=True)
        while True: time.sleep(0.1)
    except KeyboardInterrupt:
        print("interrupted\\n", end="", flush=True)
"""
pytestmark = pytest.mark.process
IN_TORCHRUN = ("--engine", "torchrun", "--", "torchrun", "--nproc-per-node", "2")
FORKED = ("--nproc-per-node", "2", "--start-method", "auto", "--")
EXECUTED = ("--nproc-per-node", "2", "--start-method", "exec", "--")


def interrupted(words: tuple[str, ...], program: str, count: int) -> str:
    """The output of a run that a person ends by one Ctrl-C, without any hurry."""
    with start("run", "--grace", "3600", *words, program) as launcher:
        launcher.read_until("ready", times=count)
        launcher.signal(signal.SIGINT)
        output = launcher.ends_with(130)
    assert (output.count("interrupted"), output.count("tidied up")) == (count, count), output
    return output


def test_a_plain_program_gets_a_keyboard_interrupt_and_tidies_up(tmp_path: Path) -> None:
    output = interrupted(("--", sys.executable), script(tmp_path, CAREFUL), 1)
    assert "the next Ctrl-C kills at once" in output


def test_the_children_of_a_program_get_it_as_well(tmp_path: Path) -> None:
    interrupted(("--", sys.executable), script(tmp_path, WITH_CHILD), 2)


def test_a_shell_and_what_it_runs_get_it(tmp_path: Path) -> None:
    command = f"{sys.executable} {script(tmp_path, CAREFUL)}; echo goes on"
    assert "goes on\n" not in interrupted(("--", "sh", "-c"), command, 1)


@pytest.mark.torch
@pytest.mark.parametrize(
    "words",
    [
        FORKED,
        pytest.param(EXECUTED, marks=pytest.mark.long("tests/cli/test_ctrl_c.py")),
        pytest.param(IN_TORCHRUN, marks=pytest.mark.long("tests/cli/test_ctrl_c.py")),
    ],
    ids=["forked", "executed", "torchrun"],
)
def test_torch_workers_get_a_keyboard_interrupt_and_tidy_up(tmp_path: Path, words: tuple[str, ...]) -> None:
    interrupted(words, script(tmp_path, CAREFUL), 2)


def test_ranks_of_mpirun_get_a_keyboard_interrupt_and_tidy_up(tmp_path: Path) -> None:
    require(shutil.which("mpirun") is not None, "needs an MPI")
    interrupted(("--", "mpirun", "--allow-run-as-root", "-np", "1", sys.executable), script(tmp_path, CAREFUL), 1)


@pytest.mark.parametrize(
    ("words", "heard"),
    [
        (("run", "--grace", "3600", "--", sys.executable), "interrupted"),
        pytest.param(("run", "--grace", "3600", *FORKED), "interrupted", marks=pytest.mark.torch),
        (("rehearse", "--grace", "3600", "--", sys.executable), "asked to stop"),
    ],
    ids=["plain", "torch", "rehearsal"],
)
def test_the_second_ctrl_c_ends_at_once_what_goes_on_after_the_first(
    tmp_path: Path, words: tuple[str, ...], heard: str
) -> None:
    deaf = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{DEAF}"
    with start(*words, script(tmp_path, deaf), env={"TRAINER_LAUNCH_LOG_LEVEL": "info"}) as launcher:
        launcher.read_until("ready")
        launcher.signal(signal.SIGINT)
        launcher.read_until(heard)
        launcher.signal(signal.SIGINT)
        output = launcher.ends_with(130)
    assert words[0] != "run" or "asked to stop by SIGINT (request 2), all are killed at once" in output


ASKED_TWICE = """
import os, signal, time
from trainer_launch.preflight.node_preflight import PreflightProgress

def hangs(message):
    print("goes on", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)

PreflightProgress(hangs)
os.kill(os.getpid(), signal.{first})
time.sleep(600)
"""


@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM"])
def test_the_second_ctrl_c_ends_a_preflight_that_something_holds_up(first: str) -> None:
    words = (sys.executable, "-c", ASKED_TWICE.format(first=first))
    ended = subprocess.run(words, env=clean_env(), capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (130, "goes on\n")
