"""What happens to one pod costs the job seconds, and the others nothing: three hosts, a kubelet, real faults."""

from __future__ import annotations

import importlib.util
import itertools
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.cli.launching import script
from tests.conftest import require
from tests.hosts.network import SUBNET
from tests.survival.kubelet import Job, Pod, job, step_of, wait_until

pytestmark = [pytest.mark.torch, pytest.mark.process, pytest.mark.timeout(180)]

TRAIN = """
import os, sys, time, torch, torch.distributed as dist
folder = {folder!r}
path = os.path.join(folder, "checkpoint")
dist.init_process_group("gloo")
rank = dist.get_rank()
step = torch.tensor([int(open(path).read()) if rank == 0 and os.path.exists(path) else 0])
dist.broadcast(step, 0)
start = int(step)
for number in range(start + 1, {steps} + 1):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == dist.get_world_size()
    if rank == 0:
        with open(path + ".new", "w") as file:
            file.write(str(number))
        os.replace(path + ".new", path)
        with open(os.path.join(folder, "steps"), "a") as file:
            file.write(f"{{time.monotonic()}} {{number}}\\n")
    time.sleep(0.05)
dist.barrier()
os._exit(0)  # torch 2.13's gloo may abort while Python shuts down; not what is tested here
"""
STEPS = 120
FIXED = ("job-node-0-0", "job-node-0-1", "job-node-0-2")
ELASTIC = ("job-worker-0", "job-worker-1", "job-worker-2")
Fault = Callable[[Job], None]


def trainer_v2(node: int) -> dict[str, str]:
    return {
        "PET_NNODES": "3",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": "job-node-0-0",
        "PET_MASTER_PORT": "29500",
        "JOB_COMPLETION_INDEX": str(node),
    }


def elastic(_node: int) -> dict[str, str]:
    return {
        "PET_RDZV_ENDPOINT": "job-worker-0:23456",
        "PET_RDZV_BACKEND": "c10d",
        "PET_NNODES": "1:3",
        "PET_NPROC_PER_NODE": "1",
        "PET_MAX_RESTARTS": "3",
        "PYTHONUNBUFFERED": "1",
    }


def kill_worker(node: int) -> Fault:
    return lambda job: job.pods[node].workers()[0].kill()


def kill_pod(node: int) -> Fault:
    return lambda job: job.pods[node].launcher().kill()


def stop_pod(node: int) -> Fault:
    return lambda job: job.pods[node].launcher().send_signal(signal.SIGTERM)


def move_pod(node: int) -> Fault:
    def fault(job: Job) -> None:
        job.pods[node].before_restart = lambda: job.move(node, f"{SUBNET}.{100 + node}")
        job.pods[node].launcher().kill()

    return fault


def kill_agent(node: int) -> Fault:
    def fault(job: Job) -> None:
        next(p for p in job.pods[node].launcher().children() if "torch_agent" in " ".join(p.cmdline())).kill()

    return fault


@pytest.fixture(autouse=True)
def need_torch() -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")


@pytest.fixture
def train(tmp_path: Path) -> str:
    return script(tmp_path, TRAIN.format(folder=str(tmp_path), steps=STEPS))


def begun(job: Job, folder: Path) -> None:
    wait_until(lambda: step_of(folder) >= 20, "20 steps", job.pods, 60)


def completed(job: Job, folder: Path, pods: Sequence[Pod]) -> None:
    wait_until(lambda: all(pod.succeeded for pod in pods), "the job to complete", job.pods, 90)
    assert step_of(folder) == STEPS


def recovered_s(folder: Path, at_s: float) -> float:
    """From the fault to the first step after the longest pause since then."""
    times = [float(line.split()[0]) for line in (folder / "steps").read_text().splitlines()]
    pauses = [(later - earlier, later) for earlier, later in itertools.pairwise(times) if later > at_s]
    return max(pauses)[1] - at_s


@pytest.mark.parametrize("contract", ["fixed", "elastic"])
@pytest.mark.parametrize(
    ("fault", "starts"),
    [
        pytest.param(kill_worker(1), [1, 1, 1], id="worker-of-node-1-killed"),
        pytest.param(kill_worker(0), [1, 1, 1], id="worker-of-node-0-killed"),
        pytest.param(kill_pod(1), [1, 2, 1], id="pod-1-killed"),
        pytest.param(kill_pod(0), [2, 1, 1], id="pod-0-killed"),
        pytest.param(kill_agent(1), [1, 1, 1], id="agent-of-node-1-killed"),
        pytest.param(kill_agent(0), [1, 1, 1], id="agent-of-node-0-killed"),
        pytest.param(stop_pod(1), [1, 2, 1], id="pod-1-asked-to-stop"),
        pytest.param(stop_pod(0), [2, 1, 1], id="pod-0-asked-to-stop"),
        pytest.param(move_pod(1), [1, 2, 1], id="pod-1-comes-back-with-a-new-address"),
        pytest.param(move_pod(0), [2, 1, 1], id="pod-0-comes-back-with-a-new-address"),
    ],
)
def test_a_fault_costs_seconds_and_no_other_pod(contract, fault, starts, train: str, tmp_path: Path) -> None:
    names, env_of = (FIXED, trainer_v2) if contract == "fixed" else (ELASTIC, elastic)
    with job(names, train, env_of) as running:
        begun(running, tmp_path)
        before, at_s = step_of(tmp_path), time.monotonic()
        fault(running)
        completed(running, tmp_path, running.pods)
        assert [pod.starts for pod in running.pods] == starts, [pod.codes for pod in running.pods]
    steps = [int(line.split()[1]) for line in (tmp_path / "steps").read_text().splitlines()]
    assert min(steps[before:]) >= before, "no step before the last checkpoint was done again"
    print(f"{contract}: recovered {recovered_s(tmp_path, at_s):.1f} s after the fault")


def test_an_elastic_job_goes_on_without_a_node_that_is_lost_for_good(train: str, tmp_path: Path) -> None:
    with job(ELASTIC, train, elastic) as running:
        begun(running, tmp_path)
        zero, lost, two = running.pods
        lost.end()
        completed(running, tmp_path, (zero, two))
        assert (zero.starts, two.starts) == (1, 1)


def test_a_pod_that_is_late_joins_an_elastic_job(train: str, tmp_path: Path) -> None:
    with job(ELASTIC, train, elastic, at_first=2) as running:
        begun(running, tmp_path)
        late = running.start_next()
        wait_until(
            lambda: any("is node 2 of 3" in line for line in late.lines), "the third to join", running.pods, 60
        )
        completed(running, tmp_path, running.pods)
        assert [pod.starts for pod in running.pods] == [1, 1, 1]


def test_a_node_that_is_done_starts_again_when_another_still_needs_it(tmp_path: Path) -> None:
    """No barrier at the end, as in many a script: rank 0 leaves, and then rank 1 dies."""
    early = """
import os, sys, time
path = os.path.join(%r, "died")
rank = int(os.environ["RANK"])
if rank == 1 and not os.path.exists(path):
    open(path, "x").close()
    time.sleep(2)
    os.kill(os.getpid(), 9)
print("rank", rank, "leaves", flush=True)
"""
    two = lambda node: trainer_v2(node) | {"PET_NNODES": "2"}  # noqa: E731
    with job(FIXED[:2], script(tmp_path, early % str(tmp_path)), two) as running:
        wait_until(lambda: all(pod.succeeded for pod in running.pods), "both pods to succeed", running.pods, 60)
        assert [pod.starts for pod in running.pods] == [1, 1]
        assert "".join(running.pods[0].lines).count("rank 0 leaves") == 2


def test_the_budget_is_the_jobs_and_the_guilty_pod_ends_with_its_workers_code(tmp_path: Path) -> None:
    crash = "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(9)\ntime.sleep(60)\n"
    with job(FIXED, script(tmp_path, crash), trainer_v2, "--max-restarts", "1") as running:
        ended = lambda: all(pod.codes for pod in running.pods)  # noqa: E731
        wait_until(ended, "all pods to end", running.pods, 60)
        assert [pod.codes[0] for pod in running.pods] == [138, 9, 138]
        words = "".join(running.pods[0].lines)
        assert "node 1 (job-node-0-1)" in words, "the innocent name the guilty"
