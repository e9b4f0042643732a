"""What the driver of a rehearsal sees and hears of its pods: steps, lines somebody waits for, generations.

Output is heard in the thread that carries it; files of the pods' launchers are looked at a few times a second, and
only when somebody wants to know.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from trainer_launch.observability import progress, runtime_events
from trainer_launch.rehearsal.controllers.pod_values import Pod
from trainer_launch.rehearsal.kubelet.pod_processes import Inmate, Inside
from trainer_launch.rehearsal.kubelet.pods import Stage
from trainer_launch.rehearsal.output_watch import Ear

EVERY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensed:
    """One thing that a pod has let us know."""

    at_s: float  # monotonic
    pod: str
    container: str
    step: int | None = None
    line: str = ""
    generation: int | None = None


class Senses:
    """All of it; `hear` runs in the output's thread, all else in ours."""

    def __init__(self) -> None:
        self.patterns: tuple[re.Pattern[str], ...] = ()  # of lines that are wanted now
        self.wake: Callable[[], None] = lambda: None
        self._ears: dict[tuple[str, int], Ear] = {}
        self._heard: deque[Sensed] = deque()
        self._looked_s = 0.0
        self._reported: dict[tuple[str, str], float] = {}  # by pod and container: when its last report was made
        self._steps: dict[tuple[str, str], int] = {}  # the last one that counted
        self._tails: dict[str, runtime_events.Tail] = {}  # by run folder

    def hear(self, process: str, stream: int, data: bytes) -> None:
        """A block of a container's output."""
        ear = self._ears.setdefault((process, stream), Ear())
        heard = ear.hear(data, self.patterns)
        if heard:
            pod, _, container = process.partition("/")
            now_s = time.monotonic()
            for one in heard:
                self._heard.append(Sensed(at_s=now_s, pod=pod, container=container, step=one.step, line=one.line))
            self.wake()

    def news(self, inside: Inside, stage: Stage, pods: Mapping[str, Pod]) -> Iterator[Sensed]:
        """What is new, in the order that it came to us."""
        while self._heard:
            heard = self._heard.popleft()
            if self._counts(heard):
                yield heard
        now_s = time.monotonic()
        if now_s - self._looked_s < EVERY_S:
            return
        self._looked_s = now_s
        launchers = inside.launchers(pods)
        for one in launchers:
            yield from self._generations(one)
            yield from self._reports(one.pod, one.container, one.view.run_dir)
        launched = {one.pod for one in launchers}
        for pod in pods.values():
            if pod.name not in launched:
                yield from self._reports(pod.name, pod.draft.main, stage.run_folder(pod))

    def _counts(self, heard: Sensed) -> bool:
        """Who reports steps falls back in reports only: Paddle's launcher, for one, prints old lines again."""
        whose = heard.pod, heard.container
        if heard.step is None:
            return True
        if whose in self._reported and heard.step < self._steps.get(whose, 0):
            return False
        self._steps[whose] = heard.step
        return True

    @property
    def due_s(self) -> float:
        """When the next look is."""
        return self._looked_s + EVERY_S

    def _generations(self, one: Inmate) -> Iterator[Sensed]:
        folder = one.view.run_dir
        for told in self._tails.setdefault(folder, runtime_events.Tail(folder)).read():
            name, values = told.event
            generation = values.get("generation")
            if name == "generation_formed" and isinstance(generation, int):
                at_s = time.monotonic() - max(0.0, time.time() - told.time_s)
                yield Sensed(at_s=at_s, pod=one.pod, container=one.container, generation=generation)

    def _reports(self, pod: str, container: str, folder: str) -> Iterator[Sensed]:
        latest = progress.first([one for one in progress.read(folder) if one.step is not None])
        if latest is not None and latest.at_s > self._reported.get((pod, container), 0.0):
            self._reported[pod, container] = latest.at_s
            self._steps[pod, container] = latest.step or 0
            yield Sensed(at_s=latest.at_s, pod=pod, container=container, step=latest.step)
