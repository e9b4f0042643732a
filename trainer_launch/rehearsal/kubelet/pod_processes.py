"""What runs inside the containers of a rehearsal now: their launchers, and the processes that train."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil

from trainer_launch.host import process_tree
from trainer_launch.observability import node_view
from trainer_launch.rehearsal.controllers.pod_values import Pod
from trainer_launch.rehearsal.kubelet.pods import MARK, Stage
from trainer_launch.supervisor.worker_samples import Sources, Workers, ranked

_RANKED = ("torch", "torchrun", "mpi", "horovodrun", "sshd")  # engines all of whose workers have a rank
_LOOK_S = 1.0  # between two looks for launchers that have started


@dataclass(frozen=True, slots=True)
class Inmate:
    """A launcher in a container."""

    pod: str
    container: str
    view: node_view.View


class Inside:
    """Looks into containers by what their processes have in their environment."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._marks: dict[tuple[int, int], str | None] = {}  # by pid and start: whose container it is
        self._found: list[Inmate] = []
        self._looked_s = 0.0

    def launchers(self, pods: Mapping[str, Pod], *, fresh: bool = False) -> list[Inmate]:
        """All launchers that run now, but for those that have begun in the last second."""
        now_s = time.monotonic()
        if fresh or now_s - self._looked_s >= _LOOK_S:
            self._looked_s, self._found = now_s, list(self._look(pods))
        return self._found

    def worker(self, pod: Pod, leader: int | None, local_rank: int) -> psutil.Process | None:
        """The process that trains as this local rank: by its rank, else what its launcher or container runs."""
        pods = {pod.name: pod}
        mine = [one for one in self.launchers(pods, fresh=True) if one.container == pod.draft.main]
        for one in mine:
            sources = Sources(
                pids=lambda view=one.view: dict(view.processes),  # type: ignore[misc]
                heard=lambda *_: 0,
                run_dir=one.view.run_dir,
                place_of=lambda name, view=one.view: ranked(dict(view.processes)[name]),  # type: ignore[misc]
            )
            for worker in Workers(sources).look():
                if worker.local_rank == local_rank:
                    return _process(worker.pid)
        pid = _ranked(self._stage.processes_of(pod, pod.draft.main), local_rank)
        if pid is None and local_rank == 0 and not any(one.view.engine in _RANKED for one in mine):
            pid = next((pid for one in mine for _, pid in one.view.processes), leader)
        return None if pid is None else _process(pid)

    def _look(self, pods: Mapping[str, Pod]) -> Iterator[Inmate]:
        wanted = {
            str(self._stage.last_words(pod, one.name)): (pod.name, one.name)
            for pod in pods.values()
            for one in (*pod.init, *pod.containers)
        }
        for view in node_view.find((tempfile.gettempdir(), *self._stage.temporary_folders())):
            place = wanted.get(self._mark(view.pid, view.started_ticks) or "")
            if place is not None:
                yield Inmate(*place, view)

    def _mark(self, pid: int, started: int) -> str | None:
        if (pid, started) not in self._marks:
            environment = process_tree.environment(pid)
            self._marks[pid, started] = None if environment is None else environment.get(MARK)
        return self._marks[pid, started]


def _ranked(processes: Sequence[psutil.Process], local_rank: int) -> int | None:
    environments = {one.pid: env for one in processes if (env := process_tree.environment(one.pid)) is not None}
    parents = {}
    for one in processes:
        with contextlib.suppress(psutil.Error):
            parents[one.pid] = one.ppid()
    return chosen(environments, parents, local_rank)


def below(process: psutil.Process) -> list[psutil.Process]:
    """A process and all that it has started."""
    with contextlib.suppress(psutil.Error):
        return [process, *process.children(recursive=True)]
    return []


def send(processes: Sequence[psutil.Process], number: int) -> None:
    """Signal all of them that are still there."""
    for one in processes:
        with contextlib.suppress(psutil.Error):
            one.send_signal(number)


def _process(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid)
    return None


# -- ranks -------------------------------------------------------------------------------------


_LOCAL = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "HOROVOD_LOCAL_RANK")
_GLOBAL = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")  # RANK may be a whole pod's

Env = Mapping[str, str]


def chosen(processes: Mapping[int, Env], parents: Mapping[int, int], local_rank: int) -> int | None:
    """The pid of the worker with this local rank; what it has forked has its variables too, and is not it."""
    local = {pid: _first(env, _LOCAL) for pid, env in processes.items()}
    if any(rank is not None for rank in local.values()):
        mine = [pid for pid, rank in local.items() if rank == local_rank]
        return next((pid for pid in mine if parents.get(pid, 0) not in mine), None)
    ranks = {pid: rank for pid, env in processes.items() if (rank := _first(env, _GLOBAL)) is not None}
    by_rank = sorted((rank, pid) for pid, rank in ranks.items() if ranks.get(parents.get(pid, 0)) != rank)
    return by_rank[local_rank][1] if local_rank < len(by_rank) else None


def _first(env: Env, names: tuple[str, ...]) -> int | None:
    found = (env[name] for name in names if env.get(name, "").isdecimal())
    text = next(found, None)
    return None if text is None or len(text) > 9 else int(text)
