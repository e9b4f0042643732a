"""What a job that is preempted owes its owner, and where it fell short: the verdict of a rehearsal. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from trainer_launch import exits
from trainer_launch.rehearsal.chronicle import Happening
from trainer_launch.sizes import counted

_SHOWN_PODS = 3
_WIDTH = 100


class Promise(str, Enum):
    """What may be broken."""

    RESUME = "no resume"
    STEPS = "steps lost"
    EXIT_CODE = "exit 0 on SIGTERM"
    SIGTERM = "ignored SIGTERM"


_MENDS = {
    Promise.RESUME: "load the newest checkpoint when the program starts; if it does, save sooner, for "
    "there was none yet that it could reach",
    Promise.STEPS: "save more often (--checkpoint-every or the like), and once more on SIGTERM; "
    "--max-lost-steps says how many may be lost",
    Promise.EXIT_CODE: "when asked to stop, save and leave with another code, such as 143: a controller takes 0 "
    "for the end of the work. Under `trainer-launch run` the pod ends with 143 whatever the program returns",
    Promise.SIGTERM: "handle SIGTERM: save after the step in hand and leave; or raise "
    "terminationGracePeriodSeconds if saving takes longer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A promise that was broken, once, by one pod or by several together."""

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
    """Which promises were broken, and what could not be judged."""

    broken: tuple[Broken, ...] = ()
    remarks: tuple[str, ...] = ()

    def exit_code(self, code: int) -> int:
        """Of the rehearsal: the job's own, unless it succeeded though a promise was broken."""
        return exits.FAILED if self.broken and code == exits.SUCCEEDED else code

    def text(self) -> str:
        """A paragraph for the end, empty when there is nothing to say."""
        lines = []
        if self.broken:
            count = len(self.broken)
            lines.append(f"This job does not survive preemption: {counted(count, 'promise')} broken.")
        for one in self.broken:
            told = f"{one.promise.value}, {names(one.pods)} at {one.at_s:.1f} s: {one.evidence}"
            lines += textwrap.wrap(told, _WIDTH, initial_indent="  ", subsequent_indent="    ")
            lines += textwrap.wrap(one.mend, _WIDTH, initial_indent="    -> ", subsequent_indent="       ")
        for remark in self.remarks:
            lines += textwrap.wrap(f"Not judged: {remark}", _WIDTH, subsequent_indent="  ")
        return "".join(f"{line}\n" for line in lines)


def names(pods: Sequence[str]) -> str:
    """Some pods by name, of many the first."""
    shown = ", ".join(pods[:_SHOWN_PODS])
    return shown if len(pods) <= _SHOWN_PODS else f"{shown} and {len(pods) - _SHOWN_PODS} more"
