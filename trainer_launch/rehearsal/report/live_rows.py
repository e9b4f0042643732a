"""What the live table of a rehearsal shows: a row for each pod, those in trouble first where not all fit. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trainer_launch.rehearsal.report.history import Happening, What
from trainer_launch.rehearsal.report.lanes import Doing, Walk
from trainer_launch.rehearsal.report.summary import clean, counted, seconds

COLUMNS = ("POD", "STATUS", "CREATED", "ATTEMPT", "STEP", "LAST LINE")
LEAST_ROWS, LEAST_WIDTH = 12, 40  # of a terminal: with fewer there is no table
_SHARE = 3  # the table takes at most this part of the terminal
_MOST = 12  # pods that are shown
_STATUS = {
    Doing.WAITING: "Pending",
    Doing.INIT: "Init",
    Doing.RUNNING: "Running",
    Doing.STOPPING: "Terminating",
    Doing.DOWN: "Restarting",
}
_TROUBLE = (Doing.DOWN, Doing.STOPPING, Doing.WAITING, Doing.INIT, Doing.RUNNING, Doing.OVER)


@dataclass(slots=True)
class Standing:
    """How one pod stands."""

    walk: Walk
    step: int | None = None
    line: str = ""  # the one that told the step

    @property
    def status(self) -> str:
        """As kubectl has it."""
        over = "Completed" if self.walk.code == 0 else "Terminated"
        return _STATUS.get(self.walk.doing, over)


@dataclass(slots=True)
class Board:
    """How the rehearsal stands, as its happenings tell."""

    title: str
    pods: dict[str, Standing]
    to_come: list[str]  # faults, as they are written
    came: int = 0
    missed: int = 0
    ended: str = ""
    changes: int = 0  # rises with everything that is told
    top: int | None = None
    lasting: list[str] = field(default_factory=list)  # faults that are not over

    @classmethod
    def of(cls, title: str, pods: Iterable[str], faults: Iterable[str]) -> Board:
        """At the beginning."""
        return cls(title=title, pods={pod: Standing(Walk()) for pod in pods}, to_come=list(faults))

    def take(self, one: Happening) -> None:
        """Something has happened."""
        self.changes += 1
        if one.what in (What.FAULT, What.FAULT_MISSED, What.FAULT_OVER):
            self._fault(one)
        elif one.what is What.CONDITION:
            self.ended = one.text
        elif one.pod is not None:
            standing = self.pods.setdefault(one.pod, Standing(Walk(since_s=one.at_s)))
            standing.walk.take(one)
            standing.walk.done.clear()  # the past is the chronicle's
            if one.what is What.STEP and one.step is not None:
                standing.step, standing.line = one.step, one.text
                self.top = max(one.step, self.top or 0)

    def _fault(self, one: Happening) -> None:
        if one.what is What.FAULT_OVER:
            if one.text in self.lasting:
                self.lasting.remove(one.text)
            return
        if one.text in self.to_come:
            self.to_come.remove(one.text)
        if one.what is What.FAULT:
            self.came += 1
            self.lasting.append(one.text)
        else:
            self.missed += 1

    # -- what is shown ------------------------------------------------------------------------

    def head(self, now_s: float) -> str:
        """The first line: the job, its step, and its faults."""
        parts = [clean(self.title), seconds(now_s)]
        if self.top is not None:
            parts.append(f"step {self.top:,}")
        if self.came:
            parts.append(f"{counted(self.came, 'fault')} injected")
        if self.to_come:
            more = f" (and {len(self.to_come) - 1} more)" if len(self.to_come) > 1 else ""
            parts.append(f"next: {clean(self.to_come[0])}{more}")
        if self.ended:
            parts.append(clean(self.ended))
        return " · ".join(parts)

    def rows(self, most: int) -> tuple[list[tuple[str, Doing]], str]:
        """The pods that are shown, and what is said of the others."""
        standing = [(pod, one.walk.doing) for pod, one in self.pods.items()]
        if len(standing) <= most:
            return standing, ""
        shown = sorted(standing, key=lambda one: _TROUBLE.index(one[1]))[: most - 1]
        names = {pod for pod, _ in shown}
        counts: dict[str, int] = {}
        for pod, one in self.pods.items():
            if pod not in names:
                counts[one.status] = counts.get(one.status, 0) + 1
        told = ", ".join(f"{count} {status}" for status, count in counts.items())
        return shown, f"and {len(standing) - len(shown)} more: {told}"

    def cells(self, pod: str, last_line: str) -> tuple[str, ...]:
        """A row of COLUMNS."""
        one = self.pods[pod]
        step = "-" if one.step is None else f"{one.step:,}"
        line = clean(last_line or one.line)
        return clean(pod), one.status, str(one.walk.life), str(one.walk.attempt), step, line


def height(pods: int, rows: int) -> int:
    """How many pods are shown on a terminal of so many rows."""
    return min(pods, max(3, rows // _SHARE - 2), _MOST)


def fitting(columns: int) -> Sequence[int]:
    """Which of COLUMNS a terminal has room for."""
    return (0, 1, 4) if columns < 60 else (0, 1, 3, 4, 5) if columns < 90 else (0, 1, 2, 3, 4, 5)
