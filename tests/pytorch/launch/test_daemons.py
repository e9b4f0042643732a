"""Daemons that a worker leaves with a session of their own and no environment end with its generation."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.cli.launching import launched

pytestmark = [pytest.mark.torch, pytest.mark.process]

# A double fork as of python-daemon, and what setproctitle does to an environment: the memory is overwritten.
LEAVE = """
import os, signal, sys, time

def zeroed():
    import ctypes
    with open("/proc/self/stat") as file:
        first, last = (int(word) for word in file.read().rpartition(")")[2].split()[47:49])
    ctypes.memset(first, 0, last - first)
    while True:
        time.sleep(60)

def emptied():
    os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], {})

def leave(become):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with open(f"{os.environ['PIDS']}/{os.getpid()}", "x"):
                pass
            become()
        os._exit(0)
    while len(os.listdir(os.environ["PIDS"])) <= int(os.environ["TORCHELASTIC_RESTART_COUNT"]):
        time.sleep(0.01)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(3)
"""


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    (tmp_path / "pids").mkdir()
    return tmp_path / "pids"


def living(pids: Path) -> list[int]:
    """Daemons, of which there was one in each of two generations, that still run."""
    numbers = [int(path.name) for path in pids.iterdir()]
    assert len(numbers) == 2
    alive = [psutil.Process(number) for number in numbers if psutil.pid_exists(number)]
    return [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("become", ["zeroed", "emptied"])
@pytest.mark.parametrize("method", ["auto", "exec"])
def test_a_daemon_of_a_script(tmp_path: Path, pids: Path, method: str, become: str) -> None:
    (tmp_path / "train.py").write_text(f"{LEAVE}\nleave({become})\n")
    words = ("--start-method", method, "--grace", "1", "--max-restarts", "1", "--nproc-per-node", "1")
    launched("run", *words, "--", str(tmp_path / "train.py"), env={"PIDS": str(pids)})
    assert living(pids) == []
