"""Waits until the names of a plan resolve, before anything is started."""

from __future__ import annotations

import logging

from trainer_launch.model import Plan
from trainer_launch.supervisor.run_observer import RunObserver
from trainer_launch.supervisor.system import Happened, System

log = logging.getLogger(__name__)


class NameWait:
    """The wait of one run; where no names are waited for it is over at once."""

    def __init__(self, plan: Plan, system: System, observer: RunObserver) -> None:
        self._plan, self._system, self._observer = plan, system, observer
        self.why = f"the resolver has not answered for {', '.join(plan.wait_for)}"  # it takes so long
        self.until_s: float | None = None  # while it lasts

    def begin(self) -> None:
        """Begin to resolve."""
        plan = self._plan
        if plan.wait_for:
            log.info("waiting up to %g s for %s to resolve", plan.wait_s, ", ".join(plan.wait_for))
            self._observer.tell("waiting", names=plan.wait_for)
            self.until_s = self._system.now() + plan.wait_s
            self._system.resolve_names(plan.wait_for)

    def is_over(self, happened: Happened) -> bool:
        """Whether all names resolve since this has happened."""
        if self.until_s is None:
            return False
        if happened.unresolved:
            self.why = happened.unresolved
            log.warning("%s", happened.unresolved)
            self._observer.tell("unresolved", text=happened.unresolved)
        if happened.resolved:
            self._observer.tell("resolved")
            self.end()
        return happened.resolved

    def is_late(self, now_s: float) -> bool:
        """Whether they do not resolve in time."""
        return self.until_s is not None and now_s >= self.until_s

    def end(self) -> None:
        """Wait no longer."""
        if self.until_s is not None:
            self.until_s = None
            self._system.stop_resolving()
