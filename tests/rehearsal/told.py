"""Rehearsals made up for tests: a small language for histories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trainer_launch.rehearsal.report.history import Entry, History, What


class Tale:
    """What happens to some pods, in order of time."""

    def __init__(self, *pods: str, kind: str = "PyTorchJob", name: str = "demo") -> None:
        self.pods, self.kind, self.name = pods, kind, name
        self.entries: list[Entry] = []
        self.lives: dict[str, int] = {}
        self.seen: dict[str, str] = {}
        self.words: dict[str, str] = {}

    def add(self, at_s: float, what: What, pod: str | None = None, **more: object) -> Tale:
        self.entries.append(Entry(at_s=at_s, what=what, pod=pod, **more))  # type: ignore[arg-type]
        return self

    def start(self, at_s: float, *pods: str) -> Tale:
        """Pods begin a life, with their main container."""
        for pod in pods or self.pods:
            self.lives[pod] = self.lives.get(pod, 0) + 1
            self.add(at_s, What.POD_STARTED, pod, attempt=self.lives[pod])
            self.add(at_s, What.CONTAINER_STARTED, pod, container="main", attempt=1)
        return self

    def meet(self, at_s: float, attempt: int = 1, *pods: str) -> Tale:
        for pod in pods or self.pods:
            self.add(at_s, What.GENERATION, pod, attempt=attempt)
        return self

    def steps(self, at_s: float, numbers: Iterable[int], *pods: str, each_s: float = 0.1, text: str = "") -> Tale:
        """One step each `each_s`, the first right at `at_s`."""
        for count, number in enumerate(numbers):
            for pod in pods or self.pods:
                line = text or f"step {number} loss 1.0"
                self.add(at_s + count * each_s, What.STEP, pod, container="main", step=number, text=line)
        return self

    def fault(self, at_s: float, text: str, pod: str | None = None) -> Tale:
        return self.add(at_s, What.FAULT, pod, text=text)

    def stop(self, at_s: float, pod: str, by: str = "fault") -> Tale:
        return self.add(at_s, What.STOP_ASKED, pod, container="main", text=by)

    def end(self, at_s: float, pod: str, code: int, phase: str = "") -> Tale:
        self.add(at_s, What.CONTAINER_ENDED, pod, container="main", code=code)
        phase = phase or ("Succeeded" if code == 0 else "Failed")
        return self.add(at_s, What.POD_ENDED, pod, text=phase)

    def condition(self, at_s: float, text: str = "Succeeded", code: int = 0) -> Tale:
        return self.add(at_s, What.CONDITION, text=text, code=code)

    def history(self, ended_s: float | None = None, succeeded: bool | None = True) -> History:
        entries = tuple(sorted(self.entries, key=lambda one: one.at_s))
        last_s = entries[-1].at_s if entries else 0.0
        seen: Mapping[str, str] = {**dict.fromkeys(self.pods, "step 60 loss 1.0"), **self.seen}
        return History(
            kind=self.kind,
            name=self.name,
            pods=self.pods,
            entries=entries,
            ended_s=last_s if ended_s is None else ended_s,
            succeeded=succeeded,
            seen=seen,
            words=self.words,
        )


def finished(tale: Tale, at_s: float) -> History:
    """All pods end with 0, and the job succeeds."""
    for pod in tale.pods:
        tale.end(at_s, pod, 0)
    return tale.condition(at_s).history()


def restarted(before: int = 40, resumed: int = 31, last: int = 60, fault: str = "kill worker node=1") -> History:
    """Two pods in step, each 0.1 s: a fault after step `before`, on again 2 s later, at step `resumed`."""
    tale = Tale("demo-0", "demo-1").start(0.0).meet(1.0).steps(1.1, range(1, before + 1))
    fault_s = 1.1 + before * 0.1
    tale.fault(fault_s, fault, "demo-1").meet(fault_s + 1.5, 2).steps(fault_s + 2.0, range(resumed, last + 1))
    return finished(tale, fault_s + 3.0 + (last - resumed + 1) * 0.1)
