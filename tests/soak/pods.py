"""The pods of a soak, and the faults that are done to them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.cli.launching import LAUNCHER
from tests.pods import Job, Pod, pods_of, wait_until
from tests.soak.faults import CHECKPOINT_STEPS, KILLED, NODES, Fault, Trouble
from tests.survival import jobs
from tests.survival.jobs import kill_fork_server, kill_store

HANG_S = 8.0
METRICS_PORT = 9400
_DEADLINE_S = 120.0
_OPTIONS = ("--prefix", "--grace", "5", "--max-restarts", "100000", "--hang-timeout", f"{HANG_S:g}")


_FIXED = partial(jobs.trainer_v2, nodes=NODES)
_ELASTIC = partial(jobs.pytorchjob_elastic, nodes=f"1:{NODES}")
CONTRACTS: dict[str, tuple[str, Callable[[int], dict[str, str]]]] = {
    "fixed": ("job-node-0-{}", _FIXED),
    "elastic": ("job-worker-{}", _ELASTIC),
    "keeping": ("job-node-0-{}", jobs.keeping(_FIXED)),
    "keeping-elastic": ("job-worker-{}", jobs.keeping(_ELASTIC)),
}


T = TypeVar("T")


class Pods:
    """A job's pods and what of each is kept in the folder: incidents-N, events-N."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.left: list[str] = []  # what pods that ended by themselves have left in their TMPDIR, a sentence each
        self._moves: set[int] = set()
        for node, pod in enumerate(job.pods):
            pod.before_restart = partial(self._before_restart, node)

    @property
    def pods(self) -> list[Pod]:
        return self.job.pods

    def inflict(self, trouble: Trouble) -> None:
        """Do it all; returns when what lasts is over, and pods that end have ended."""
        with ThreadPoolExecutor() as threads:
            done = []
            for number, fault in enumerate(trouble.faults):
                time.sleep(trouble.delay_s if number else 0.0)
                done.append(threads.submit(self._do, fault))
            for one in done:
                one.result()

    # -- faults -------------------------------------------------------------------------------

    def _do(self, fault: Fault) -> None:
        getattr(self, "_" + fault.kind.replace(" ", "_"))(fault)

    def _kill_worker(self, fault: Fault) -> None:
        for node in fault.nodes:
            self._worker(node).kill()

    def _kill_all_workers(self, fault: Fault) -> None:
        workers = [self._worker(node) for node in fault.nodes]
        for worker in workers:
            worker.kill()

    def _kill_worker_while_starting(self, fault: Fault) -> None:
        first, second = fault.nodes
        old = self._worker(second)
        self._worker(first).kill()
        new = self._wait(lambda: [one for one in self.pods[second].workers() if one != old], "the next worker")
        new[0].kill()

    def _hang_worker(self, fault: Fault) -> None:
        self._worker(fault.nodes[0]).suspend()

    def _pause_worker(self, fault: Fault) -> None:
        worker = self._worker(fault.nodes[0])
        worker.suspend()
        time.sleep(fault.seconds)
        worker.resume()

    def _kill_store(self, _fault: Fault) -> None:
        kill_store()(self.job)

    def _kill_fork_server(self, fault: Fault) -> None:
        with contextlib.suppress(psutil.Error, IndexError):
            kill_fork_server(fault.nodes[0])(self.job)

    def _kill_pod(self, fault: Fault) -> None:
        self._end(fault, signal.SIGKILL)

    def _move_pod(self, fault: Fault) -> None:
        self._moves |= set(fault.nodes)
        self._end(fault, signal.SIGKILL)

    def _term_pod(self, fault: Fault) -> None:
        self._end(fault, signal.SIGTERM)

    def _roll(self, fault: Fault) -> None:
        for node in fault.nodes:
            self._end(Fault(fault.kind, (node,), fault.seconds), signal.SIGTERM)

    def _end(self, fault: Fault, number: signal.Signals) -> None:
        """Signal the pods, and wait until they are started again."""
        before = {node: self.pods[node].starts for node in fault.nodes}
        for node in fault.nodes:
            self.pods[node].restart_s = fault.seconds
            self._launcher(node).send_signal(number)
        is_back = lambda: all(self.pods[node].starts > count for node, count in before.items())  # noqa: E731
        self._wait(is_back, f"the end and the restart of pods {fault.nodes}")

    def _partition(self, fault: Fault) -> None:
        for node in fault.nodes:
            self.job.hosts[node].unplug()
        time.sleep(fault.seconds)
        for node in fault.nodes:
            self.job.hosts[node].plug()

    # -- who and where ------------------------------------------------------------------------

    def shm(self, node: int) -> list[str]:
        """The files in the pod's /dev/shm."""
        words = (*self.job.hosts[node].enter("mnt"), "ls", "-A", "/dev/shm")
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()

    def tmp(self, node: int) -> Path:
        """What the pod has as TMPDIR."""
        return self.job.hosts[node].tmp

    def processes(self, node: int) -> list[psutil.Process]:
        """All that is alive in a pod now, process 1 first; none while it is away."""
        with contextlib.suppress(psutil.Error, IndexError):
            launcher = self.pods[node].launcher()
            return [launcher, *launcher.children(recursive=True)]
        return []

    def _launcher(self, node: int) -> psutil.Process:
        """Once it can be asked to stop: a process 1 without handlers ignores signals."""

        def listens() -> psutil.Process | None:
            with contextlib.suppress(psutil.Error, IndexError, OSError):
                launcher = self.pods[node].launcher()
                text = Path(f"/proc/{launcher.pid}/status").read_text()
                caught = next(int(line.split()[1], 16) for line in text.splitlines() if line.startswith("SigCgt:"))
                return launcher if caught >> (signal.SIGTERM - 1) & 1 else None
            return None

        launcher: psutil.Process = self._wait(listens, f"the launcher of pod {node}")
        return launcher

    def _worker(self, node: int) -> psutil.Process:
        workers: list[psutil.Process] = self._wait(self.pods[node].workers, f"the worker of pod {node}")
        return workers[0]

    def _wait(self, ask: Callable[[], T], what: str) -> Any:
        found: list[T] = []

        def condition() -> bool:
            found[:] = [ask()]
            return bool(found[0])

        wait_until(condition, what, self.pods, _DEADLINE_S, pace_s=0.05)
        return found[0]

    def _before_restart(self, node: int) -> None:
        left = sorted(path.name for path in self.tmp(node).iterdir())
        code = self.pods[node].codes[-1]
        if left and code != KILLED:
            self.left.append(f"pod {node} ended with {code} and left {left[:5]} in TMPDIR")
        if node in self._moves:
            self._moves.discard(node)
            self.job.hosts[node].move()


@contextlib.contextmanager
def pods(contract: str, folder: Path, token: str) -> Iterator[Pods]:
    """Start a job; all of it is gone afterwards but what it has written to the folder."""
    pattern, env_of = CONTRACTS[contract]
    script = jobs.training(folder)
    for node in range(NODES):
        (folder / f"incidents-{node}").mkdir()

    def env(node: int) -> dict[str, str]:
        own = {
            "TRAINER_LAUNCH_INCIDENT_DIR": str(folder / f"incidents-{node}"),
            "TRAINER_LAUNCH_EVENTS": str(folder / f"events-{node}.jsonl"),
            "TRAINER_LAUNCH_METRICS_PORT": str(METRICS_PORT),
            "TRAINER_LAUNCH_SHM_SIZE": "keep",
            "OMP_NUM_THREADS": "1",
            "LEAVES_THINGS_BEHIND": "1",
            "CHECKPOINT_STEPS": str(CHECKPOINT_STEPS),
            "TOKEN": token,
            "PYTHONPATH": os.getcwd(),
        }
        return env_of(node) | own

    names = [pattern.format(node) for node in range(NODES)]
    with pods_of(names, (*LAUNCHER, "run", *_OPTIONS, "--", script), env, folder) as job:
        yield Pods(job)
