"""XGBoost itself: the jobs of docker/examples train on real data, lose a pod, and go on from their checkpoint."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

import pytest

from tests.frameworks import frameworks
from tests.frameworks.rehearsals import RUN_S, assert_all_left_after_one_step, got_over, lives, losses

pytestmark = [pytest.mark.frameworks, pytest.mark.process, pytest.mark.timeout(frameworks.MAKING_S + RUN_S)]
V1 = ("digits-master-0", "digits-worker-0", "digits-worker-1")


def assert_trained(output: str) -> None:
    told = losses(output)
    assert told[0] > 0.5 > 0.05 > told[-1]
    share = re.search(r"done: ([\d.]+)% of the held-out digits", output)
    assert share, output
    assert float(share.group(1)) > 90


def assert_all_started_again(output: str, pods: Sequence[str]) -> None:
    """XGBoost's group cannot go on without one of it: each container starts again.

    More than once for who is back before its peers have ended: it finds the tracker that is just ending.
    """
    told = [lives(output, pod) for pod in pods]
    assert all(created == 1 and restarts >= 1 for created, restarts in told), output


def test_an_xgboostjob_gets_over_the_loss_of_a_worker() -> None:
    output = got_over("xgboost", "xgboostjob-digits.yaml", V1[2], after=r"step 20/")
    assert {f"rank {rank} of 3: 479 rows" for rank in range(3)} <= set(
        re.findall(r"rank \d of 3: \d+ rows", output)
    )
    assert int(re.findall(r"resumed at step (\d+)", output)[0]) >= 20
    assert_all_started_again(output, V1)
    assert_trained(output)


def test_a_trainjob_gets_over_the_loss_of_the_pod_that_has_the_tracker() -> None:
    nodes = ("digits-node-0-0", "digits-node-0-1")
    output = got_over("xgboost", "trainjob-xgboost.yaml", nodes[0], after=r"step 20/")
    assert int(re.findall(r"resumed at step (\d+)", output)[0]) >= 20
    assert_all_started_again(output, nodes)
    assert_trained(output)


def test_sigterm_to_one_pod_stops_all_after_the_same_round_and_they_go_on_there() -> None:
    output = got_over("xgboost", "xgboostjob-digits.yaml", V1[1], after=r"step 20/", number=signal.SIGTERM)
    assert_all_left_after_one_step(output)
    assert_all_started_again(output, V1)
    assert_trained(output)
