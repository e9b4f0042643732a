"""Workers get the signal mask and the ignored signals that the launcher was started with, as from torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launching import clean_env, script

pytestmark = [pytest.mark.torch, pytest.mark.process]

SHOWS = """
import re, signal
with open("/proc/self/status") as file:
    status = dict(re.findall(r"(Sig\\w+):\\s+(\\w+)", file.read()))
def names(word):
    bits = int(status[word], 16)
    numbers = signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}
    return sorted(number.name for number in numbers if number in [*signal.Signals] and bits >> number - 1 & 1)
print("blocked", *names("SigBlk"), "ignored", *names("SigIgn"), flush=True)
"""
STARTS = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, *map(int, sys.argv[1].split(","))})
for number in (signal.SIGUSR2, signal.SIGWINCH, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
os.execvp(sys.argv[2], sys.argv[2:])
"""
LAUNCHER = (sys.executable, "-m", "trainer_launch", "run", "--start-method")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def shown(folder: Path, *launcher: str, blocked: str = "12") -> str:
    """What a worker finds."""
    words = ("--nproc-per-node=1", script(folder, SHOWS))
    argv = (sys.executable, "-c", STARTS, blocked, *launcher, *words)
    ended = subprocess.run(argv, env=clean_env(), capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    found = re.findall(r"blocked.*", ended.stdout)
    assert len(found) == 1, ended.stdout
    return str(found[0])


@pytest.mark.parametrize("method", ["auto", "exec"])
def test_a_worker_finds_what_it_finds_under_torchrun(tmp_path: Path, method: str) -> None:
    theirs = shown(tmp_path, *TORCHRUN)
    assert theirs == "blocked SIGUSR1 SIGUSR2 ignored SIGUSR2 SIGWINCH"
    # A shell's `&` has SIGINT ignored, which torchrun undoes: Ctrl-C for another program would end its workers.
    ours = shown(tmp_path, *LAUNCHER, method, "--", "torchrun")
    assert ours.replace(" SIGINT", "") == theirs


@pytest.mark.parametrize("method", ["auto", "exec"])
def test_a_request_to_stop_reaches_a_worker_whatever_was_blocked(tmp_path: Path, method: str) -> None:
    ours = shown(tmp_path, *LAUNCHER, method, "--", "torchrun", blocked="15,2,17")
    assert ours == "blocked SIGUSR1 ignored SIGINT SIGUSR2 SIGWINCH"
