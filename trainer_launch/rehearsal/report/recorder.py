"""Writes the chronicle while the rehearsal runs, and tells each happening to whoever wants it. Pure.

Steps may come a thousand times a second: of each pod a few in a second are kept, the first of a beginning, the last
before anything else happens, and wherever they go back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from trainer_launch.rehearsal.report.history import Chronicle, Happening, What

Observer = Callable[[Happening], None]
_LEAST_GAP_S = 0.05  # between two steps of a pod that are kept
_GAPS = 2_000  # and of a rehearsal's time: a long one keeps a few thousand of each pod


class Recorder:
    """What has happened so far."""

    def __init__(self, kind: str, name: str, pods: Iterable[str]) -> None:
        self.observers: list[Observer] = []
        self._chronicle = Chronicle(kind=kind, name=name, pods=tuple(pods))
        self._happenings: list[Happening] = []
        self._held: dict[str, Happening] = {}  # by pod: its newest step, not kept yet
        self._kept: dict[str, Happening] = {}  # by pod: its last step that was

    def add(self, happening: Happening) -> None:
        """Take in what has happened; steps in their own way."""
        if happening.what is What.STEP and happening.pod is not None:
            self._step(happening.pod, happening)
            return
        for pod in list(self._held) if happening.pod is None else [happening.pod]:
            self._let_go(pod)
        if happening.what in (What.POD_STARTED, What.CONTAINER_STARTED, What.GENERATION) and happening.pod:
            self._kept.pop(happening.pod, None)  # the next step is the first of a beginning
        if happening.what is What.POD_STARTED and happening.pod not in self._chronicle.pods:
            self._chronicle = replace(self._chronicle, pods=(*self._chronicle.pods, happening.pod or ""))
        self._keep(happening)

    def finish(self, ended_s: float, *, succeeded: bool | None) -> None:
        """Nothing more comes; `succeeded` is None for a rehearsal that was stopped."""
        for pod in list(self._held):
            self._let_go(pod)
        self._chronicle = replace(self._chronicle, ended_s=ended_s, succeeded=succeeded)

    def chronicle(self, seen: Mapping[str, str], words: Mapping[str, str]) -> Chronicle:
        """All of it, with the last line that each pod has said, and the termination message it has left."""
        ordered = tuple(sorted(self._happenings, key=lambda one: one.at_s))  # reports are read a little later
        return replace(self._chronicle, happenings=ordered, seen=seen, words=words)

    def _step(self, pod: str, happening: Happening) -> None:
        last, held = self._kept.get(pod), self._held.get(pod)
        newest = held or last
        goes_back = newest is not None and (happening.step or 0) < (newest.step or 0)
        if goes_back:
            self._let_go(pod)
        gap_s = max(_LEAST_GAP_S, happening.at_s / _GAPS)
        if last is None or goes_back or happening.at_s - last.at_s >= gap_s:
            self._held.pop(pod, None)
            self._kept[pod] = happening
            self._keep(happening)
        elif newest is None or happening.step != newest.step:
            self._held[pod] = happening

    def _let_go(self, pod: str) -> None:
        happening = self._held.pop(pod, None)
        if happening is not None:
            self._kept[pod] = happening
            self._keep(happening)

    def _keep(self, happening: Happening) -> None:
        self._happenings.append(happening)
        for observer in self.observers:
            observer(happening)
