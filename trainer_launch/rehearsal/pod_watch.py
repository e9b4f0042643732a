"""Observations of pods: their launchers and workers, steps, generations, and lines that faults wait for.

A process is known by what it has in its environment. Output is heard in the thread that carries it. Files of the
pods' launchers are looked at a few times a second, and only for faults and reports.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import psutil
from msgspec import Struct

from trainer_launch.host import process_tree
from trainer_launch.observability import event_log, node_view, progress
from trainer_launch.observability.progress import OutputScanner
from trainer_launch.rehearsal.controllers.pod_values import Pod
from trainer_launch.rehearsal.history import KEPT, HistoryEntry, What
from trainer_launch.rehearsal.kubelet import MARK, Kubelet

_RANKED = ("torch", "torchrun", "mpi", "horovodrun", "sshd")  # engines all of whose workers have a rank
_LOCAL = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "HOROVOD_LOCAL_RANK")
_GLOBAL = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")  # RANK may be a whole pod's
_LOOK_S = 1.0  # between two looks for launchers that have started
_EVERY_S = 0.25  # between two looks into files


class RunningLauncher(Struct, frozen=True):
    """A launcher in a container."""

    pod: str
    container: str
    view: node_view.View


class PodProcesses:
    """Looks into containers."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet
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
        names = (main, *(each.name for each in (*pod.containers, *pod.init) if each.name != main))
        pids = (_ranked(self._kubelet.processes_of(pod, name), local_rank) for name in names)
        pid = next((pid for pid in pids if pid is not None), None)
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
            place = marks.get((process_tree.environment(view.pid) or {}).get(MARK, ""))
            if place is not None:
                yield RunningLauncher(*place, view)

    def _views(self, pods: Mapping[str, Pod]) -> Iterator[node_view.View]:
        network = self._kubelet.network
        if network is None:
            yield from node_view.find((tempfile.gettempdir(), *self._kubelet.temporary_folders(pods.values())))
            return
        for pod in pods.values():
            for container in (*pod.init, *pod.containers):  # each numbers its processes from 1
                processes = self._kubelet.processes_of(pod, container.name)
                pids = network.numbers_inside(process.pid for process in processes)
                yield from node_view.find(self._kubelet.temporary_folders((pod,)), pids)


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


class PodWatch:
    """Entries with monotonic times, and lines; `scan` runs in the output's thread, all else in ours."""

    def __init__(self) -> None:
        self.patterns: tuple[re.Pattern[str], ...] = ()  # of lines that are wanted now
        self.wake: Callable[[], None] = lambda: None
        self._scanners: dict[tuple[str, int], OutputScanner] = {}
        self._printed: deque[HistoryEntry | str] = deque()
        self._looked_s = 0.0
        self._reports: dict[str, progress.Progress] = {}  # by pod: the last one
        self._steps: dict[str, tuple[float, int]] = {}  # by pod: the last step that counted, and when it came
        self._tails: dict[str, event_log.Tail] = {}  # by runtime directory

    def scan(self, process: str, stream: int, data: bytes) -> None:
        """A block of a container's output."""
        scanner = self._scanners.setdefault((process, stream), OutputScanner())
        scanned = scanner.scan(data, self.patterns)
        if scanned:
            pod, now_s = process.partition("/")[0], time.monotonic()
            self._printed += [
                line.line
                if line.step is None
                else HistoryEntry(at_s=now_s, what=What.STEP, pod=pod, step=line.step, text=line.line)
                for line in scanned
            ]
            self.wake()

    def observations(
        self, processes: PodProcesses, kubelet: Kubelet, pods: Mapping[str, Pod]
    ) -> Iterator[HistoryEntry | str]:
        """New observations, in the order of their arrival."""
        while self._printed:
            observed = self._printed.popleft()
            if isinstance(observed, str) or self._counts(observed):
                yield observed
        now_s = time.monotonic()
        if now_s - self._looked_s < _EVERY_S:
            return
        self._looked_s = now_s
        launchers = processes.launchers(pods)
        for launcher in launchers:
            yield from self._events(launcher.pod, launcher.view.run_dir)
            yield from self._report(launcher.pod, launcher.view.run_dir)
        launched = {launcher.pod for launcher in launchers}
        for pod in pods.values():
            if pod.name not in launched:
                yield from self._report(pod.name, kubelet.runtime_directory_of(pod))

    def _counts(self, printed: HistoryEntry) -> bool:
        """Where a pod reports steps, they go back in reports only: Paddle's launcher prints old lines again."""
        pod, step = printed.pod or "", printed.step or 0
        if pod in self._reports and step < self._steps.get(pod, (0.0, 0))[1]:
            return False
        self._steps[pod] = printed.at_s, step
        return True

    @property
    def due_s(self) -> float:
        """When the next look is."""
        return self._looked_s + _EVERY_S

    def _events(self, pod: str, folder: str) -> Iterator[HistoryEntry]:
        """Entries of a launcher's event log about its workers."""
        for line in self._tails.setdefault(folder, event_log.Tail(folder)).read():
            name, values = line.event
            if name == "generation_formed":
                at_s = time.monotonic() - max(0.0, time.time() - line.time_s)
                text = KEPT if values.get("kept") else ""
                yield HistoryEntry(at_s=at_s, what=What.GENERATION, pod=pod, text=text)

    def _report(self, pod: str, folder: str) -> Iterator[HistoryEntry]:
        """The step that a program has reported, unless its output has shown as many; lines are read later."""
        latest = progress.first([report for report in progress.read(folder) if report.step is not None])
        if latest is None or latest.step is None:
            return
        before, self._reports[pod] = self._reports.get(pod, latest), latest
        shown_s, shown = self._steps.get(pod, (0.0, -1))
        begins = latest.pid != before.pid or latest.step < (before.step or 0)
        if (begins and latest.at_s > before.at_s) or latest.step > shown:
            at_s = latest.at_s if begins else max(latest.at_s, shown_s)
            self._steps[pod] = at_s, latest.step
            yield HistoryEntry(at_s=at_s, what=What.STEP, pod=pod, step=latest.step)
