"""Which process is a worker: by its rank, and never one that a worker has forked."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rehearsal.controllers.manifests import job_of
from tests.waiting import eventually
from trainer_launch.host import process_tree
from trainer_launch.rehearsal.kubelet import MARK, Kubelet, Setting
from trainer_launch.rehearsal.pod_watch import chosen


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


# -- whose a process is ------------------------------------------------------------------------


@contextlib.contextmanager
def running(*argv: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with just these variables."""
    with subprocess.Popen(
        argv, env={"PATH": "/usr/bin:/bin", **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.process
def test_the_end_of_a_second_container_is_not_that_of_what_came_into_the_pod_by_ssh(tmp_path: Path) -> None:
    containers = "containers: [{name: main, command: ['true']}, {name: logs, command: ['true']}]"
    pod_spec = f"{{template: {{spec: {{restartPolicy: OnFailure, {containers}}}}}}}"
    job = job_of(f"apiVersion: batch/v1\nkind: Job\nmetadata: {{name: j}}\nspec: {pod_spec}\n")
    kubelet = Kubelet(job, tmp_path, Setting(launchers={}, path="/bin"))
    (pod,) = kubelet.pods
    mark = {MARK: str(kubelet.termination_message(pod, "logs"))}

    def owner(pid: int) -> list[str]:
        return [name for name in ("main", "logs") if pid in [each.pid for each in kubelet.processes_of(pod, name)]]

    inner = "env -i HOSTNAME=j sleep 60 & echo $!; wait"
    with running("sleep", "60", HOSTNAME="j") as rank, running("sh", "-c", inner, HOSTNAME="j", **mark) as shell:
        assert shell.stdout is not None
        below = int(shell.stdout.readline())
        eventually(lambda: process_tree.environment(below) == {"HOSTNAME": "j"}, "the inner program runs")
        assert owner(rank.pid) == ["main"], "a rank: sshd gives it the pod's name and nothing else"
        assert (owner(shell.pid), owner(below)) == (["logs"], ["logs"])
        os.kill(below, signal.SIGKILL)
    with running("sleep", "60", HOSTNAME="another") as other:
        assert owner(other.pid) == []
