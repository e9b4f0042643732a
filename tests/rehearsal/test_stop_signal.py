"""`lifecycle.stopSignal`: who hears of it, and what is said where it stops nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.launching import launch
from tests.rehearsal.controllers.manifests import job_of, pytorch
from trainer_launch.model import signal_policy
from trainer_launch.model.errors import UsageError

UNHEARD = "lifecycle.stopSignal is SIGUSR1, which does not ask it to stop"


def job(lifecycle: str, command: str) -> str:
    container = f"{{name: pytorch, image: i, command: {command}, lifecycle: {lifecycle}}}"
    spec = f"{{terminationGracePeriodSeconds: 3, containers: [{container}]}}"
    return pytorch(f"{{pytorchReplicaSpecs: {{Worker: {{restartPolicy: Never, template: {{spec: {spec}}}}}}}}}")


@pytest.mark.parametrize(
    ("name", "given", "advice"),
    [
        ("SIGTERM", "", None),
        ("SIGINT", "", None),
        ("SIGUSR1", "USR1=terminate", None),
        ("SIGUSR1", "USR1=drain", None),
        ("SIGUSR1", "", "Set --signals USR1=terminate, or remove lifecycle.stopSignal"),
        ("SIGUSR1", "USR1=checkpoint", "Set --signals USR1=terminate, or remove lifecycle.stopSignal"),
        ("SIGTERM", "TERM=forward", "Remove lifecycle.stopSignal"),
        ("SIGABRT", "", "Remove lifecycle.stopSignal"),
        ("SIGRTMIN+3", "", "Remove lifecycle.stopSignal"),
    ],
)
def test_a_stop_signal_that_is_no_request_to_stop_is_warned_of(name: str, given: str, advice: str | None) -> None:
    sentence = signal_policy.unheard(name, signal_policy.parse(given))
    assert (sentence == "") is (advice is None)
    assert sentence.endswith(advice or "")


@pytest.mark.parametrize("name", ["USR1", "SIGNONE", "SIGRTMIN+99", "9"])
def test_what_is_no_signal_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"lifecycle.stopSignal is .*; expected the name of a signal"):
        job_of(job(f"{{stopSignal: '{name}'}}", "[a]"))


def test_hooks_mean_nothing_here_and_are_said_to() -> None:
    assert "preStop of lifecycle" in job_of(job("{preStop: {}}", "[a]")).ignored


def test_explain_warns_of_a_rendered_pods_stop_signal(tmp_path: Path) -> None:
    manifest, pods = tmp_path / "job.yaml", tmp_path / "pods"
    manifest.write_text(job("{stopSignal: SIGUSR1}", "[trainer-launch, run, --, 'true']"))
    assert launch("rehearse", "-f", str(manifest), "--render", str(pods)).returncode == 0
    explained = launch("explain", "--json", "--pod", str(pods / "job-worker-0.json"))
    assert [text for text in json.loads(explained.stdout)["warnings"] if text.startswith(UNHEARD)]
    mapped = launch("explain", "--json", "--pod", str(pods / "job-worker-0.json"), "--signals", "USR1=terminate")
    assert "stopSignal" not in mapped.stdout


HEARS = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: (print("heard", flush=True), sys.exit(3)))
print("ready", flush=True)
while True: time.sleep(0.1)
"""


@pytest.mark.process
def test_a_pod_is_asked_to_stop_by_its_own_signal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEARS)
    (tmp_path / "job.yaml").write_text(job("{stopSignal: SIGUSR1}", "[python, train.py]"))
    done = launch("rehearse", "-f", "job.yaml", "--fault", "term pod back=never at=line:ready", cwd=tmp_path)
    assert "heard" in done.stdout, done.stderr


@pytest.mark.process
def test_a_stop_signal_that_the_launcher_passes_on_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ready', flush=True)\nimport time; time.sleep(60)\n")
    command = "[trainer-launch, run, --signals, WINCH=forward, --, python, train.py]"
    (tmp_path / "job.yaml").write_text(job("{stopSignal: SIGWINCH}", command))
    done = launch("rehearse", "-f", "job.yaml", "--fault", "term pod back=never at=line:ready", cwd=tmp_path)
    assert UNHEARD.replace("SIGUSR1", "SIGWINCH") in done.stderr
    assert "FAILED: the script ignored the stop signal" in done.stderr
    assert "asked to stop by SIGWINCH" in " ".join(done.stderr.split())
