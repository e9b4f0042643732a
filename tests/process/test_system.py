"""PID 1's hold on its processes: leftovers of what has ended are found; a poke is never lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.world import DEADLINE_S, ROOT

pytestmark = pytest.mark.process

# In a process of its own, whose children are all of this test's, and which is made a sub-reaper.
BEGIN = """
import json, os, signal, sys
from tests.waiting import eventually
from trainer_launch.host import process_tree
from trainer_launch.model import Process
from trainer_launch.supervisor.system import System

system = System()
LEAVES = ("sh", "-c", "sleep 60 >/dev/null & exit 0")

def end_together(*argvs):
    pids = [system.spawn(Process(name="rank", argv=argv, env=dict(os.environ))) for argv in argvs]
    for pid in pids:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert {pid for pid, status in system.wait(0).ended} == set(pids)
    return system.signal_groups(pids, signal.SIGTERM)
"""


def told(code: str) -> object:
    ended = subprocess.run(
        [sys.executable, "-c", BEGIN + code], cwd=ROOT, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=True
    )
    return json.loads(ended.stdout)


def test_what_one_of_them_has_left_behind_is_signalled() -> None:
    code = """
reached = end_together(("true",), LEAVES, ("true",), LEAVES)
eventually(lambda: (system.wait(0), not system.left())[1], "the end of what was left")
print(json.dumps(reached))
"""
    assert told(code) == 2


def test_a_poke_that_comes_after_the_end_goes_into_no_file_that_was_opened_since(tmp_path: Path) -> None:
    code = f"""
system.close()
opened = [open({str(tmp_path)!r} + f"/{{number}}", "w+") for number in range(20)]
system.poke()
print(json.dumps("".join(file.read() for file in opened)))
"""
    assert told(code) == ""


def test_a_poke_that_comes_before_a_wait_ends_it() -> None:
    code = """
system.poke()
began_s = system.now()
system.wait(began_s + 20)
print(json.dumps(system.now() - began_s < 10))
"""
    assert told(code) is True


def test_a_request_to_stop_that_ended_a_child_as_well_is_told_with_its_end_and_not_after_it() -> None:
    """As where a batch system signals all processes of a node. Here it comes between two looks of one `wait`."""
    code = """
look, program = system._signals, ("sh", "-c", "kill -TERM $PPID; kill -TERM $$")

def looks_and_then_it_comes():
    signals = look()
    system._signals = look
    pid = system.spawn(Process(name="rank", argv=program, env=dict(os.environ)))
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return signals

system._signals = looks_and_then_it_comes
happened = system.wait(0)
print(json.dumps([happened.signals, [status for pid, status in happened.ended]]))
"""
    assert told(code) == [[signal.SIGTERM], [-signal.SIGTERM]]


def test_a_descendant_is_known_without_its_session_and_its_environment_and_another_commands_orphan_is_not() -> None:
    """A worker's daemon with an empty environment, and what a `kubectl exec` has left behind in this container."""
    code = """
system.mark = "RUN", "this one"
unmarked = "echo 0x33 > /proc/self/coredump_filter;"
leave = "{} setsid env -i sh -c 'sleep 60; :' >/dev/null & exit 0"
env = {**os.environ, "RUN": "this one"}
argvs = [("sh", "-c", leave.format(how)) for how in ("", unmarked)]
pids = [system.spawn(Process(name="rank", argv=argv, env=env)) for argv in argvs]
for pid in pids:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
assert {pid for pid, status in system.wait(0).ended} == set(pids)
below = lambda: process_tree.descendants(os.getpid())
daemons = lambda: [entry for entry in below() if entry.name == "sh" and entry.session == entry.pid]
eventually(lambda: len(daemons()) == 2, "both daemons")
system.signal_all(signal.SIGKILL, again=True)
eventually(lambda: system.wait(0) is None or system.is_alone(), "the one that is ours ends")
left = daemons()
print(json.dumps([len(left), len(system.left())]))
for entry in below():
    os.kill(entry.pid, signal.SIGKILL)
"""
    assert told(code) == [1, 0]


def test_a_closed_system_adopts_no_more_orphans() -> None:
    """A test or a notebook that has rehearsed a job goes on without the zombies of everybody below it."""
    code = """
import subprocess
def adopts():
    command = "exec 3<&0; (read line <&3) >&- & echo $!"  # the orphan outlives its shell, which could reap it
    with subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        orphan = int(shell.stdout.readline())
        shell.wait()
    try:
        return os.waitpid(orphan, 0)[0] == orphan
    except ChildProcessError:
        return False
before = adopts()
system.close()
print(json.dumps([before, adopts()]))
"""
    assert told(code) == [True, False]


def test_who_ended_with_0_and_had_no_handler_for_a_signal_that_asks_for_it_is_known() -> None:
    """The exit of one that had may be its answer to a SIGTERM from elsewhere."""
    code = """
program = "import os, signal; signal.signal(signal.SIG{}, lambda *_: None); os._exit({})"
argvs = [(sys.executable, "-c", program.format(*how)) for how in (("TERM", 0), ("WINCH", 3), ("WINCH", 0))]
pids = [system.spawn(Process(name="rank", argv=argv, env=dict(os.environ))) for argv in argvs]
for pid in pids:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
system.wait(0)
print(json.dumps([pid in system.unasked for pid in pids]))
"""
    assert told(code) == [False, False, True]
