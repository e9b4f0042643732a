"""What happens to one pod costs the job seconds, and the others nothing: three hosts, a kubelet, real faults."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.cli.launching import script
from tests.pods import Job, job, wait_until
from tests.survival.jobs import (
    CONTRACTS,
    DEADLINE_S,
    ELASTIC,
    FIXED,
    LEAVES_EARLY,
    LONG,
    MARKS,
    Fault,
    Recovery,
    Standing,
    begun,
    completed,
    hang_worker,
    kill_fork_server,
    kill_pod,
    kill_store,
    kill_worker,
    lose_pod,
    lost_or_done_twice,
    move_pod,
    need_hosts,
    node_states,
    restarts_only_its_own_pod,
    steps,
    stop_pod,
    trainer_v2,
    training,
)

pytestmark = MARKS
ELASTIC_TOO = pytest.param("elastic", marks=LONG)
SECONDS = 29.0  # at most; torch gives a worker that does not end 30 s
FAULTS = {
    "worker-of-node-1-killed": (kill_worker(1), [0, 0, 0]),
    "store-killed": (kill_store(), [0, 0, 0]),
    "pod-1-killed": (kill_pod(1), [0, 1, 0]),
    "pod-0-killed": (kill_pod(0), [1, 0, 0]),
    "pod-1-asked-to-stop": (stop_pod(1), [0, 1, 0]),
    "pod-0-asked-to-stop": (stop_pod(0), [1, 0, 0]),
    "pod-1-comes-back-with-a-new-address": (move_pod(1), [0, 1, 0]),
    "pod-0-comes-back-with-a-new-address": (move_pod(0), [1, 0, 0]),
}

HANGS = "worker-of-node-1-hangs"
HANG: dict[str, tuple[Fault, list[int]]] = {HANGS: (hang_worker(1), [0, 0, 0])}


@pytest.fixture(scope="module", params=["fixed", ELASTIC_TOO])
def standing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    """One job for all faults: it has to survive every one that came before, too."""
    # A pod 0 that is away for less than 2 s interrupts nobody's workers for its coordinator's sake.
    contract = CONTRACTS[request.param]
    restart_s = 1.0 if "elastic" in request.param else 2.5
    # Long enough for every other fault to be no hang.
    watched = (
        "--hang-timeout",
        "4",
        "--incident-dir",
        str(tmp_path_factory.mktemp("stacks")),
        "--max-restarts",
        "9",
    )
    made = Standing(contract, lambda: tmp_path_factory.mktemp(request.param), *watched, restart_s=restart_s)
    yield made
    made.end()


@pytest.mark.parametrize(
    "name", [name if "asked" not in name else pytest.param(name, marks=LONG) for name in FAULTS]
)
def test_a_fault_costs_seconds_and_no_other_pod(standing: Standing, name: str) -> None:
    if "new-address" in name:
        need_hosts()
    with standing.job() as running:
        _fault_restarts_only_its_own_pod(running, name)


@LONG
@pytest.mark.parametrize("name", [name for name in FAULTS if "store" not in name and "address" not in name])
@pytest.mark.parametrize("standing", ["saving", pytest.param("saving-elastic", marks=LONG)], indirect=True)
def test_it_costs_no_more_where_the_script_saves_on_sigterm_and_exits_with_0(standing: Standing, name: str) -> None:
    """The workers of the other pods get SIGTERM, too, and are not waited for when they have saved."""
    with standing.job() as running:
        start_s = time.monotonic()
        _fault_restarts_only_its_own_pod(running, name)
        assert time.monotonic() < start_s + SECONDS


@LONG
@pytest.mark.parametrize("name", [*(name for name in FAULTS if "address" not in name), HANGS])
@pytest.mark.parametrize("standing", ["keeping"], indirect=True)
def test_where_state_is_kept_the_other_workers_live_on_and_no_step_is_lost(standing: Standing, name: str) -> None:
    """There is no checkpoint, so that a step after the last one proves that the state was kept."""
    with standing.job() as running:
        before = [(pod.workers(), len(pod.lines)) for pod in running.pods]
        _fault_restarts_only_its_own_pod(running, name)
        replaced = [
            node
            for node, (pod, (workers, told)) in enumerate(zip(running.pods, before, strict=True))
            if pod.workers() != workers and not ("store" not in name and _was_forgotten(pod.lines[told:]))
        ]
        assert replaced == [node for node in range(3) if f"-{node}-" in name]
        assert lost_or_done_twice(running.folder) == []


def _was_forgotten(lines: Iterable[str]) -> bool:
    """Whether gloo waits for ever for a send to a rank that was killed, as docs/keeping-state.md says of few."""
    return any("cannot leave its collective; it is replaced" in line for line in lines)


def _fault_restarts_only_its_own_pod(running: Job, name: str) -> None:
    recovery = restarts_only_its_own_pod(running, name, *(FAULTS | HANG)[name])
    is_failure = "worker" in name or "store" in name
    assert recovery.failures == is_failure, "only failed workers, and a lost store, cost the budget"


@pytest.mark.parametrize("standing", ["fixed"], indirect=True)
def test_a_killed_fork_server_concerns_no_worker_and_the_next_ones_come_from_another(standing: Standing) -> None:
    with standing.job() as running:
        recovery = Recovery(running)
        kill_fork_server(1)(running)
        pod = running.pods[1]
        wait_until(
            lambda: "the fork server ended (signal 9)" in "".join(pod.lines),
            "it is named",
            running.pods,
            DEADLINE_S,
        )
        assert recovery.failures == 0
        kill_worker(1)(running)
        recovery.wait()
        assert recovery.starts == [0, 0, 0]
        assert recovery.failures == 1


@LONG
@pytest.mark.parametrize("standing", ["fixed"], indirect=True)
def test_worker_0_killed_or_worker_1_hanging_costs_seconds_too(standing: Standing) -> None:
    """No node is missed for these, so it makes no difference whether the job may go on with fewer."""
    with standing.job() as running:
        for fault in (kill_worker(0), hang_worker(1)):
            recovery = Recovery(running)
            fault(running)
            recovery.wait()
            assert recovery.starts == [0, 0, 0], [pod.codes for pod in running.pods]
            assert recovery.failures == 1, "only failed workers cost the budget"
        said = ["".join(pod.lines).count("hang: rank 1 has been stopped (SIGSTOP) for") for pod in running.pods]
        assert said == [0, 1, 0], "the node whose worker it is acts, and no other"


@LONG
def test_all_pods_restarted_one_after_another_lose_no_step(standing: Standing) -> None:
    """Each is stopped as soon as the one before it is started again, as a drained node pool does."""
    with standing.job() as running:
        recovery = Recovery(running)
        for node in range(3):
            stop_pod(node)(running)
            wait_until(lambda: recovery.starts[node] == 1, "its restart", running.pods, DEADLINE_S)  # noqa: B023
        recovery.wait()
        assert recovery.starts == [1, 1, 1]


def test_an_elastic_job_goes_on_without_a_node_that_is_lost_for_good(tmp_path: Path) -> None:
    with job(ELASTIC.names, training(tmp_path), ELASTIC.env_of) as running:
        begun(running)
        recovery = Recovery(running)
        lose_pod(1)(running)
        recovery.wait(workers=2)
        completed(running)
        assert recovery.starts == [0, 0, 0]


@LONG
def test_a_pod_that_is_late_joins_an_elastic_job_which_trains_on_while_it_imports(tmp_path: Path) -> None:
    goes = tmp_path / "may-go-on"
    wait = f"while 'IS_SLOW' in os.environ and not os.path.exists({str(goes)!r}):\n    time.sleep(0.05)\n"
    (tmp_path / "slow_import.py").write_text(f"import os, time\n{wait}")
    env_of = lambda node: ELASTIC.env_of(node) | ({"IS_SLOW": "1"} if node == 2 else {})  # noqa: E731
    with job(ELASTIC.names, training(tmp_path), env_of, "--preload", "slow_import", at_first=2) as running:
        begun(running, workers=2)
        late = running.start_next()
        waits = lambda: "the job runs on 2 other nodes until this node can start workers" in "".join(late.lines)  # noqa: E731
        wait_until(waits, "the late pod to be told that it is waited for", running.pods, DEADLINE_S)
        before = steps(tmp_path)[-1]
        went_on = lambda: steps(tmp_path)[-1].number >= before.number + 20  # noqa: E731
        wait_until(went_on, "the others to train on", running.pods, DEADLINE_S)
        assert steps(tmp_path)[-1].start == before.start
        goes.touch()
        begun(running, workers=3)
        completed(running)
        assert [pod.starts for pod in running.pods] == [1, 1, 1]


@LONG
def test_a_pod_above_the_maximum_waits_and_ends_well_with_the_job(tmp_path: Path) -> None:
    env_of = lambda node: ELASTIC.env_of(node) | {"PET_NNODES": "1:2"}  # noqa: E731
    with job(ELASTIC.names, training(tmp_path), env_of) as running:
        begun(running, workers=2)
        are_there = lambda: sorted(node_states(running, 0)) == ["running", "running", "spare"]  # noqa: E731
        wait_until(are_there, "the third", running.pods, DEADLINE_S)
        completed(running)
        assert [pod.codes for pod in running.pods] == [[0], [0], [0]]
        trained = ["this is node" in "".join(pod.lines) for pod in running.pods]
        assert sorted(trained) == [False, True, True]


def test_a_node_that_is_done_starts_again_when_another_still_needs_it(tmp_path: Path) -> None:
    """No barrier at the end, as in many a script: rank 0 leaves, and then rank 1 dies."""
    two = lambda node: FIXED.env_of(node) | {"PET_NNODES": "2"}  # noqa: E731
    with job(FIXED.names[:2], script(tmp_path, LEAVES_EARLY.format(folder=str(tmp_path))), two) as running:
        wait_until(
            lambda: all(pod.succeeded for pod in running.pods), "both pods to succeed", running.pods, DEADLINE_S
        )
        assert [pod.starts for pod in running.pods] == [1, 1]
        assert "".join(running.pods[0].lines).count("rank 0 leaves") == 2


@pytest.mark.long("tests/survival/test_survival.py")
def test_the_budget_is_the_jobs_and_the_pod_at_fault_ends_with_its_workers_code(tmp_path: Path) -> None:
    crash = "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(9)\ntime.sleep(60)\n"
    with job(FIXED.names, script(tmp_path, crash), FIXED.env_of, "--max-restarts", "1") as running:
        ended = lambda: all(pod.codes for pod in running.pods)  # noqa: E731
        wait_until(ended, "all pods to end", running.pods, DEADLINE_S)
        assert [pod.codes[0] for pod in running.pods] == [138, 9, 138]
        innocent, faulty, _ = (pod.last_words[0] for pod in running.pods)
        assert "node 1 (job-node-0-1)" in innocent, "the innocent name the cause"
        assert "rank=1 node=1 host=job-node-0-1" in faulty


RANKED = """
import os, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
while not os.path.exists(os.path.join(os.path.dirname(os.path.abspath(__file__)), "enough")):
    time.sleep(0.05)
"""
RACKS = ("block-b/rack-1", "block-a/rack-10", "block-a/rack-2")


@LONG
def test_ranks_follow_topology_labels_also_after_a_node_was_lost_and_came_back(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKED)

    def env_of(node: int) -> dict[str, str]:
        label = {"TRAINER_LAUNCH_TOPOLOGY_LABEL": "RACK"}
        return trainer_v2(node) | label | {"RACK": RACKS[node]}

    with job(FIXED.names, str(tmp_path / "train.py"), env_of) as running:

        def ranks(generation: int) -> list[str]:
            told = [re.findall(r"\brank (\d) of 3$", "".join(pod.lines), re.MULTILINE) for pod in running.pods]
            return ["".join(ranks[generation : generation + 1]) for ranks in told]

        wait_until(lambda: all(ranks(0)), "all workers of the first generation", running.pods, DEADLINE_S)
        kill_pod(2)(running)
        wait_until(lambda: all(ranks(1)), "all workers of the second generation", running.pods, DEADLINE_S)
        (tmp_path / "enough").touch()
        wait_until(lambda: all(pod.succeeded for pod in running.pods), "its end", running.pods, DEADLINE_S)
        assert [ranks(0), ranks(1)] == [["2", "1", "0"]] * 2
        assert "ranks by topology: node 2 (job-node-0-2) at block-a/rack-2, node 1" in "".join(
            running.pods[0].lines
        )
