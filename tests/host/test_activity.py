"""What a process does, seen from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from trainer_launch.host import activity, stacks

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
    found = activity.read(pid)
    assert found is not None
    return found


def until(condition):
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_a_process_that_is_stopped_shows_it(sleeper):
    until(lambda: look(sleeper).state == "S")
    os.kill(sleeper, signal.SIGSTOP)
    until(lambda: look(sleeper).state == "T")
    assert "state T" in stacks.describe(sleeper)


def test_sleep_costs_no_time_and_is_seen_in_the_kernel(sleeper):
    until(lambda: re.search("nanosleep|select|poll", stacks.sleeps_in(sleeper)))  # Python 3.10 sleeps in select()
    one, two = look(sleeper), look(sleeper)
    assert one == two
    assert f"thread {sleeper} (" in stacks.describe(sleeper)


def test_our_own_work_is_counted():
    before = look(os.getpid())
    until(lambda: look(os.getpid()).cpu_s >= before.cpu_s + 0.05)
    switches = look(os.getpid()).switches
    time.sleep(0.001)
    assert look(os.getpid()).switches > switches


def test_who_has_a_handler_is_known(sleeper):
    assert stacks.catches(sleeper, signal.SIGUSR2)
    assert not stacks.catches(sleeper, signal.SIGRTMAX - 1)


def test_who_is_gone_is_gone():
    assert activity.read(2**22 + 1) is None
    assert stacks.describe(2**22 + 1) == "  gone\n"
    assert stacks.sleeps_in(2**22 + 1) == ""
    assert not stacks.catches(2**22 + 1, signal.SIGUSR2)
