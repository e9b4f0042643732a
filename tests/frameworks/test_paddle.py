"""PaddlePaddle itself: a PaddleJob under paddle.distributed.launch trains, loses a pod, and resumes."""

from __future__ import annotations

import re

import pytest

from tests.frameworks import frameworks
from tests.frameworks.rehearsals import RUN_S, got_over, lives, losses

pytestmark = [pytest.mark.frameworks, pytest.mark.process, pytest.mark.timeout(frameworks.MAKING_S + RUN_S)]
PODS = ("charlm-worker-0", "charlm-worker-1")


def assert_trained(output: str) -> None:
    told = losses(output)
    assert told[0] > 2.7 > 2.2 > told[-1], "a model that knows nothing has 5.55"


def test_a_paddlejob_gets_over_the_loss_of_a_worker() -> None:
    output = got_over("paddle", "paddlejob-charlm.yaml", PODS[1], after=r"step 100/")
    assert {f"rank {rank} of 2" for rank in (0, 1)} <= set(re.findall(r"rank \d of \d", output))
    assert int(re.findall(r"resumed at step (\d+)", output)[0]) >= 100
    assert re.search(rf"{PODS[0]} ended with exit code (138|250)", output), (
        "Paddle restarts nothing itself, without etcd"
    )
    assert [lives(output, pod) for pod in PODS] == [(1, 1)] * 2
    assert_trained(output)
