"""Keep this node's goodput ledger: asked at events and by who wants to know, never on a timer.

Steps come from `report()`, else from printed lines. Where neither is there, progress is the number of collectives
that the hang watch has seen anyway. The coordinator and the metrics server ask in threads of their own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from trainer_launch.host import process_tree
from trainer_launch.model import Json
from trainer_launch.observability import goodput, progress
from trainer_launch.observability.goodput import Ledger, LedgerSummary, Signs
from trainer_launch.observability.progress import PrintedSteps, Progress
from trainer_launch.supervisor.run_observer import TimeKind

_MOST_AGE_S = 60.0  # between the start of this process and here; more is a clock that we misread


class GoodputKeeper:
    """The ledger of one node; every method may be called from any thread."""

    def __init__(self, run_dir: str, printed: PrintedSteps) -> None:
        self._run_dir = run_dir
        self._printed = printed
        self._lock = threading.Lock()
        self._far: tuple[int, Signs | None] = 0, None
        self._trains_since_s = 0.0
        self._ledger = Ledger(at_s=time.monotonic() - _own_age_s())

    @property
    def ledger(self) -> Ledger:
        """As it is booked."""
        return self._ledger

    def enter(self, kind: TimeKind, at_s: float, since_s: float | None = None) -> None:
        """From now on this node does this; the failure that ended the workers' training began at `since_s`."""
        if kind is self._ledger.kind:
            return
        with self._lock:
            self._look(at_s)
            # Who was stopped has written its last step at its end; who left its groups, when it did.
            if self._ledger.kind in (TimeKind.STOPPING, TimeKind.REPLACING):
                self._ledger = goodput.reached(self._ledger, self._last_step())
            self._ledger = goodput.enter(self._ledger, kind, at_s, since_s)
            if kind is TimeKind.TRAINING:
                self._far, self._trains_since_s = (0, None), at_s
                self._printed.begin()

    def look(self, collectives: int = 0) -> None:
        """Take in what the workers show now, and how many collectives they have entered and ended."""
        now_s = time.monotonic()
        with self._lock:
            before, signs = self._far
            if collectives > before:
                first_s = now_s if signs is None else signs.first_s
                self._far = collectives, Signs(first_s=first_s, last_s=now_s)
            self._look(now_s)

    def suspect(self) -> None:
        """A hang is suspected."""
        self.look()
        with self._lock:
            self._ledger = goodput.suspect(self._ledger)

    def summary(self) -> LedgerSummary:
        """The ledger as other nodes may go on with it."""
        self.look()
        return goodput.summary(self._ledger, time.monotonic())

    def adopt(self, others: LedgerSummary) -> None:
        """Go on with what other nodes know of the job."""
        with self._lock:
            self._ledger = goodput.adopt(self._ledger, others, time.monotonic())

    def totals(self, *, has_succeeded: bool = False) -> dict[TimeKind, float]:
        """Seconds by kind up to now."""
        self.look()
        return goodput.totals(self._ledger, time.monotonic(), has_succeeded=has_succeeded)

    def certain(self) -> dict[TimeKind, float]:
        """The seconds by kind that never become fewer."""
        self.look()
        return goodput.certain(self._ledger, time.monotonic())

    def _last_step(self) -> int | None:
        signs = shown(self._trains_since_s, progress.read(self._run_dir), self._printed.signs())
        return None if signs is None else signs.step

    def _look(self, at_s: float) -> None:
        if self._ledger.kind is TimeKind.TRAINING:
            reported, since_s = progress.read(self._run_dir), self._ledger.since_s
            signs = shown(since_s, reported, self._printed.signs(), self._far[1])
            self._ledger = goodput.see(self._ledger, signs, at_s)


def shown(
    since_s: float, reports: Sequence[Progress], printed: Signs | None = None, collectives: Signs | None = None
) -> Signs | None:
    """The signs of workers that run since then, by the best of these that there are."""
    reported = _reported([report for report in reports if report.at_s >= since_s])
    best = next((each for each in (reported, printed) if each is not None and each.step is not None), reported)
    if best is None or reported is None:
        return best or collectives
    last_s = max(best.last_s, reported.last_s)
    return replace(best, last_s=last_s, saved_s=reported.saved_s, is_saving=reported.is_saving)


def _reported(reports: Sequence[Progress]) -> Signs | None:
    """Ranks work in lockstep: the lowest one's steps, anybody's checkpoint."""
    first = progress.first([report for report in reports if report.step is not None]) or progress.first(reports)
    if first is None:
        return None
    return Signs(
        first_s=first.at_s if first.first_at_s is None else first.first_at_s,
        last_s=max(report.at_s for report in reports),
        first_step=first.first_step,
        step=first.step,
        saved_s=max(report.checkpoint_s for report in reports),
        is_saving=any(report.checkpointing for report in reports),
    )


def as_json(seconds: Mapping[TimeKind, float] | None) -> dict[str, Json] | None:
    """As `status --json` has it: the ratio, and the seconds of every kind."""
    if seconds is None:
        return None
    each = {kind.value: round(seconds.get(kind, 0.0), 3) for kind in TimeKind}
    return {"ratio": round(goodput.ratio(seconds), 4), "seconds": each}


def _own_age_s() -> float:
    """How long ago this process was started."""
    me = process_tree.read(os.getpid())
    if me is None:
        return 0.0
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - me.started / os.sysconf("SC_CLK_TCK")
    return age_s if 0.0 <= age_s <= _MOST_AGE_S else 0.0
