"""What a process does, seen from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.waiting import eventually
from trainer_launch.host import process_tree
from trainer_launch.supervisor import worker_samples

pytestmark = pytest.mark.process
DEADLINE_S = 20.0


@pytest.fixture
def sleeper():
    """A Python that catches SIGUSR2 and then sleeps."""
    code = "import signal, time\nsignal.signal(signal.SIGUSR2, print)\nprint(flush=True)\ntime.sleep(99)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process.pid
    process.kill()
    process.wait()
    process.stdout.close()


def look(pid):
    found = worker_samples.read(pid)
    assert found is not None
    return found


def test_a_process_that_is_stopped_shows_it(sleeper):
    eventually(lambda: look(sleeper).state == "S", "it sleeps")
    os.kill(sleeper, signal.SIGSTOP)
    eventually(lambda: look(sleeper).state == "T", "it is stopped")
    assert "state T" in process_tree.describe(sleeper)


def test_sleep_costs_no_time_and_is_seen_in_the_kernel(sleeper):
    eventually(
        lambda: re.search("nanosleep|select|poll", process_tree.sleeps_in(sleeper)), "it sleeps"
    )  # Python 3.10 sleeps in select()
    one, two = look(sleeper), look(sleeper)
    assert one == two
    assert f"thread {sleeper} (" in process_tree.describe(sleeper)


def test_our_own_work_is_counted():
    before = look(os.getpid())
    eventually(lambda: look(os.getpid()).cpu_s >= before.cpu_s + 0.05, "our own work", pace_s=0)
    switches = look(os.getpid()).switches
    eventually(lambda: look(os.getpid()).switches > switches, "a switch")


def test_who_has_a_handler_is_known(sleeper):
    assert process_tree.catches(sleeper, signal.SIGUSR2)
    assert not process_tree.catches(sleeper, signal.SIGRTMAX - 1)


def test_who_is_gone_is_gone():
    assert worker_samples.read(2**22 + 1) is None
    assert process_tree.describe(2**22 + 1) == "  gone\n"
    assert process_tree.sleeps_in(2**22 + 1) == ""
    assert not process_tree.catches(2**22 + 1, signal.SIGUSR2)
