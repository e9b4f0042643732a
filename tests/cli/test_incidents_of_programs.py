"""Incidents of any program: what is collected where nobody below answers, and that nothing of it holds a job up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import launch, script, start
from tests.conftest import require
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
import os, sys, time
for n in range(8):
    print("beat", n, flush=True)
    time.sleep(0.2)
if os.environ.get("RANK", "1") == "1":
    time.sleep(6)
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
    ended = launch("run", *options, "--engine", "plain", "--", sys.executable, script(tmp_path, PARENT))
    assert ended.returncode == 1, ended.stderr
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
    place = tmp_path / "incidents"
    watched = ("--hang-report-after", "2", "--incident-dir", str(place), "--engine", "plain")
    ended = launch("run", *watched, "--", sys.executable, script(tmp_path, QUIET))
    assert ended.returncode == 0, ended.stderr
    assert "suspected hang: program has been idle: no output, no progress" in ended.stderr
    one = only(place)
    assert one.incident.kind == "hang"
    assert "state S" in incident_bundle.text_of(one, "stacks/program.txt")


def test_any_program_may_be_quiet_where_nobody_asked_for_reports(tmp_path: Path) -> None:
    place = tmp_path / "incidents"
    ended = launch("run", "--incident-dir", str(place), "--engine", "plain", "--", "/bin/sleep", "0.1")
    assert ended.returncode == 0, ended.stderr
    assert not place.exists()


def test_status_shows_the_last_incident_while_the_run_goes_on(tmp_path: Path) -> None:
    place = tmp_path / "incidents"
    code = QUIET.replace("time.sleep(6)", "time.sleep(60)")
    watched = ("--hang-report-after", "2", "--incident-dir", str(place), "--engine", "plain", "--grace", "2")
    with start("run", *watched, "--", sys.executable, script(tmp_path, code), env={"TMPDIR": str(tmp_path)}) as run:
        run.read_until(r"suspected hang: ")
        one = only(place)
        line = f"incident  {one.incident.sentence}; see trainer-launch incidents show {one.id}"
        eventually(lambda: line in launch("status", env={"TMPDIR": str(tmp_path)}).stdout, lambda: line)
        run.signal(signal.SIGTERM)
        status, output = run.end()
    assert status == 143, output


def test_a_rehearsed_program_leaves_its_incidents_where_local_says(tmp_path: Path) -> None:
    require(shutil.which("mpirun") is not None, "mpirun is not installed")
    code = "import os\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n    raise ValueError('no luck')\n"
    mpirun = ("mpirun", "--allow-run-as-root", sys.executable, script(tmp_path, code))
    options = ("--engine", "mpi", "--nodes", "2", "--max-restarts", "0")
    ended = launch("local", *options, "--", *mpirun, env={"TMPDIR": str(tmp_path)})
    assert ended.returncode != 0, ended.stderr
    place = tmp_path / incident_bundle.DEFAULT
    assert f" in {place}; see trainer-launch incidents show --incident-dir {place}" in ended.stderr
    found = {one.incident.sentence: one for one in incident_bundle.stored(str(place))}
    one = found["rank 1 ended with exit code 1: ValueError: no luck"]
    assert "no luck" in incident_bundle.text_of(one, "output/mpirun.txt")


def test_who_may_not_read_the_kernels_log_is_told_so(tmp_path: Path) -> None:
    require(os.geteuid() == 0, "only root can become somebody else")
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs", "--")
    place = Path("/dev/shm") / f"incidents-{os.getpid()}"  # a folder that everybody may reach
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    try:
        options = ("--engine", "plain", "--incident-dir", f"{place}/all", "--", "/bin/sh", "-c", "exit 3")
        ended = launch("run", *options, env={"HOME": "/", "TMPDIR": str(place)}, within=nobody)
        require(
            "can't open file" not in ended.stderr and "No module" not in ended.stderr, "nobody may not read this"
        )
        assert ended.returncode == 3, ended.stderr
        one = only(place / "all")
        hidden = [words for words in one.incident.missing if words.startswith("host/kernel.txt: /dev/kmsg: ")]
        is_open = Path("/proc/sys/kernel/dmesg_restrict").read_text().strip() == "0"
        assert bool(hidden) != (is_open and os.path.exists("/dev/kmsg")), one.incident.missing
        assert "host/network.txt" in one.files
    finally:
        shutil.rmtree(place)


def test_a_full_disk_still_has_the_sentence_and_the_job_ends_as_it_does(tmp_path: Path) -> None:
    """A tmpfs of the launcher's own with room for little more than one file; most of it is taken."""
    require(os.geteuid() == 0, "only root can mount a tmpfs")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=64k none {disk} && head -c 40000 /dev/zero >{disk}/taken && "$@"; code=$?; '
    within = ("unshare", "--mount", "sh", "-c", f"{mount} cp -r {disk}/all {tmp_path}/copied; exit $code", "sh")
    chatty = "import sys\nfor n in range(2000):\n    print('line', n, 'x' * 100, file=sys.stderr)\nsys.exit(3)\n"
    options = ("--engine", "plain", "--incident-dir", f"{disk}/all", "--")
    ended = launch("run", *options, sys.executable, script(tmp_path, chatty), within=within)
    assert ended.returncode == 3, ended.stderr
    one = only(tmp_path / "copied")
    assert one.incident.sentence.startswith("program ended with exit code 3")
    assert any(
        words.endswith(("No space left on device", "there was no room")) for words in one.incident.missing
    ), one.incident


@pytest.mark.long("tests/cli/test_incidents_of_programs.py")
@pytest.mark.torch
@pytest.mark.timeout(300)
def test_workers_that_cannot_answer_yield_what_can_be_had(tmp_path: Path) -> None:
    """Rank 1 is blocked in C code that holds the GIL, rank 2 is suspended, rank 3 has died in silence."""
    place = tmp_path / "incidents"
    code = """
import ctypes, os, signal, time
from datetime import timedelta
import torch, torch.distributed as dist
def blocked():
    lock, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)
def train():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(5):
        dist.all_reduce(torch.ones(4))
        print("rank", rank, "step", step, flush=True)
    if rank == 1:
        blocked()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(4))
train()
"""
    watched = ("--hang-report-after", "2", "--grace", "2", "--incident-dir", str(place), "--prefix")
    with start("run", *watched, "--nproc-per-node", "3", "--", script(tmp_path, code)) as run:
        run.read_until(r"suspected hang: ")
        run.signal(signal.SIGTERM)
        status, output = run.end()
    assert status == 143, output
    one = incident_bundle.stored(str(place))[0]
    assert one.incident.took_s < 10
    states = {state.rank: state for state in one.incident.states}
    assert {rank: state.life.value for rank, state in states.items()} == {0: "alive", 1: "alive", 2: "stopped"}
    assert "(blocked)" in states[1].place, "the signal's handler needs no GIL"
    assert states[1].why == states[2].why == "it did not answer in time"
    assert states[0].groups["0"].entered == 6
    assert {"rank 1: its flight recorder did not answer", "rank 2: no Python stacks"} <= set(one.incident.missing)
    assert "state T" in incident_bundle.text_of(one, "stacks/rank-2.txt")
