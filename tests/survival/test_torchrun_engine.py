"""The faults of `test_survival.py` under `--engine torchrun`: the image's own torchrun, and the same promises.

What torchrun cannot keep is not asked for: it recovers seconds later, because each start imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.launching import script
from tests.pods import Job, job, wait_until
from tests.survival.jobs import (
    CONTRACTS,
    DEADLINE_S,
    ELASTIC,
    FIXED,
    LONG,
    MARKS,
    Recovery,
    Standing,
    begun,
    completed,
    hang_worker,
    kill_pod,
    kill_torchrun,
    kill_worker,
    move_pod,
    need_hosts,
    restarts_only_its_own_pod,
    stop_pod,
    training,
)
from trainer_launch.planning.engines import torchrun

pytestmark = [*MARKS, LONG]
ENGINE = ("--engine", torchrun.NAME)


FAULTS = {
    "worker-of-node-0-killed": (kill_worker(0), [0, 0, 0]),
    "worker-of-node-1-killed": (kill_worker(1), [0, 0, 0]),
    "torchrun-of-node-1-killed": (kill_torchrun(1), [0, 0, 0]),
    "torchrun-of-node-0-killed": (kill_torchrun(0), [0, 0, 0]),
    "pod-1-killed": (kill_pod(1), [0, 1, 0]),
    "pod-0-killed": (kill_pod(0), [1, 0, 0]),
    "pod-1-asked-to-stop": (stop_pod(1), [0, 1, 0]),
    "pod-0-asked-to-stop": (stop_pod(0), [1, 0, 0]),
    "pod-0-comes-back-with-a-new-address": (move_pod(0), [1, 0, 0]),
}


@pytest.fixture(scope="module", params=["fixed", "elastic"])
def standing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    """One job for all faults: it has to survive every one that came before, too."""
    restart_s = 1.0 if "elastic" in request.param else 2.5
    options = (*ENGINE, "--max-restarts", "9")
    made = Standing(
        CONTRACTS[request.param], lambda: tmp_path_factory.mktemp(request.param), *options, restart_s=restart_s
    )
    yield made
    made.end()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_restarts_no_other_pod(standing: Standing, name: str) -> None:
    if "new-address" in name:
        need_hosts()
    with standing.job() as running:
        _fault_restarts_only_its_own_pod(running, name)


@pytest.mark.parametrize("name", ["worker-of-node-1-killed", "pod-1-killed", "pod-0-asked-to-stop"])
@pytest.mark.parametrize("standing", ["saving"], indirect=True)
def test_nor_where_the_script_saves_on_sigterm_and_exits_with_0(standing: Standing, name: str) -> None:
    with standing.job() as running:
        _fault_restarts_only_its_own_pod(running, name)


def _fault_restarts_only_its_own_pod(running: Job, name: str) -> None:
    recovery = restarts_only_its_own_pod(running, name, *FAULTS[name])
    assert recovery.failures == name.count("worker"), "only failed workers cost the budget"


def test_a_hanging_worker_costs_a_restart_of_its_torchrun(tmp_path: Path) -> None:
    watched = ("--hang-timeout", "4", "--incident-dir", str(tmp_path))
    with job(FIXED.names, training(tmp_path), FIXED.env_of, *ENGINE, *watched) as running:
        begun(running)
        recovery = Recovery(running)
        hang_worker(1)(running)
        recovery.wait()
        assert recovery.starts == [0, 0, 0], [pod.codes for pod in running.pods]
        said = ["".join(pod.lines).count("hang: rank 1 has been stopped (SIGSTOP) for") for pod in running.pods]
        assert said == [0, 1, 0], "the node whose worker it is acts, and no other"
        completed(running)


def test_a_pod_above_the_maximum_waits_and_ends_well_with_the_job(tmp_path: Path) -> None:
    env_of = lambda node: ELASTIC.env_of(node) | {"PET_NNODES": "1:2"}  # noqa: E731
    with job(ELASTIC.names, training(tmp_path), env_of, *ENGINE) as running:
        begun(running, workers=2)
        completed(running)
        assert [pod.codes for pod in running.pods] == [[0], [0], [0]]
        trained = ["this is node" in "".join(pod.lines) for pod in running.pods]
        assert sorted(trained) == [False, True, True]


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [("sys.exit(9)", 9, "rank 1 ended with exit code 9"), ("os.kill(os.getpid(), 9)", 137, "signal SIGKILL")],
)
def test_the_faulty_pod_ends_with_its_workers_code_and_the_others_name_it(
    tmp_path: Path, end: str, code: int, said: str
) -> None:
    crash = f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {end}\ntime.sleep(60)\n"
    options = (*ENGINE, "--max-restarts", "1")
    with job(FIXED.names, script(tmp_path, crash), FIXED.env_of, *options) as running:
        ended = lambda: all(pod.codes for pod in running.pods)  # noqa: E731
        wait_until(ended, "all pods to end", running.pods, DEADLINE_S)
        assert [pod.codes[0] for pod in running.pods] == [138, code, 138]
        innocent, faulty, _ = (pod.last_words[0] for pod in running.pods)
        assert "node 1 (job-node-0-1)" in innocent, "the innocent name the faulty"
        assert "rank=1 node=1 host=job-node-0-1" in faulty
        assert said in faulty
