"""What the driver sees of its pods: steps, lines somebody waits for, generations, launchers and workers inside.

Output is heard in the thread that carries it; files of the pods' launchers are looked at a few times a second, and
only when somebody wants to know.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import psutil
from msgspec import Struct

from trainer_launch.host import process_tree
from trainer_launch.model.goodput import Kind
from trainer_launch.observability import event_log, node_view, progress
from trainer_launch.observability.progress import Progress
from trainer_launch.rehearsal.controllers.pod_values import Pod
from trainer_launch.rehearsal.kubelet.pods import MARK, Kubelet
from trainer_launch.rehearsal.report.history import Entry, What
from trainer_launch.supervisor.step_lines import OutputScanner

# -- launchers and workers inside containers ---------------------------------------------------


_RANKED = ("torch", "torchrun", "mpi", "horovodrun", "sshd")  # engines all of whose workers have a rank
_LOOK_S = 1.0  # between two looks for launchers that have started


class Launcher(Struct, frozen=True):
    """A launcher in a container."""

    pod: str
    container: str
    view: node_view.View


class PodProcesses:
    """Looks into containers by what their processes have in their environment."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet
        self._marks: dict[tuple[int, int], str | None] = {}  # by pid and start: whose container it is
        self._found: list[Launcher] = []
        self._looked_s = 0.0

    def launchers(self, pods: Mapping[str, Pod]) -> list[Launcher]:
        """All launchers that run now, but for those that have begun in the last second."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s, self._found = now_s, list(self._look(pods))
        return self._found

    def worker(self, pod: Pod, leader: int | None, local_rank: int) -> psutil.Process | None:
        """The process that trains as this local rank: by its rank, else what its launcher or container runs."""
        pid = _ranked(self._kubelet.processes_of(pod, pod.draft.main), local_rank)
        if pid is None and local_rank == 0:
            mine = [one.view for one in self._look({pod.name: pod}) if one.container == pod.draft.main]
            if not any(view.engine in _RANKED for view in mine):
                pid = next((pid for view in mine for _, pid in view.processes), leader)
        return None if pid is None else _process(pid)

    def _look(self, pods: Mapping[str, Pod]) -> Iterator[Launcher]:
        wanted = {
            str(self._kubelet.termination_message(pod, one.name)): (pod.name, one.name)
            for pod in pods.values()
            for one in (*pod.init, *pod.containers)
        }
        for view in self._views(pods):
            place = wanted.get(self._mark(view.pid, view.started_ticks) or "")
            if place is not None:
                yield Launcher(*place, view)

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


# -- what is new -------------------------------------------------------------------------------


EVERY_S = 0.25
_Whose = tuple[str | None, str | None]  # pod and container


class PodWatch:
    """Entries with monotonic times, and lines; `scan` runs in the output's thread, all else in ours."""

    def __init__(self) -> None:
        self.patterns: tuple[re.Pattern[str], ...] = ()  # of lines that are wanted now
        self.wake: Callable[[], None] = lambda: None
        self._scanners: dict[tuple[str, int], OutputScanner] = {}
        self._heard: deque[Entry | str] = deque()
        self._looked_s = 0.0
        self._reported: dict[_Whose, float] = {}  # when its last report was made
        self._steps: dict[_Whose, int] = {}  # the last one that counted
        self._saved: dict[tuple[str, str, int], float] = {}  # by process: seconds in checkpoints
        self._tails: dict[str, event_log.Tail] = {}  # by runtime directory

    def scan(self, process: str, stream: int, data: bytes) -> None:
        """A block of a container's output."""
        scanner = self._scanners.setdefault((process, stream), OutputScanner())
        heard = scanner.scan(data, self.patterns)
        if heard:
            pod, _, container = process.partition("/")
            now_s = time.monotonic()
            made = partial(Entry, at_s=now_s, what=What.STEP, pod=pod, container=container)
            self._heard += [one.line if one.step is None else made(step=one.step, text=one.line) for one in heard]
            self.wake()

    def observations(
        self, processes: PodProcesses, kubelet: Kubelet, pods: Mapping[str, Pod]
    ) -> Iterator[Entry | str]:
        """What is new, in the order that it came to us."""
        while self._heard:
            heard = self._heard.popleft()
            if isinstance(heard, str) or self._counts(heard):
                yield heard
        now_s = time.monotonic()
        if now_s - self._looked_s < EVERY_S:
            return
        self._looked_s = now_s
        launchers = processes.launchers(pods)
        for one in launchers:
            yield from self._generations(one)
            yield from self._reports(one.pod, one.container, one.view.run_dir)
        launched = {one.pod for one in launchers}
        for pod in pods.values():
            if pod.name not in launched:
                yield from self._reports(pod.name, pod.draft.main, kubelet.runtime_directory_of(pod))

    def _counts(self, heard: Entry) -> bool:
        """Who reports steps falls back in reports only: Paddle's launcher, for one, prints old lines again."""
        whose, step = (heard.pod, heard.container), heard.step or 0
        if whose in self._reported and step < self._steps.get(whose, 0):
            return False
        self._steps[whose] = step
        return True

    @property
    def due_s(self) -> float:
        """When the next look is."""
        return self._looked_s + EVERY_S

    def _generations(self, one: Launcher) -> Iterator[Entry]:
        folder = one.view.run_dir
        for told in self._tails.setdefault(folder, event_log.Tail(folder)).read():
            name, values = told.event
            generation = values.get("generation")
            at_s = time.monotonic() - max(0.0, time.time() - told.time_s)
            made = partial(Entry, at_s=at_s, pod=one.pod, container=one.container)
            if name == "generation_formed" and isinstance(generation, int):
                yield made(what=What.GENERATION, attempt=generation)
            elif name == event_log.PHASE and (phase := values.get("phase")) in list(Kind):
                yield made(what=What.PHASE, text=str(phase))

    def _reports(self, pod: str, container: str, folder: str) -> Iterator[Entry]:
        reports = progress.read(folder)
        yield from self._checkpoints(pod, container, reports)
        latest = progress.first([one for one in reports if one.step is not None])
        if latest is not None and latest.at_s > self._reported.get((pod, container), 0.0):
            self._reported[pod, container] = latest.at_s
            self._steps[pod, container] = latest.step or 0
            yield Entry(at_s=latest.at_s, what=What.STEP, pod=pod, container=container, step=latest.step)

    def _checkpoints(self, pod: str, container: str, reports: Sequence[Progress]) -> Iterator[Entry]:
        """Of the rank that has spent most on them; the others wait for it."""
        most = max(reports, key=lambda one: one.checkpoint_s, default=None)
        if most is None:
            return
        key = pod, container, most.pid
        more_s = most.checkpoint_s - self._saved.get(key, 0.0)
        if more_s > 0 and not most.checkpointing:
            self._saved[key] = most.checkpoint_s
            yield Entry(at_s=most.at_s, what=What.CHECKPOINT, pod=pod, container=container, took_s=more_s)
