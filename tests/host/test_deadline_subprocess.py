"""A command with a deadline, as real processes: what it says, what is killed with it, what never raises."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.waiting import eventually
from trainer_launch.host import deadline_subprocess, process_tree
from trainer_launch.host.deadline_subprocess import Streams

pytestmark = pytest.mark.process

_FLOOD = "import os\nfor _ in range(64): os.write(1, b'x' * (1 << 20))\nos.write(2, b'done')"


def run(script: str, limit_s: float = 30.0, text: str | None = None) -> deadline_subprocess.Ended:
    return deadline_subprocess.run(("sh", "-c", script), None, limit_s, Streams(text=text))


def test_a_command_that_ends_tells_its_code_and_both_streams() -> None:
    ended = run("cat; echo told >&2; exit 3", text="given")
    assert (ended.code, ended.out, ended.err, ended.timed_out, ended.failure) == (3, "given", "told\n", False, "")


def test_a_signal_is_told_as_the_shell_tells_it() -> None:
    ended = run("kill -TERM $$")
    assert (ended.status, ended.code) == (-15, 143)


def test_a_command_that_cannot_be_started_raises_nothing() -> None:
    gone = deadline_subprocess.run(("/nonexistent/program",), None, 1.0)
    assert (gone.code, gone.err) == (127, "/nonexistent/program: No such file or directory")
    assert isinstance(gone.problem, FileNotFoundError)
    assert deadline_subprocess.run(("true", "a\0b"), None, 1.0).problem is not None


def test_at_its_limit_a_command_is_killed_with_all_that_it_has_started() -> None:
    """Also what ignores SIGTERM and has left its session."""
    ended = run("trap '' TERM; setsid sleep 600 & echo $!; sleep 600", limit_s=2.0)
    assert (ended.code, ended.timed_out, ended.is_stuck) == (None, True, False)
    assert ended.failure == "no end within 2 s"
    left = int(ended.out)
    eventually(lambda: (found := process_tree.read(left)) is None or found.state in "ZX", "the end of its child")


def test_output_beyond_the_bound_is_read_and_dropped() -> None:
    ended = deadline_subprocess.run((sys.executable, "-c", _FLOOD), None, 60.0)
    assert ended.code == 0
    assert len(ended.stdout) == deadline_subprocess.OUTPUT_BYTES
    assert ended.err == "done"


def test_a_daemon_that_keeps_the_output_open_holds_nobody_up_for_ever() -> None:
    """It has left the tree: an orphan in a session of its own."""
    code = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(600)\n"
        "    print(os.getpid(), flush=True)\n"
        "    os._exit(0)\n"
    )
    ended = deadline_subprocess.run((sys.executable, "-c", code), os.environ, 2.0, reap_s=0.5)
    assert ended.timed_out
    assert not ended.is_stuck
    os.killpg(int(ended.out), 9)


def test_a_child_that_reads_its_input_ends_when_that_is_closed() -> None:
    child = deadline_subprocess.RunningCommand(("cat",), None, Streams(stdin=subprocess.PIPE))
    child.close_input()
    child.stop(30.0)
    assert child.end().code == 0


def test_of_several_children_none_waits_for_a_reader_of_another() -> None:
    """Each says more than a pipe holds; the last one that is asked for ends first."""
    slow = deadline_subprocess.RunningCommand(("cat",), None, Streams(stdin=subprocess.PIPE))
    flood = "import os; os.write(1, b'x' * (1 << 20))"
    loud = [deadline_subprocess.RunningCommand((sys.executable, "-c", flood)) for _ in range(2)]
    deadline_subprocess.stop_all(loud, 60.0)
    assert [len(child.end().stdout) for child in loud] == [1 << 20] * 2
    slow.close_input()
    deadline_subprocess.stop_all((slow,), 60.0)
    assert slow.end().code == 0
