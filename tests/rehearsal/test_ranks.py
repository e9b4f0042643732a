"""Which process is a worker: by its rank, and never one that a worker has forked."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from trainer_launch.host import process_tree
from trainer_launch.observability import node_view
from trainer_launch.rehearsal.controllers.local_jobs import torch_job
from trainer_launch.rehearsal.controllers.pod_values import Pod, pods
from trainer_launch.rehearsal.kubelet.pods import MARK
from trainer_launch.rehearsal.pod_watch import PodProcesses, chosen


def test_a_worker_of_torch_is_the_uppermost_with_its_local_rank() -> None:
    processes = {
        1: {"RANK": "0"},  # of the whole pod: PyTorchJob
        2: {"RANK": "4", "LOCAL_RANK": "0"},
        3: {"RANK": "5", "LOCAL_RANK": "1"},
        4: {"RANK": "5", "LOCAL_RANK": "1"},  # a data loader
    }
    parents = {2: 1, 3: 1, 4: 3}
    assert chosen(processes, parents, 0) == 2
    assert chosen(processes, parents, 1) == 3
    assert chosen(processes, parents, 2) is None


def test_a_worker_of_mpi_has_a_local_rank_or_its_place_among_the_pods_ranks() -> None:
    assert chosen({7: {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_RANK": "3"}}, {}, 1) == 7
    hydra = {8: {"PMI_RANK": "3"}, 9: {"PMI_RANK": "2"}, 10: {"PMI_RANK": "2"}}
    assert [chosen(hydra, {10: 9}, local) for local in (0, 1, 2)] == [9, 8, None]


def test_who_has_no_rank_is_no_worker() -> None:
    assert chosen({1: {"RANK": "0", "WORLD_SIZE": "2"}, 2: {}, 3: {"LOCAL_RANK": "x"}}, {}, 0) is None


class IdleKubelet:
    """What is asked of a kubelet; nothing of it runs."""

    network = None

    def termination_message(self, pod: Pod, name: str) -> Path:
        return Path(f"/scratch/{pod.name}/{name}")

    def temporary_folders(self) -> tuple[str, ...]:
        return ()

    def processes_of(self, pod: Pod, name: str) -> list[psutil.Process]:
        return []


def test_a_look_for_one_pods_worker_leaves_the_launchers_of_the_others_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = pods(torch_job(2, "1", ("train.py",), 25.0))
    views = {number: view_of(number) for number in range(len(job))}
    monkeypatch.setattr(node_view, "find", lambda *_: tuple(views.values()))
    marks = {number: f"/scratch/{pod.name}/{pod.draft.main}" for number, pod in enumerate(job)}
    monkeypatch.setattr(process_tree, "environment", lambda pid: {MARK: marks[pid]})
    processes = PodProcesses(IdleKubelet())  # type: ignore[arg-type]
    by_name = {pod.name: pod for pod in job}
    assert [one.pod for one in processes.launchers(by_name)] == list(by_name)
    assert processes.worker(job[0], None, 0) is None
    assert [one.pod for one in processes.launchers(by_name)] == list(by_name)


def view_of(pid: int) -> node_view.View:
    told = {"version": "1", "run_dir": "/run", "host": "h", "contract": "c", "engine": "torch", "phase": "running"}
    return node_view.View(**told, pid=pid, started_ticks=1, node_rank=pid, since_s=0.0, started_s=0.0)  # type: ignore[arg-type]
