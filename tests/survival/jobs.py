"""The driver of all jobs of `train.py`, in tests, soaks and benchmarks: contracts, faults, what the steps tell."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import LAUNCHER, clean_env
from tests.conftest import require
from tests.pods import RESTART_S, Job, job, missing, of_the_fork_server, wait_until
from trainer_launch.membership.timeouts import UNSEEN_S

Fault = Callable[[Job], None]
DEADLINE_S = 120.0
_FAILURES = re.compile(r"generation .*, (\d+) restarts? so far; this is node")
_STEADY = 5  # steps after which a job is running, and not just starting

# Without a barrier at the end, as in many a script: rank 0 leaves, and when it has ended, rank 1 dies, once.
LEAVES_EARLY = """
import fcntl, os, time
path = os.path.join({folder!r}, "died")
left = os.path.join({folder!r}, "left")
rank = int(os.environ["RANK"])
if rank == 1 and not os.path.exists(path):
    open(path, "x").close()
    while not os.path.exists(left):
        time.sleep(0.05)
    fcntl.flock(open(left), fcntl.LOCK_EX)  # its process has it to the end
    time.sleep(0.5)  # torchrun looks at its workers each 0.1 s
    os.kill(os.getpid(), 9)
print("rank %s leaves\\n" % rank, end="", flush=True)
held = open(left + str(rank), "a")
fcntl.flock(held, fcntl.LOCK_EX)
os.rename(held.name, left)
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One line of what `train.py` writes."""

    at_s: float
    number: int
    workers: int
    start: str  # differs for each start of the workers


@dataclass(frozen=True)
class Contract:
    """A way of telling pods who they are."""

    names: tuple[str, str, str]
    env_of: Callable[[int], dict[str, str]]


def trainer_v2(node: int, nodes: int = 3, workers: int = 1) -> dict[str, str]:
    return {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(workers),
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": "job-node-0-0",
        "PET_MASTER_PORT": "29500",
        "JOB_COMPLETION_INDEX": str(node),
    }


def pytorchjob_elastic(_node: int, nodes: str = "1:3", workers: int = 1) -> dict[str, str]:
    return {
        "PET_RDZV_ENDPOINT": "job-worker-0:23456",
        "PET_RDZV_BACKEND": "c10d",
        "PET_NNODES": nodes,
        "PET_NPROC_PER_NODE": str(workers),
        "PET_MAX_RESTARTS": "3",
        "PYTHONUNBUFFERED": "1",
    }


FIXED = Contract(("job-node-0-0", "job-node-0-1", "job-node-0-2"), trainer_v2)
ELASTIC = Contract(("job-worker-0", "job-worker-1", "job-worker-2"), pytorchjob_elastic)


def saving(env_of: Callable[[int], dict[str, str]]) -> Callable[[int], dict[str, str]]:
    """The same variables, for a script that saves on SIGTERM and exits with 0."""
    return lambda node: env_of(node) | {"SAVES_ON_SIGTERM": "1"}


def keeping(env_of: Callable[[int], dict[str, str]]) -> Callable[[int], dict[str, str]]:
    """The same variables, for a script whose ranks keep their state, which is in no checkpoint."""
    return lambda node: env_of(node) | {"KEEPS_STATE": "1", "CHECKPOINT_STEPS": "1000000"}


CONTRACTS = {
    "fixed": FIXED,
    "elastic": ELASTIC,
    "saving": Contract(FIXED.names, saving(FIXED.env_of)),
    "saving-elastic": Contract(ELASTIC.names, saving(ELASTIC.env_of)),
    "keeping": Contract(FIXED.names, keeping(FIXED.env_of)),
}
MARKS = [pytest.mark.torch, pytest.mark.process, pytest.mark.timeout(300)]
LONG = pytest.mark.long("tests/survival/test_survival.py")


def need_hosts() -> None:
    """Skip what a loopback does not have: names, other addresses, links that fail."""
    require(missing() is None, str(missing()))


# -- faults ---------------------------------------------------------------------------------------


def kill_worker(node: int) -> Fault:
    return lambda job: job.pods[node].workers()[0].kill()


def hang_worker(node: int) -> Fault:
    return lambda job: job.pods[node].workers()[0].suspend()


def kill_store() -> Fault:
    """The store process of the present generation."""
    return lambda job: of_the_fork_server(job.pods[0].launcher(), is_store=True).kill()


def kill_fork_server(node: int) -> Fault:
    return lambda job: of_the_fork_server(job.pods[node].launcher(), is_store=False).kill()


def kill_pod(node: int) -> Fault:
    return lambda job: job.pods[node].kill()


def stop_pod(node: int) -> Fault:
    return lambda job: job.pods[node].stop()


def move_pod(node: int) -> Fault:
    """It comes back with another address."""

    def fault(job: Job) -> None:
        pod = job.pods[node]

        def move() -> None:
            pod.before_restart = lambda: None
            job.hosts[node].move()

        pod.before_restart = move
        pod.kill()

    return fault


def lose_pod(node: int) -> Fault:
    return lambda job: job.pods[node].end()


def unplug(node: int) -> Fault:
    return lambda job: job.hosts[node].unplug()


def plug(node: int) -> Fault:
    return lambda job: job.hosts[node].plug()


def start_late(job: Job) -> None:
    job.start_next()


def status_in(job: Job, node: int) -> dict[str, Any]:
    """What `trainer-launch status --json` says in a pod; empty while no launcher runs there."""
    pod = job.pods[node]
    inside = ("nsenter", "-t", str(pod.launcher().pid), "--net", "--pid", "--mount", "--uts", "--ipc")
    words = (*(inside if pod.host.network else ()), *LAUNCHER, "status", "--json")
    env = clean_env({"TMPDIR": str(pod.host.tmp), "PYTHONPATH": os.getcwd()})
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    status: dict[str, Any] = json.loads(done.stdout or "{}")
    return status


def node_states(job: Job, node: int) -> list[str]:
    """The states of the job's nodes, by rank, as `status` prints them in a pod; none while it cannot tell."""
    table = status_in(job, node).get("job")
    return [row[2] for row in table["nodes"]] if table else []


# -- what the steps tell --------------------------------------------------------------------------


def training(folder: Path) -> str:
    """Copy the training script into a job's folder; its path."""
    return str(shutil.copy(Path(__file__).with_name("train.py"), folder))


def steps(folder: Path) -> list[Step]:
    """All steps so far; a last line that is being written is left out."""
    path = folder / "steps"
    return parse(path.read_text().rpartition("\n")[0]) if path.exists() else []


def parse(text: str) -> list[Step]:
    """Whole lines of the file of steps."""
    words = [line.split() for line in text.split("\n") if line]
    return [Step(float(at_s), int(number), int(workers), start) for at_s, number, workers, start in words]


def is_steady(folder: Path, workers: int, but: Sequence[str] = ()) -> bool:
    """Whether so many workers train together now, in none of the starts in `but`."""
    last = steps(folder)[-_STEADY:]
    return len(last) == _STEADY and all(
        step.workers == workers and step.start == last[0].start and step.start not in but for step in last
    )


def lost_or_done_twice(folder: Path) -> list[tuple[int, int]]:
    """Neighbouring steps between which the checkpoint did not hold; the line of one step may be lost."""
    numbers = [step.number for step in steps(folder)]
    return [(a, b) for a, b in itertools.pairwise(numbers) if not a < b <= a + 2]


# -- jobs -----------------------------------------------------------------------------------------


def begun(job: Job, workers: int = 3) -> None:
    within_s = DEADLINE_S + UNSEEN_S  # a job that begins with fewer looks for the others first
    wait_until(lambda: is_steady(job.folder, workers), f"{workers} workers to train", job.pods, within_s)


def completed(job: Job) -> None:
    """Let the job end, and see it end well everywhere."""
    (job.folder / "enough").touch()
    left = [pod for pod in job.pods if not pod.is_gone]
    wait_until(lambda: all(pod.succeeded for pod in left), "the job to complete", job.pods, DEADLINE_S)
    assert lost_or_done_twice(job.folder) == []
    assert all(pod.last_words[-1].startswith("reason=Succeeded") for pod in left), [p.last_words for p in left]


class Recovery:
    """What a fault did to a job: `starts` of each pod and `failures` that its budget counts, since then."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._before = [pod.starts for pod in job.pods]
        self._failures_before = _failures(job)
        self._known = {step.start for step in steps(job.folder)}

    @property
    def starts(self) -> list[int]:
        return [pod.starts - before for pod, before in zip(self._job.pods, self._before, strict=True)]

    @property
    def failures(self) -> int:
        return _failures(self._job) - self._failures_before

    def wait(self, workers: int = 3) -> None:
        """Until so many workers, started anew, train together again."""
        is_back = lambda: is_steady(self._job.folder, workers, tuple(self._known))  # noqa: E731
        wait_until(is_back, f"{workers} workers to train again", self._job.pods, DEADLINE_S)


def restarts_only_its_own_pod(running: Job, name: str, fault: Fault, starts: list[int]) -> Recovery:
    """See a fault, by its name, restart so many pods and no other."""
    recovery = Recovery(running)
    fault(running)
    recovery.wait()
    assert recovery.starts == starts, [pod.codes for pod in running.pods]
    if "asked-to-stop" in name:
        pod = running.pods[starts.index(1)]
        assert pod.codes[-1] == 143
        assert pod.last_words[-1].startswith("reason=Stopped ")
        assert re.search(r" exit=143 attempt=\d+ retryable=true ", pod.last_words[-1])
    return recovery


def _failures(job: Job) -> int:
    """As the pods were told when they last met."""
    lines = [line for pod in job.pods for line in pod.lines]
    return max((int(found[1]) for found in map(_FAILURES.search, lines) if found), default=0)


class Standing:
    """One job that many faults happen to, one after another; the next after a failed test gets a new one."""

    def __init__(self, contract: Contract, folder: Callable[[], Path], *options: str, restart_s: float = RESTART_S):
        self._contract, self._folder, self._options, self._restart_s = contract, folder, options, restart_s
        self._open = contextlib.ExitStack()
        self._job: Job | None = None

    @contextlib.contextmanager
    def job(self) -> Iterator[Job]:
        """The job, training; whatever raises here ends it."""
        try:
            if self._job is None:
                script, contract = training(self._folder()), self._contract
                made = job(contract.names, script, contract.env_of, *self._options, restart_s=self._restart_s)
                self._job = self._open.enter_context(made)
                begun(self._job)
            yield self._job
        except BaseException:
            self._job = None
            self._open.close()
            raise

    def end(self) -> None:
        """After the last fault it completes."""
        with self._open:
            if self._job is not None:
                completed(self._job)
