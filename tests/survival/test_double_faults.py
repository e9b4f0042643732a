"""Faults that come at once, or while the job recovers from another, and strangers at the coordinator's door."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import hostile
from tests.pods import job, wait_until
from tests.survival.jobs import (
    DEADLINE_S,
    FIXED,
    LONG,
    MARKS,
    Fault,
    Recovery,
    Standing,
    completed,
    kill_fork_server,
    kill_pod,
    kill_store,
    kill_worker,
    need_hosts,
    steps,
    training,
)

pytestmark = [*MARKS, LONG]


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    folder = lambda: tmp_path_factory.mktemp("double")  # noqa: E731
    made = Standing(FIXED, folder, "--max-restarts", "20", restart_s=1.0)
    yield made
    made.end()


@pytest.mark.parametrize("nodes", [(1, 2), (0, 1)], ids=["1-and-2", "0-and-1"])
def test_two_pods_killed_at_once(standing: Standing, nodes) -> None:
    with standing.job() as running:
        recovery = Recovery(running)
        for node in nodes:
            kill_pod(node)(running)
        recovery.wait()
        assert recovery.starts == [int(node in nodes) for node in range(3)]
        assert recovery.failures == 0


@pytest.mark.parametrize("fault", [kill_store(), kill_fork_server(1)], ids=["the store", "its fork server"])
def test_a_worker_killed_in_the_same_instant_as(standing: Standing, fault: Fault) -> None:
    with standing.job() as running:
        recovery = Recovery(running)
        fault(running)
        kill_worker(1)(running)
        recovery.wait()
        assert recovery.starts == [0, 0, 0]


def test_a_worker_killed_while_the_job_restarts_for_another(standing: Standing) -> None:
    """As soon as node 2's next worker exists: it imports torch, and the others wait for it."""
    with standing.job() as running:
        recovery = Recovery(running)
        old = running.pods[2].workers()[0]
        kill_worker(1)(running)
        wait_until(
            lambda: [worker for worker in running.pods[2].workers() if worker != old],
            "node 2's next worker",
            running.pods,
            DEADLINE_S,
        )
        kill_worker(2)(running)
        recovery.wait()
        assert recovery.starts == [0, 0, 0]
        assert recovery.failures == 2


def test_strangers_at_the_coordinators_port_disturb_no_running_job(standing: Standing) -> None:
    need_hosts()
    with standing.job() as running:
        before = steps(running.folder)[-1]
        host = running.hosts[2]
        flood = host.start((sys.executable, hostile.__file__, FIXED.names[0], "29500"), {"PYTHONPATH": os.getcwd()})
        said, _ = flood.communicate(timeout=DEADLINE_S)
        assert flood.returncode == 0, said
        wait_until(
            lambda: steps(running.folder)[-1].number >= before.number + 10, "they go on", running.pods, DEADLINE_S
        )
        assert steps(running.folder)[-1].start == before.start, "no worker was started again"
        recovery = Recovery(running)
        kill_pod(1)(running)
        recovery.wait()
        assert recovery.starts == [0, 1, 0], "the coordinator still does its work"


def test_pods_wait_for_one_that_is_late_and_bear_with_one_that_dies_meanwhile(tmp_path: Path) -> None:
    with job(FIXED.names, training(tmp_path), FIXED.env_of, at_first=2, restart_s=1.0) as running:
        pods = running.pods
        waits = lambda: "".join(pods[1].lines).count("2 of 3 nodes are here; missing: node 2")  # noqa: E731
        wait_until(waits, "the others to say who is missing", pods, DEADLINE_S)
        before = waits()
        kill_pod(1)(running)  # while the job gathers
        wait_until(lambda: waits() > before, "the pod to wait again", pods, DEADLINE_S)
        late = running.start_next()
        formed = lambda: "this is node 2" in "".join(late.lines)  # noqa: E731
        wait_until(formed, "the job to form", pods, DEADLINE_S)
        kill_pod(1)(running)  # while its workers start
        Recovery(running).wait()
        assert [pod.starts for pod in pods] == [1, 3, 1]
        completed(running)
