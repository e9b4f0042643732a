"""The verdict of a rehearsal: did the script resume from its checkpoint, and did it handle SIGTERM. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from trainer_launch.model import exit_codes
from trainer_launch.model.units import counted
from trainer_launch.rehearsal.report.history import Happening

_SHOWN_PODS = 3
_WIDTH = 100


class Promise(str, Enum):
    """Which check of the script failed."""

    RESUME = "the script did not resume from its checkpoint"
    STEPS = "a restart repeated too many steps"
    EXIT_CODE = "the script exited with 0 on SIGTERM"
    SIGTERM = "the script ignored SIGTERM"


_MENDS = {
    Promise.RESUME: "load the newest checkpoint when the script starts. If it does so already, save earlier: "
    "there was no checkpoint yet",
    Promise.STEPS: "save more often, and on SIGTERM. --max-lost-steps sets how many steps a restart may repeat",
    Promise.EXIT_CODE: "on SIGTERM, save and exit with another code, such as 143: a controller takes 0 "
    "for success. Under `trainer-launch run` the pod ends with 143 even if the script exits with 0",
    Promise.SIGTERM: "handle SIGTERM: save after the current step, then exit. If that takes longer, "
    "raise terminationGracePeriodSeconds",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A check that failed, once, for one pod or for several together."""

    promise: Promise
    pods: tuple[str, ...]
    at_s: float
    evidence: str  # with numbers
    fault: Happening | None = None

    @property
    def mend(self) -> str:
        """What to do."""
        return _MENDS[self.promise]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Which checks failed, and what could not be checked."""

    broken: tuple[Broken, ...] = ()
    remarks: tuple[str, ...] = ()

    def exit_code(self, code: int) -> int:
        """Of the rehearsal: the job's own, unless it succeeded and a check failed."""
        return exit_codes.FAILED if self.broken and code == exit_codes.SUCCEEDED else code

    def text(self) -> str:
        """A paragraph for the end, empty when there is nothing to say."""
        lines = []
        if self.broken:
            count = len(self.broken)
            lines.append(f"This job does not survive preemption: {counted(count, 'check')} failed.")
        for one in self.broken:
            told = f"FAILED: {one.promise.value}, {names(one.pods)} at {one.at_s:.1f} s: {one.evidence}"
            lines += textwrap.wrap(told, _WIDTH, initial_indent="  ", subsequent_indent="    ")
            lines += textwrap.wrap(
                f"What to do: {one.mend}", _WIDTH, initial_indent="    ", subsequent_indent="    "
            )
        for remark in self.remarks:
            lines += textwrap.wrap(f"Not checked: {remark}", _WIDTH, subsequent_indent="  ")
        return "".join(f"{line}\n" for line in lines)


def names(pods: Sequence[str]) -> str:
    """Some pods by name, of many the first."""
    shown = ", ".join(pods[:_SHOWN_PODS])
    return shown if len(pods) <= _SHOWN_PODS else f"{shown} and {len(pods) - _SHOWN_PODS} more"
