"""What dead workers have left running is gone before the next ones start; nobody else is."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.process.world import Launcher, survivors, worker
from trainer_launch.child import slate
from trainer_launch.host import tree

pytestmark = pytest.mark.process
AGENT = Path(__file__).with_name("agent.py")
LEFT = {
    "a child": "fork:note:left+rest",
    "a session of its own": "fork:setsid+note:left+rest",
    "a daemon": "fork:setsid+detach+note:left+rest",
    "deaf to SIGTERM": "fork:ignore+note:left+rest",
    "a deaf daemon": "fork:setsid+detach+setsid+ignore+note:left+rest",
    "suspended": "fork:note:left+die:19",
}


def agent(tmp_path, *words, **more):
    spec = {
        "run_dir": str(tmp_path),
        "helper": worker("rest"),
        "stranger": worker("fork:setsid+detach+note:stranger+rest", "exit:0"),
        "workers": [worker(*words, "die:9"), worker("die:9")],
        "left": len(words),
        **more,
    }
    return [sys.executable, str(AGENT), json.dumps(spec)]


def ended_in(launcher: Launcher) -> int:
    told = re.search(r"ended (\d+) process(?:es)? left running by dead workers", launcher.log())
    return int(told[1]) if told else 0


@pytest.mark.parametrize("left", LEFT)
def test_none_of_it_survives(tmp_path, left):
    with Launcher(tmp_path, agent(tmp_path, LEFT[left], stay=True)) as launcher:
        launcher.await_note("cleaned")
        launcher.await_note("stranger")
        assert marked(tmp_path) == []
        assert len(survivors(launcher.token)) == 3  # launcher, agent, and who carries no mark
        assert ended_in(launcher) in (1, 2), "and perhaps the one that made a daemon, on its way out"


def test_nor_of_all_of_it_together_also_under_pid_1(tmp_path, wrap):
    with Launcher(tmp_path, agent(tmp_path, *LEFT.values(), stay=True), wrap=wrap) as launcher:
        launcher.await_note("cleaned")
        assert marked(tmp_path) == []
        assert len(LEFT) <= ended_in(launcher) <= len(LEFT) + sum("detach" in words for words in LEFT.values())
        launcher.send(signal.SIGTERM)
        assert launcher.wait() == 143


def test_where_nothing_is_left_nothing_is_said_or_waited_for(tmp_path):
    with Launcher(tmp_path, agent(tmp_path)) as launcher:
        assert launcher.wait() == 0
        assert "[agent]" not in launcher.log()


def test_what_cannot_be_killed_is_returned_at_the_bound(monkeypatch):
    monkeypatch.setattr(slate, "TERM_S", 0.02)
    monkeypatch.setattr(slate, "KILL_S", 0.02)
    sent = []
    monkeypatch.setattr("os.kill", lambda pid, number: sent.append((pid, int(number))))
    stuck = tree.Entry(pid=1 << 22, name="a", state="D", parent=1, group=1, session=1, started=1)
    started = time.monotonic()
    assert slate.end_all(lambda: [stuck]) == (1, [stuck])
    assert time.monotonic() - started < 5
    assert sent[0] == (1 << 22, signal.SIGTERM)
    assert set(sent[1:]) == {(1 << 22, signal.SIGKILL)}


def marked(run_dir):
    """Who carries a run's mark, zombies aside."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"TRAINER_LAUNCH_RUN_DIR={run_dir}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found
