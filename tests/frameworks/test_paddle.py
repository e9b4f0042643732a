"""PaddlePaddle itself: a PaddleJob under paddle.distributed.launch trains, loses a pod, and resumes."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.frameworks import frameworks
from tests.frameworks.rehearsals import RUN_S, Rehearsal, changed, lives, losses

pytestmark = [pytest.mark.frameworks, pytest.mark.process, pytest.mark.timeout(frameworks.MAKING_S + RUN_S)]
PODS = ("charlm-worker-0", "charlm-worker-1")


def assert_trained(output: str) -> None:
    told = losses(output)
    assert told[0] > 2.7 > 2.2 > told[-1], "a model that knows nothing has 5.55"


def test_a_paddlejob_gets_over_the_loss_of_a_worker() -> None:
    with Rehearsal("paddle", "paddlejob-charlm.yaml") as job:
        job.read_until(r"step 100/")
        job.main(PODS[1]).send_signal(signal.SIGKILL)
        code, output = job.ended()
    assert code == 0, output
    assert {f"rank {rank} of 2" for rank in (0, 1)} <= set(re.findall(r"rank \d of \d", output))
    assert int(re.findall(r"resumed at step (\d+)", output)[0]) >= 100
    assert re.search(rf"{PODS[0]}/paddle ended with (138|250)", output), (
        "Paddle restarts nothing itself, without etcd"
    )
    assert [lives(output, pod) for pod in PODS] == [(1, 1)] * 2
    assert_trained(output)


def test_under_exit_code_the_survivor_of_a_lost_master_is_retryable_too(tmp_path: Path) -> None:
    manifest = changed("paddlejob-charlm.yaml", tmp_path, lambda text: text.replace("OnFailure", "ExitCode"))
    with Rehearsal("paddle", manifest) as job:
        job.read_until(r"step 100/")
        job.main(PODS[0]).send_signal(signal.SIGKILL)
        code, output = job.ended()
    assert code == 0, output
    assert re.search(rf"{PODS[1]} failed \(exit code (138|250)\): it is deleted and made anew", output)
    assert [lives(output, pod) for pod in PODS] == [(2, 0)] * 2
    assert "resumed at step" in output
    assert_trained(output)


def test_sigterm_to_one_pod_stops_all_after_the_same_step_and_they_go_on_there() -> None:
    with Rehearsal("paddle", "paddlejob-charlm.yaml") as job:
        job.read_until(r"step 100/")
        job.main(PODS[1]).send_signal(signal.SIGTERM)
        code, output = job.ended()
    assert code == 0, output
    resumed = int(re.findall(r"resumed at step (\d+)", output)[0])
    assert f"step {resumed}/" in output.partition("resumed")[0], "rank 0 saved the step that all left after"
    assert f"{PODS[0]}/paddle ended with 143" in output
    assert [lives(output, pod) for pod in PODS] == [(1, 1)] * 2
    assert_trained(output)
