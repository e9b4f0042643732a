"""The history of a rehearsal, of which reports and checks of the script are made. Pure."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct


class What(str, Enum):
    """The kinds of entries."""

    STATUS = (
        "status"  # `text` is what the pod does from now on, as kubectl shows it: Pending, Running, Restarting, …
    )
    STARTED = "started"  # the container that trains, its pod's main one
    ENDED = "ended"  # the same container, with its exit code in `code`
    STOP_ASKED = "stop asked"  # a fault makes the kubelet send it SIGTERM, or the signal that `text` names
    GENERATION = "generation"  # the pod's workers have met (again); `text` is KEPT where ranks keep their state
    STEP = "step"  # training has reached `step`; `text` is the line that says so, empty when the pod reports it
    FAULT = "fault"  # `text` is the fault as it was written; `pod` None: of all
    FAULT_OVER = "fault over"  # a fault that lasts has ended, same `text`
    FAULT_MISSED = "fault missed"  # it never happened, and `why`
    CONDITION = "condition"  # the job has ended; `text` says how, `code` is 0 if it succeeded


KEPT = "kept"  # by ranks that survive: the step in flight is done again, and none is repeated


class HistoryEntry(Struct, frozen=True, kw_only=True):
    """An entry: something that happened, with its time."""

    at_s: float  # seconds since the rehearsal began
    what: What
    pod: str | None = None
    step: int | None = None
    code: int | None = None
    text: str = ""
    why: str = ""


class PodResult(Struct, frozen=True, kw_only=True):
    """How a pod stands at the end, as the table at the end has it."""

    name: str
    status: str
    created: int  # how often
    restarts: int  # of containers, in the pod that was created last
    exit_code: int | None
    message: str  # the first line of its termination message, or what its exit code means
    last_line: str  # of its output


class History(Struct, frozen=True, kw_only=True):
    """A whole rehearsal."""

    kind: str  # of the job, such as TrainJob
    name: str
    entries: tuple[HistoryEntry, ...]  # in order of time
    took_s: float
    exit_code: int  # the job's own
    pods: tuple[PodResult, ...]  # in the order people expect them: node 0 first
    remarks: tuple[str, ...] = ()  # lines below the table: the cause of a failure, what to do, goodput


_LEAST_GAP_S = 0.05  # between two steps of a pod that are kept
_GAPS = 2_000  # and of a rehearsal's time: a long one keeps a few thousand of each pod


class Recorder:
    """The history so far."""

    def __init__(self) -> None:
        self._entries: list[HistoryEntry] = []
        self._runs: dict[str | None, list[int]] = {}  # by pod: where its steps are, since something else happened

    def add(self, entry: HistoryEntry) -> None:
        """Take in an entry. Of steps in quick succession the last is kept."""
        if entry.what is not What.STEP:
            self._runs.pop(entry.pod, None)
            if entry.pod is None:
                self._runs.clear()
        else:
            run = self._runs.setdefault(entry.pod, [])
            if self._replaces(run, entry):
                self._entries[run[-1]] = entry
                return
            run.append(len(self._entries))
        self._entries.append(entry)

    def entries(self) -> tuple[HistoryEntry, ...]:
        """All entries, in order of time: reports of pods are read a little later."""
        return tuple(sorted(self._entries, key=lambda entry: entry.at_s))

    def _replaces(self, run: list[int], entry: HistoryEntry) -> bool:
        """Whether the last step lies between two that are close together."""
        if len(run) < 2:
            return False
        before, last = self._entries[run[-2]], self._entries[run[-1]]
        is_close = entry.at_s - before.at_s < max(_LEAST_GAP_S, entry.at_s / _GAPS)
        return is_close and (before.step or 0) < (last.step or 0) <= (entry.step or 0)
