"""Watching real launchers: `status`, `--events`, `--metrics-port`, and the TrainJob's status."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import launch, launched, script, start
from tests.observability.exposition import parse
from tests.observability.statusserver import PATH, StatusServer, make_certificates
from tests.ports import free_port
from tests.process.world import PID1, require_namespaces
from tests.schemas.validator import violations
from tests.waiting import eventually

pytestmark = pytest.mark.process

TRAIN = """
import sys, trainer_launch
trainer_launch.report(step=30, progress=0.25, eta_s=90, metrics={'loss': 0.5})
print("ready", flush=True)
sys.stdin.readline()
import signal
signal.pause()
"""


@pytest.fixture
def train(tmp_path: Path) -> str:
    return script(tmp_path, TRAIN)


@pytest.fixture
def tmp(tmp_path: Path) -> dict[str, str]:
    """The variable that keeps launchers of this test apart from others of this machine."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    return {"TMPDIR": str(folder)}


def lines(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [wrong for line in found for wrong in violations("event", line)] == []
    return found


def status(*words: str, env: Mapping[str, str]) -> Any:
    """What `status --json` prints, of the launchers that this test has started."""
    told = json.loads(launch("status", "--json", *words, env=env).stdout)
    assert violations("status", told) == []
    told["launchers"] = [one for one in told["launchers"] if one["run_dir"].startswith(env["TMPDIR"])]
    return told


def test_status_tells_what_the_launcher_and_the_script_say(train: str, tmp: dict[str, str]) -> None:
    with start("run", "--engine=plain", "--node-rank=1", "--", train, env=tmp) as run:
        run.read_until("ready")
        (one,) = status(env=tmp)["launchers"]
        assert (one["pid"], one["node_rank"], one["phase"], one["engine"]) == (run.pid, 1, "running", "plain")
        assert [name for name, _ in one["processes"]] == ["program"]
        (said,) = one["reports"]
        assert (said["step"], said["progress"], said["eta_s"], said["metrics"]) == (30, 0.25, 90.0, {"loss": 0.5})
        shown = launch("status", "--pid", str(run.pid), env=tmp).stdout
        assert "step 30, 25.0 % done, 1 min 30 s left" in shown
        assert "loss=0.5" in shown
        assert f"pid {run.pid}, no platform, plain, started" in shown
        run.signal(signal.SIGTERM)
        assert run.end()[0] == 143
    assert status_fails(tmp, str(run.pid))


def status_fails(tmp: dict[str, str], pid: str) -> bool:
    """Whether no launcher with that pid is found."""
    ended = launch("status", "--pid", pid, env=tmp)
    return ended.returncode == 2 and ended.stderr.startswith("trainer-launch: error: ")


@pytest.mark.torch
def test_status_shows_each_job_of_a_machine_with_its_own_launchers(train: str, tmp: dict[str, str]) -> None:
    words = ("run", "--nproc-per-node", "1", "--", train)
    with start(*words, env=tmp) as one, start(*words, env=tmp) as other:
        one.read_until("ready")
        other.read_until("ready")
        jobs = [part for part in status(env=tmp)["jobs"] if {one.pid, other.pid} & set(part["pids"])]
        assert sorted(part["pids"] for part in jobs) == sorted([[one.pid], [other.pid]])
        assert [part["job"]["n_nodes"] for part in jobs] == [1, 1]
        shown = launch("status", env=tmp).stdout
        for part in jobs:
            launcher, _, job = shown.partition(f"\nJob {part['name']}: running, generation 1, 1 node, ")
            assert f"pid {part['pids'][0]}," in launcher.rpartition("Node 0")[2]
            assert job
        (alone,) = status("--pid", str(one.pid), env=tmp)["jobs"]
        assert alone["pids"] == [one.pid]


def test_status_says_why_it_shows_no_step(tmp: dict[str, str], tmp_path: Path) -> None:
    silent = script(tmp_path, "import signal; print('ready', flush=True); signal.pause()")
    with start("run", "--engine=plain", "--", silent, env=tmp) as run:
        run.read_until("ready")
        shown = launch("status", "--pid", str(run.pid), env=tmp).stdout
        assert "unknown: no step passed through the launcher or came from trainer_launch.report(step=...)" in shown


def test_status_shows_the_step_that_the_output_shows(tmp: dict[str, str], tmp_path: Path) -> None:
    prints = script(tmp_path, "import signal; print('step 41 loss 0.5\\nready', flush=True); signal.pause()")
    with start("run", "--engine=plain", "--", prints, env=tmp) as run:
        run.read_until("ready")
        (view,) = eventually(
            lambda: [each for each in status(env=tmp)["launchers"] if each["printed"]], "it is kept"
        )
        assert (view["reports"], view["printed"]["step"]) == ([], 41)
        assert "progress  step 41, printed " in launch("status", "--pid", str(run.pid), env=tmp).stdout


def test_what_a_launcher_that_was_killed_has_left_is_no_launcher(train: str, tmp: dict[str, str]) -> None:
    with start("run", "--engine=plain", "--", train, env=tmp) as run:
        run.read_until("ready")
    assert os.listdir(tmp["TMPDIR"]), "its folder is still there"
    assert status_fails(tmp, str(run.pid))


def test_the_event_log_tells_a_runs_life(train: str, tmp: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "events"
    secret = "--token=abcdefgh"
    words = ("--engine=plain", "--grace=5", "--events", str(path))
    with start("run", *words, "--", train, secret, env=tmp) as run:
        run.read_until("ready")
        run.signal(signal.SIGTERM)
        assert run.end()[0] == 143
    told = lines(path)
    names = [one["event"] for one in told]
    assert [name for name in names if name != "progress"] == [
        "started",
        "spawned",
        "signal",
        "stopping",
        "exited",
        "finished",
    ]
    assert names.count("progress") == 1
    assert (told[0]["engine"], told[0]["pid"]) == ("plain", run.pid)
    last = told[-1]
    assert (last["verdict"], last["exit_code"], last["retryable"]) == ("Stopped", 143, True)
    assert "abcdefgh" not in path.read_text()


def test_the_event_log_on_stdout_stays_between_the_workers_lines(tmp: dict[str, str], tmp_path: Path) -> None:
    text = "import sys\nfor i in range(2000): print('x' * 200)\nsys.stdout.write('half a line'); sys.exit(3)\n"
    ended = launched(
        "run", "--engine=plain", "--prefix", "--events", "-", "--", script(tmp_path, text), env=tmp, code=3
    )
    events = [line for line in ended.stdout.splitlines() if not line.startswith("[")]
    told = [json.loads(line)["event"] for line in events]
    assert told == ["started", "spawned", "exited", "incident", "finished"]


@pytest.mark.parametrize("path", ["/dev/full", "/nonexistent/events"])
def test_an_event_log_that_cannot_be_written_harms_no_job(path: str, tmp: dict[str, str]) -> None:
    ended = launched("run", "--engine=plain", "--events", path, "--", "true", env=tmp)
    assert "the job continues without an event log" in ended.stderr


@pytest.mark.torch
def test_a_coordinator_that_cannot_listen_is_told_too(train: str, tmp: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "events"
    with socket.create_server(("", 0)) as taken:
        job = ("--nodes=2", "--node-rank=0", "--master-addr=localhost", f"--master-port={taken.getsockname()[1]}")
        launched("run", *job, "--nproc-per-node=1", "--events", str(path), "--", train, env=tmp, code=138)
    last = lines(path)[-1]
    assert (last["event"], last["verdict"], last["exit_code"]) == ("finished", "NotStarted", 138)
    assert "cannot listen" in last["message"]


def test_prometheus_reads_the_metrics(train: str, tmp: dict[str, str]) -> None:
    port = free_port()
    with start("run", "--engine=plain", "--metrics-port", str(port), "--", train, env=tmp) as run:
        run.read_until("ready")
        connection = http.client.HTTPConnection("localhost", port, timeout=10)
        connection.request("GET", "/metrics")
        found = parse(connection.getresponse().read().decode())
        connection.close()
        assert list(found["trainer_launch_progress_ratio"].values()) == [0.25]
        assert list(found["trainer_launch_metric"].values()) == [0.5]
        assert found["trainer_launch_phase"][frozenset({("phase", "running")})] == 1
        run.signal(signal.SIGTERM)
        assert run.end()[0] == 143


def test_rank_0_posts_to_the_trainjobs_status(tmp: dict[str, str], tmp_path: Path) -> None:
    make_certificates(tmp_path)
    server = StatusServer(tmp_path, "a.b.c")
    (tmp_path / "token").write_text("a.b.c")
    env = {
        **tmp,
        "JOB_COMPLETION_INDEX": "0",
        "KUBEFLOW_TRAINER_SERVER_URL": f"https://localhost:{server.port}{PATH}",
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(tmp_path / "ca.crt"),
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
    }
    text = "import trainer_launch\ntrainer_launch.report(progress=0.5, metrics={'loss': 0.125})\n"
    try:
        launched("run", "--engine=plain", "--", script(tmp_path, text), env=env)
        assert [one["progressPercentage"] for one in server.posted] == [100]
        assert server.posted[0]["metrics"] == [{"name": "loss", "value": "0.125"}]
        launched("run", "--engine=plain", "--", script(tmp_path, text), env={**env, "JOB_COMPLETION_INDEX": "1"})
        assert len(server.posted) == 1, "every report replaces the whole status: only rank 0 may send one"
        server.hang.clear()
        assert launch("run", "--engine=plain", "--", script(tmp_path, text), env=env).returncode == 0
    finally:
        server.close()


def test_in_a_pod_whose_root_is_read_only_status_finds_the_launcher() -> None:
    require_namespaces()
    python = shlex.quote(sys.executable)
    shell = f"""
mount -t tmpfs none /dev/shm; mount -o bind,ro / / 2>/dev/null || mount -o remount,bind,ro /
for folder in /tmp /var/tmp; do mount --bind $folder $folder; mount -o remount,bind,ro $folder; done
cd /proc
{python} -m trainer_launch run --engine=plain -- sleep 60 &
for i in $(seq 100); do
    {python} -m trainer_launch status --json && break
    sleep 0.1
done
kill -TERM $!; wait
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("TMPDIR", None)
    ended = subprocess.run(
        [*PID1, "-m", "bash", "-c", shell], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    told = json.loads(ended.stdout)
    assert [one["run_dir"].rpartition("/")[0] for one in told["launchers"]] == ["/dev/shm"], ended.stderr
