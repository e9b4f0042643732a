"""Faults that need no root, carried out on real pods: what becomes of the job, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.cli.launching import launched, start

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

# Counts its steps in a file that outlives it, as a training script that saves each step.
_BEGINS = "n=$(cat /claim/$HOSTNAME 2>/dev/null || echo 0); b=$n; echo life from $b; "
_STEPS = (
    "while [ $n -lt 100 ]; do n=$((n+1)); "
    "echo $n >/claim/new.$HOSTNAME; mv /claim/new.$HOSTNAME /claim/$HOSTNAME; "
    "echo step $n, begun at $b; sleep 0.05; done"
)
# A fault comes when any pod reaches its step. Here none makes a step before both of two pods have begun.
COUNTS_TOGETHER = (
    f"{_BEGINS} touch /claim/begun.$HOSTNAME; "
    f"until [ -e /claim/begun.job-worker-0 ] && [ -e /claim/begun.job-worker-1 ]; do sleep 0.05; done; {_STEPS}"
)
VOLUMES = "volumes: [{name: c, persistentVolumeClaim: {claimName: x}}]"
MOUNTS = "volumeMounts: [{name: c, mountPath: /claim}]"


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All that a rehearsal starts has this variable."""
    monkeypatch.setenv("LEFT_BY", str(tmp_path))
    yield
    left = [one.info["cmdline"] for one in psutil.process_iter(["cmdline", "pid"]) if _bears(one, str(tmp_path))]
    assert left == []


def _bears(process: psutil.Process, mark: str) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        return process.environ().get("LEFT_BY") == mark
    except psutil.Error:
        return False


def job(folder: Path, script: str, replicas: str = "replicas: 2", spec: str = "") -> str:
    """A PyTorchJob whose workers run a shell script."""
    container = f"{{name: pytorch, image: i, command: [sh, -c, {json.dumps(script)}], {MOUNTS}}}"
    pod = f"{{containers: [{container}], {VOLUMES}, terminationGracePeriodSeconds: 20}}"
    path = folder / "job.yaml"
    workers = f"{{{replicas}, template: {{spec: {pod}}}}}"
    path.write_text(
        "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: job}\n"
        f"spec: {{{spec + ', ' if spec else ''}pytorchReplicaSpecs: {{Worker: {workers}}}}}\n"
    )
    return str(path)


def rehearse(path: str, *faults: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    words = [word for fault in faults for word in ("--fault", fault)]
    return launched("rehearse", "-f", path, *words, code=code)


def row(stderr: str, pod: str) -> list[str]:
    """Phase, starts, restarts and exit code of a pod."""
    return next(line.split()[1:5] for line in stderr.splitlines() if line.startswith(f"{pod} "))


def lives(stdout: str, pod: str) -> list[int]:
    """At which step each life of a pod began."""
    return [int(line.rpartition(" ")[2]) for line in stdout.splitlines() if line.startswith(f"[{pod}] life from")]


# -- workers ----------------------------------------------------------------------------------


def test_a_killed_worker_is_started_again_where_it_was_told_to(tmp_path: Path) -> None:
    fault = "kill worker node=1 at=step:20"
    ended = rehearse(job(tmp_path, COUNTS_TOGETHER), fault)
    assert f"[trainer-launch] fault: {fault}" in ended.stderr
    assert row(ended.stderr, "job-worker-1") == ["Succeeded", "1", "1", "0"]
    assert row(ended.stderr, "job-worker-0") == ["Succeeded", "1", "0", "0"]
    first, again = lives(ended.stdout, "job-worker-1")
    assert first == 0
    assert 1 <= again < 100


def test_a_stopped_worker_goes_on_after_its_time(tmp_path: Path) -> None:
    text = "while :; do date +%s%N; sleep 0.05; done"
    numbers = r"at=line:^[0-9]+"  # so the worker has printed before it is stopped
    with start(
        "rehearse", "-f", job(tmp_path, text, "replicas: 1"), "--fault", f"stop worker {numbers} for=1.5s"
    ) as run:
        run.read_until("fault ended: stop worker")
        over_ns = time.time_ns()
        while int(run.read_until(r"^\[job-worker-0\] (\d{19})$")[0]) < over_ns:
            pass  # lines from before the stop may be read after it
        run.signal(signal.SIGINT)
        output = run.ends_with(130)
    said = re.findall(r"^\[job-worker-0\] (\d{19})$", output, re.MULTILINE)
    times = [int(word) / 1e9 for word in said]
    assert max(after - before for before, after in pairwise(times)) > 1.0


# -- pods -------------------------------------------------------------------------------------


def test_a_killed_pod_is_made_anew_and_counts_as_no_failure(tmp_path: Path) -> None:
    path = job(tmp_path, COUNTS_TOGETHER, "replicas: 2, restartPolicy: Never", "runPolicy: {backoffLimit: 0}")
    again = r"at=line:step\s\d+,\sbegun\sat\s[1-9]"
    ended = rehearse(path, "kill pod node=0 at=step:20 back=0.5s", f"kill pod node=0 {again}")
    assert row(ended.stderr, "job-worker-0") == ["Succeeded", "3", "0", "0"]
    first, second, third = lives(ended.stdout, "job-worker-0")
    assert first == 0 < second < third < 100


def test_an_evicted_pod_is_asked_first_and_has_its_grace(tmp_path: Path) -> None:
    text = f"trap 'echo saved; exit 143' TERM; {COUNTS_TOGETHER}"
    ended = rehearse(job(tmp_path, text), "term pod pod=worker-0 grace=10s at=step:5")
    assert ended.stdout.count("[job-worker-0] saved") == 1
    assert row(ended.stderr, "job-worker-0") == ["Succeeded", "2", "0", "0"]


# -- when it cannot be ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("says", "fault", "why"),
    [
        ("step 1", "kill worker at=step:500", "step 500 was not reached; the last one was 1"),
        ("step 1", "kill worker worker=3 at=0.1s", "has no worker 3"),
    ],
)
def test_a_fault_that_never_came_is_said_and_makes_a_rehearsal_that_succeeded_end_with_1(
    tmp_path: Path, says: str, fault: str, why: str
) -> None:
    ended = rehearse(job(tmp_path, f"echo {says}; sleep 1", "replicas: 1"), fault, code=1)
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("fault did not happen: kill ")
    assert why in last


# -- from flags -------------------------------------------------------------------------------
