"""The launchers and workers in a rehearsal's containers, by what their processes have in their environment."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

import psutil
from msgspec import Struct

from trainer_launch.host import process_tree
from trainer_launch.observability import node_view
from trainer_launch.rehearsal.controllers.pod_values import Pod
from trainer_launch.rehearsal.kubelet.pods import MARK, Kubelet

_RANKED = ("torch", "torchrun", "mpi", "horovodrun", "sshd")  # engines all of whose workers have a rank
_LOCAL = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "HOROVOD_LOCAL_RANK")
_GLOBAL = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")  # RANK may be a whole pod's
_LOOK_S = 1.0  # between two looks for launchers that have started


class RunningLauncher(Struct, frozen=True):
    """A launcher in a container."""

    pod: str
    container: str
    view: node_view.View


class PodProcesses:
    """Looks into containers."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet
        self._marks: dict[tuple[int, int], str | None] = {}  # by pid and start: whose container it is
        self._launchers: list[RunningLauncher] = []
        self._looked_s = 0.0

    def launchers(self, pods: Mapping[str, Pod]) -> list[RunningLauncher]:
        """All launchers that run now, but for those that have begun in the last second."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s, self._launchers = now_s, list(self._look(pods))
        return self._launchers

    def worker(self, pod: Pod, leader: int | None, local_rank: int) -> psutil.Process | None:
        """The process that trains as this local rank: by its rank, else what its launcher or container runs."""
        main = pod.draft.main
        pid = _ranked(self._kubelet.processes_of(pod, main), local_rank)
        if pid is None and local_rank == 0:
            views = [launcher.view for launcher in self._look({pod.name: pod}) if launcher.container == main]
            if not any(view.engine in _RANKED for view in views):
                pid = next((pid for view in views for _, pid in view.processes), leader)
        with contextlib.suppress(psutil.Error):
            return None if pid is None else psutil.Process(pid)
        return None

    def _look(self, pods: Mapping[str, Pod]) -> Iterator[RunningLauncher]:
        marks = {
            str(self._kubelet.termination_message(pod, container.name)): (pod.name, container.name)
            for pod in pods.values()
            for container in (*pod.init, *pod.containers)
        }
        for view in self._views(pods):
            place = marks.get(self._mark(view.pid, view.started_ticks) or "")
            if place is not None:
                yield RunningLauncher(*place, view)

    def _views(self, pods: Mapping[str, Pod]) -> Iterator[node_view.View]:
        network = self._kubelet.network
        if network is None:
            yield from node_view.find((tempfile.gettempdir(), *self._kubelet.temporary_folders()))
            return
        for pod in pods.values():
            for container in (*pod.init, *pod.containers):  # each numbers its processes from 1
                processes = self._kubelet.processes_of(pod, container.name)
                pids = network.numbers_inside(process.pid for process in processes)
                yield from node_view.find(self._kubelet.temporary_folders((pod,)), pids)

    def _mark(self, pid: int, started: int) -> str | None:
        if (pid, started) not in self._marks:
            environment = process_tree.environment(pid)
            self._marks[pid, started] = None if environment is None else environment.get(MARK)
        return self._marks[pid, started]


def _ranked(processes: Sequence[psutil.Process], local_rank: int) -> int | None:
    environments, parents = {}, {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            parents[process.pid] = process.ppid()
            environments[process.pid] = process_tree.environment(process.pid) or {}
    return chosen(environments, parents, local_rank)


def chosen(
    environments: Mapping[int, Mapping[str, str]], parents: Mapping[int, int], local_rank: int
) -> int | None:
    """The pid of the worker with this local rank; what it has forked has its variables too, and is not it."""
    local = {pid: _rank(env, _LOCAL) for pid, env in environments.items()}
    if any(rank is not None for rank in local.values()):
        mine = [pid for pid, rank in local.items() if rank == local_rank]
        return next((pid for pid in mine if parents.get(pid, 0) not in mine), None)
    ranks = {pid: rank for pid, env in environments.items() if (rank := _rank(env, _GLOBAL)) is not None}
    by_rank = sorted((rank, pid) for pid, rank in ranks.items() if ranks.get(parents.get(pid, 0)) != rank)
    return by_rank[local_rank][1] if local_rank < len(by_rank) else None


def _rank(env: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    text = next((env[name] for name in names if env.get(name, "").isdecimal()), "")
    return int(text) if text and len(text) < 10 else None
