"""Incidents of any program: what is collected where nobody below answers, and that nothing of it holds a job up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import launch, launched, script, start
from tests.waiting import eventually
from trainer_launch.diagnosis import incident_bundle
from trainer_launch.diagnosis.incident_bundle import Stored

pytestmark = pytest.mark.process

# A program that fails, and leaves a child behind that is still there.
PARENT = """
import subprocess, sys
code = 'print("ready", flush=True); import time; time.sleep(60)'
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
raise ValueError("no luck")
"""
QUIET = """
import sys, time
for n in range(8):
    print("beat", n, flush=True)
    time.sleep(0.2)
open(sys.argv[1]).close()  # a FIFO: until somebody opens it, too
print("done", flush=True)
"""


def only(place: Path) -> Stored:
    (one,) = incident_bundle.stored(str(place))
    return one


def events(path: Path, name: str) -> list[dict[str, Any]]:
    return [one for line in path.read_text().splitlines() if (one := json.loads(line))["event"] == name]


def test_a_programs_failure_says_the_same_everywhere_and_keeps_what_is_below(tmp_path: Path) -> None:
    place, words, log = tmp_path / "incidents", tmp_path / "words", tmp_path / "events"
    options = ("--incident-dir", str(place), "--termination-log", str(words), "--events", str(log))
    ended = launched("run", *options, "--engine", "plain", "--", sys.executable, script(tmp_path, PARENT), code=1)
    one = only(place)
    sentence = "program ended with exit code 1: ValueError: no luck"
    assert (one.incident.kind, one.incident.sentence) == ("failure", sentence)
    assert (one.incident.reason, one.incident.restart_helps) == ("Failed", None)
    assert words.read_text().splitlines()[0].endswith(f"| {sentence}")
    assert sentence in incident_bundle.text_of(one, "sentence.txt")
    assert f"collected in {one.folder}" in ended.stderr
    (told,) = events(log, "incident")
    assert told["text"].startswith("program ended with exit code 1")
    assert (told["id"], told["kind"]) == (one.id, "failure")
    assert "ValueError: no luck" in incident_bundle.text_of(one, "output/program.txt")
    (left,) = one.files_in("stacks")
    assert "python" in left, "the child that it has left"
    assert "state S" in incident_bundle.text_of(one, left)


def test_a_programs_hang_is_reported_when_it_is_asked_for_and_nobody_is_killed(tmp_path: Path) -> None:
    place, enough = tmp_path / "incidents", tmp_path / "enough"
    os.mkfifo(enough)
    watched = ("--hang-report-after", "2", "--incident-dir", str(place), "--engine", "plain")
    with start("run", *watched, "--", sys.executable, script(tmp_path, QUIET), str(enough)) as run:
        run.read_until("suspected hang: program has been idle: no output, no progress")
        enough.write_text("")
        run.ends_with(0)
    one = only(place)
    assert one.incident.kind == "hang"
    assert "state S" in incident_bundle.text_of(one, "stacks/program.txt")


def test_any_program_may_be_quiet_where_nobody_asked_for_reports(tmp_path: Path) -> None:
    place = tmp_path / "incidents"
    launched("run", "--incident-dir", str(place), "--engine", "plain", "--", "/bin/sleep", "0.1")
    assert not place.exists()


def test_status_shows_the_last_incident_while_the_run_goes_on(tmp_path: Path) -> None:
    place, enough = tmp_path / "incidents", tmp_path / "enough"
    os.mkfifo(enough)
    watched = ("--hang-report-after", "2", "--incident-dir", str(place), "--engine", "plain", "--grace", "2")
    words = ("run", *watched, "--", sys.executable, script(tmp_path, QUIET), str(enough))
    with start(*words, env={"TMPDIR": str(tmp_path)}) as run:
        run.read_until(r"suspected hang: ")
        one = only(place)
        line = f"incident  {one.incident.sentence}; see trainer-launch incidents show {one.id}"
        eventually(lambda: line in launch("status", env={"TMPDIR": str(tmp_path)}).stdout, lambda: line)
        run.signal(signal.SIGTERM)
        run.ends_with(143)


def test_what_any_program_does_is_collected_on_request_and_it_goes_on(tmp_path: Path) -> None:
    place, env = tmp_path / "incidents", {"TMPDIR": str(tmp_path)}
    options = ("--incident-dir", str(place), "--engine", "plain", "--grace", "2", "--")
    waits = script(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(60)")
    with start("run", *options, sys.executable, waits, env=env) as run:
        run.read_until("ready")
        assert launch("incidents", env=env).stdout == f"no incidents yet in {place}\n", (
            "where this launcher collects"
        )
        shown = launch("incidents", "collect", env=env)
        one = only(place)
        assert run.process.poll() is None
        run.signal(signal.SIGTERM)
        status, output = run.end()
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("collected on request\n")
    assert f" in {one.folder}; stacks in stacks/\n" in shown.stdout
    assert one.incident.kind == "request"
    assert "state S" in incident_bundle.text_of(one, "stacks/program.txt")
    assert f"on request: collected in {one.folder}" in output
    assert status == 143, output


@pytest.mark.parametrize("options", [(), ("--incident-dir", "none")], ids=["nothing runs", "nothing is collected"])
def test_a_request_that_nobody_hears_is_one_clear_error(tmp_path: Path, options: tuple[str, ...]) -> None:
    env = {"TMPDIR": str(tmp_path)}
    words = ("run", *options, "--engine", "plain", "--", "/bin/sh", "-c", "echo ready; exec sleep 60")
    with contextlib.ExitStack() as stack:
        if options:
            stack.enter_context(start(*words, env=env)).read_until("ready")
        ended = launch("incidents", "collect", env=env)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "no launcher that collects incidents runs in this container; run it while a job runs" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
