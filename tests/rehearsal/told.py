"""Rehearsals made up for tests: a small language for histories."""

from __future__ import annotations

from collections.abc import Iterable

from trainer_launch.rehearsal.history import History, HistoryEntry, PodResult, What
from trainer_launch.rehearsal.rehearsal_report import RehearsalReport, report_of


class Tale:
    """What happens to some pods, in order of time."""

    def __init__(self, *pods: str, kind: str = "PyTorchJob", name: str = "demo") -> None:
        self.pods, self.kind, self.name = pods, kind, name
        self.entries: list[HistoryEntry] = []
        self.message = "reason=Succeeded exit=0"
        self.last_line = "step 60 loss 1.0"

    def add(self, at_s: float, what: What, pod: str | None = None, **more: object) -> Tale:
        self.entries.append(HistoryEntry(at_s=at_s, what=what, pod=pod, **more))  # type: ignore[arg-type]
        return self

    def start(self, at_s: float, *pods: str) -> Tale:
        """Pods begin to run, with their main container."""
        for pod in pods or self.pods:
            self.add(at_s, What.STATUS, pod, text="Running").add(at_s, What.STARTED, pod)
        return self

    def meet(self, at_s: float, *pods: str) -> Tale:
        for pod in pods or self.pods:
            self.add(at_s, What.GENERATION, pod)
        return self

    def steps(self, at_s: float, numbers: Iterable[int], *pods: str, each_s: float = 0.1, text: str = "") -> Tale:
        """One step each `each_s`, the first right at `at_s`."""
        for count, number in enumerate(numbers):
            for pod in pods or self.pods:
                line = text or f"step {number} loss 1.0"
                self.add(at_s + count * each_s, What.STEP, pod, step=number, text=line)
        return self

    def fault(self, at_s: float, text: str, pod: str | None = None) -> Tale:
        return self.add(at_s, What.FAULT, pod, text=text)

    def stop(self, at_s: float, pod: str) -> Tale:
        """A fault asks the pod's container to stop."""
        return self.add(at_s, What.STATUS, pod, text="Terminating").add(at_s, What.STOP_ASKED, pod, text="SIGTERM")

    def end(self, at_s: float, pod: str, code: int, status: str = "") -> Tale:
        """The pod's container ends."""
        status = status or ("Succeeded" if code == 0 else "Failed")
        return self.add(at_s, What.ENDED, pod, code=code).add(at_s, What.STATUS, pod, text=status)

    def condition(self, at_s: float, text: str = "Succeeded (JobSucceeded): done", code: int = 0) -> Tale:
        return self.add(at_s, What.CONDITION, text=text, code=code)

    def history(self, took_s: float | None = None, exit_code: int = 0) -> History:
        entries = tuple(sorted(self.entries, key=lambda entry: entry.at_s))
        last_s = entries[-1].at_s if entries else 0.0
        return History(
            kind=self.kind,
            name=self.name,
            entries=entries,
            took_s=last_s if took_s is None else took_s,
            exit_code=exit_code,
            pods=tuple(map(self._pod, self.pods)),
        )

    def report(self, took_s: float | None = None, exit_code: int = 0) -> RehearsalReport:
        return report_of(self.history(took_s, exit_code))

    def _pod(self, name: str) -> PodResult:
        mine = [entry for entry in self.entries if entry.pod == name]
        codes = [entry.code for entry in mine if entry.what is What.ENDED]
        return PodResult(
            name=name,
            status=next((entry.text for entry in reversed(mine) if entry.what is What.STATUS), "Pending"),
            created=sum(entry.what is What.STARTED for entry in mine),
            restarts=0,
            exit_code=codes[-1] if codes else None,
            message=self.message,
            last_line=self.last_line,
        )


def finished(tale: Tale, at_s: float) -> Tale:
    """All pods end with 0, and the job succeeds."""
    for pod in tale.pods:
        tale.end(at_s, pod, 0)
    return tale.condition(at_s)


def restarted(before: int = 40, resumed: int = 31, last: int = 60) -> Tale:
    """Two pods in step, each 0.1 s: a fault after step `before`, on again 2 s later, at step `resumed`."""
    tale = Tale("demo-0", "demo-1").start(0.0).meet(1.0).steps(1.1, range(1, before + 1))
    fault_s = 1.1 + before * 0.1
    tale.fault(fault_s, "kill worker node=1", "demo-1").meet(fault_s + 1.5)
    tale.steps(fault_s + 2.0, range(resumed, last + 1))
    return finished(tale, fault_s + 3.0 + (last - resumed + 1) * 0.1)
