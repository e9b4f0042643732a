"""What the driver sees of its pods: steps, lines somebody waits for, generations.

Output is heard in the thread that carries it; files of the pods' launchers are looked at a few times a second, and
only when somebody wants to know.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from trainer_launch.observability import event_log, progress
from trainer_launch.observability.goodput import Kind
from trainer_launch.observability.step_lines import OutputScanner
from trainer_launch.rehearsal.controllers.pod_values import Pod
from trainer_launch.rehearsal.kubelet.pods import Kubelet
from trainer_launch.rehearsal.pod_processes import PodProcesses
from trainer_launch.rehearsal.report.history import HistoryEntry, What

_EVERY_S = 0.25  # between two looks into files


class PodWatch:
    """Entries with monotonic times, and lines; `scan` runs in the output's thread, all else in ours."""

    def __init__(self) -> None:
        self.patterns: tuple[re.Pattern[str], ...] = ()  # of lines that are wanted now
        self.wake: Callable[[], None] = lambda: None
        self._scanners: dict[tuple[str, int], OutputScanner] = {}
        self._heard: deque[HistoryEntry | str] = deque()
        self._looked_s = 0.0
        self._reported_s: dict[str, float] = {}  # by pod: when its last report was made
        self._steps: dict[str, int] = {}  # by pod: the last one that counted
        self._tails: dict[str, event_log.Tail] = {}  # by runtime directory

    def scan(self, process: str, stream: int, data: bytes) -> None:
        """A block of a container's output."""
        scanner = self._scanners.setdefault((process, stream), OutputScanner())
        scanned = scanner.scan(data, self.patterns)
        if scanned:
            pod, now_s = process.partition("/")[0], time.monotonic()
            self._heard += [
                line.line
                if line.step is None
                else HistoryEntry(at_s=now_s, what=What.STEP, pod=pod, step=line.step, text=line.line)
                for line in scanned
            ]
            self.wake()

    def observations(
        self, processes: PodProcesses, kubelet: Kubelet, pods: Mapping[str, Pod]
    ) -> Iterator[HistoryEntry | str]:
        """What is new, in the order that it came to us."""
        while self._heard:
            heard = self._heard.popleft()
            if isinstance(heard, str) or self._counts(heard):
                yield heard
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

    def _counts(self, heard: HistoryEntry) -> bool:
        """Who reports steps falls back in reports only: Paddle's launcher, for one, prints old lines again."""
        pod, step = heard.pod or "", heard.step or 0
        if pod in self._reported_s and step < self._steps.get(pod, 0):
            return False
        self._steps[pod] = step
        return True

    @property
    def due_s(self) -> float:
        """When the next look is."""
        return self._looked_s + _EVERY_S

    def _events(self, pod: str, folder: str) -> Iterator[HistoryEntry]:
        """What a launcher has written about its workers."""
        for line in self._tails.setdefault(folder, event_log.Tail(folder)).read():
            name, values = line.event
            at_s = time.monotonic() - max(0.0, time.time() - line.time_s)
            if name == "generation_formed":
                yield HistoryEntry(at_s=at_s, what=What.GENERATION, pod=pod)
            elif name == event_log.PHASE and (phase := values.get("phase")) in list(Kind):
                yield HistoryEntry(at_s=at_s, what=What.PHASE, pod=pod, text=str(phase))

    def _report(self, pod: str, folder: str) -> Iterator[HistoryEntry]:
        """The step that a program has reported."""
        latest = progress.first([report for report in progress.read(folder) if report.step is not None])
        if latest is not None and latest.at_s > self._reported_s.get(pod, 0.0):
            self._reported_s[pod] = latest.at_s
            self._steps[pod] = latest.step or 0
            yield HistoryEntry(at_s=latest.at_s, what=What.STEP, pod=pod, step=latest.step)
