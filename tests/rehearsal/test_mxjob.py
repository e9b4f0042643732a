"""An MXJob of the v1 operator up to 1.8: a scheduler, a server and workers that speak DMLC_* among themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.launching import launch

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

# What ps-lite does with the variables: all report to the scheduler, which ends when all workers are done.
NODE = """
import os, pathlib, socket, sys, time
env = os.environ
role, root = env["DMLC_ROLE"], (env["DMLC_PS_ROOT_URI"], int(env["DMLC_PS_ROOT_PORT"]))
def reached():
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(root)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
if role == "scheduler":
    done, open_ones = set(), []
    with socket.create_server(root) as listening:
        while len(done) < int(env["DMLC_NUM_WORKER"]) + int(env["DMLC_NUM_SERVER"]):
            connection, _ = listening.accept()
            open_ones.append(connection)
            done.add(connection.recv(99).decode())
    print("all have come:", *sorted(done), flush=True)
elif role == "server":
    connection = reached()
    connection.sendall(b"server")
    connection.recv(1)
else:
    number = env["DMLC_WORKER_ID"]
    kept = pathlib.Path(sys.argv[1], number)
    start = int(kept.read_text() or 0) if kept.exists() else 0
    if start:
        print(f"worker {number} resumed at step {start}", flush=True)
    for step in range(start + 1, 21):
        whole = kept.with_suffix(".new")
        whole.write_text(str(step))
        whole.replace(kept)
        print(f"step {step}", flush=True)
        time.sleep(0.05)
    reached().sendall(f"worker-{number}".encode())
"""


def manifest(
    folder: Path, mode: str = "MXTrain", roles: tuple[str, ...] = ("Scheduler", "Server", "Worker")
) -> str:
    (folder / "node.py").write_text(NODE)
    main = {"name": "mxnet", "image": "mx", "command": ["python", str(folder / "node.py"), str(folder)]}
    specs = {
        role: {
            "replicas": 2 if role == "Worker" else 1,
            "restartPolicy": "OnFailure",
            "template": {"spec": {"containers": [main]}},
        }
        for role in roles
    }
    job = {"apiVersion": "kubeflow.org/v1", "kind": "MXJob", "metadata": {"name": "mx"}}
    path = folder / "job.json"
    path.write_text(json.dumps({**job, "spec": {"jobMode": mode, "mxReplicaSpecs": specs}}))
    return str(path)


def test_a_killed_worker_is_restarted_in_its_pod_and_the_end_of_the_scheduler_is_that_of_the_job(
    tmp_path: Path,
) -> None:
    done = launch("rehearse", "-f", manifest(tmp_path), "--fault", "kill worker pod=mx-worker-1 at=step:5")
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "all have come: server worker-0 worker-1" in output
    assert re.search(r"worker 1 resumed at step \d+", output)
    assert re.search(r"^mx-worker-1 +Succeeded +1 +1 ", output, re.MULTILINE), output
    assert re.search(r"^mx-scheduler-0 +Succeeded +1 +0 ", output, re.MULTILINE), output


def test_a_job_that_could_never_end_or_tunes_is_refused_in_a_sentence(tmp_path: Path) -> None:
    for words, said in (
        ({"mode": "MXTune"}, "spec.jobMode is 'MXTune'; expected MXTrain: jobs of TVM's tuner are not rehearsed"),
        ({"roles": ("Server", "Worker")}, "expected one Scheduler, whose end is that of the job"),
        ({"roles": ("Scheduler", "Tuner")}, "expected only the replica types Scheduler, Server, Worker"),
    ):
        done = launch("rehearse", "-f", manifest(tmp_path, **words))
        assert done.returncode == 2
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
