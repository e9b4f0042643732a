"""A fork of the launcher, which runs a module of ours, has nothing of the launcher's but what it has loaded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

LAUNCHER = """
import os, signal, sys, threading
from trainer_launch.model import Forked, Process
from trainer_launch.supervisor.system import System
secret = open("/dev/null")
os.set_inheritable(secret.fileno(), True)
system = System()
threading.Thread(target=threading.Event().wait, daemon=True).start()
forked = Forked("tests.process.test_fork", {"a": "value"})
process = Process(name="mpirun", argv=tuple(sys.argv[1:]), env={"OURS": "1"}, forked=forked)
pid = system.spawn(process, (lambda: os.kill(os.getpid(), signal.SIGTERM)) if sys.argv[1] == "early" else None)
while not (happened := system.wait(system.now() + 60)).ended:
    assert not happened.signals, happened
system.drain(60)
((ended, status),) = happened.ended
assert ended == pid
print(*((None, -status) if status < 0 else (status, None)))
"""


def main(spec: object, argv: Sequence[str], env: Mapping[str, str]) -> None:
    """What the fork does."""
    if argv[0] == "raise":
        raise ValueError("of the fork")
    if argv[0] == "die":
        os.kill(os.getpid(), signal.SIGTERM)
    seen = {
        "spec": spec,
        "argv": argv,
        "env": dict(env),
        "session": os.getsid(0) == os.getpid(),
        "descriptors": len([name for name in os.listdir("/proc/self/fd") if int(name) > 2]) - 1,  # the list's own
        "handlers": [n for n in (signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1) if signal.getsignal(n)],
        "wakeup": signal.set_wakeup_fd(-1),
        "name": Path("/proc/self/comm").read_text().strip(),
    }
    os.write(1, f"{json.dumps(seen)}\n".encode())
    os._exit(7)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-W", "always::DeprecationWarning", "-c", LAUNCHER, *words]
    return subprocess.run(argv, text=True, capture_output=True, timeout=120, check=True)


def test_it_has_its_own_session_and_none_of_the_launchers_descriptors_and_handlers() -> None:
    ended = run("mpirun", "-np", "2")
    told, code = ended.stdout.splitlines()
    assert json.loads(told) == {
        "spec": {"a": "value"},
        "argv": ["mpirun", "-np", "2"],
        "env": {"OURS": "1"},
        "session": True,
        "descriptors": 0,
        "handlers": [],
        "wakeup": -1,
        "name": "mpirun agent",
    }
    assert code == "7 None"
    assert ended.stderr == "", "Python warns of a fork beside threads"


def test_it_never_goes_on_as_the_launcher_when_it_fails() -> None:
    ended = run("raise")
    assert ended.stdout == "1 None\n"
    assert "ValueError: of the fork" in ended.stderr


@pytest.mark.parametrize("when", ["early", "die"])
def test_a_signal_to_it_is_none_to_the_launcher_which_sees_what_it_died_of(when: str) -> None:
    """Before its own handlers are set, and after."""
    assert run(when).stdout == f"None {int(signal.SIGTERM)}\n"
