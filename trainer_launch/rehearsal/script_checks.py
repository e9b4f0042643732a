"""The resume check and the SIGTERM check: does the script survive preemption. Pure.

Only what the history proves is held against a program; what cannot be judged is said, and is no fault.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from enum import Enum

from msgspec import Struct

from trainer_launch.model import exit_codes
from trainer_launch.model.units import counted, listed
from trainer_launch.rehearsal.report.fault_costs import Analysis, Resume
from trainer_launch.rehearsal.report.history import INIT, Entry, History, What

# -- the verdict -------------------------------------------------------------------------------


_SHOWN_PODS = 3
_WIDTH = 100


class ScriptCheck(str, Enum):
    """Which check of the script failed."""

    RESUME = "the script did not resume from its checkpoint"
    STEPS = "a restart repeated too many steps"
    EXIT_CODE = "the script exited with 0 on SIGTERM"
    SIGTERM = "the script ignored SIGTERM"


_ADVICE = {
    ScriptCheck.RESUME: "load the newest checkpoint when the script starts. If it does so already, save earlier: "
    "there was no checkpoint yet",
    ScriptCheck.STEPS: "save more often, and on SIGTERM. --max-lost-steps sets how many steps a restart may repeat",
    ScriptCheck.EXIT_CODE: "on SIGTERM, save and exit with another code, such as 143: a controller takes 0 "
    "for success. Under `trainer-launch run` the pod ends with 143 even if the script exits with 0",
    ScriptCheck.SIGTERM: "handle SIGTERM: save after the current step, then exit. If that takes longer, "
    "raise terminationGracePeriodSeconds",
}


class FailedCheck(Struct, frozen=True, kw_only=True):
    """A check that failed, once, for one pod or for several together."""

    check: ScriptCheck
    pods: tuple[str, ...]
    at_s: float
    evidence: str  # with numbers
    fault: Entry | None = None

    @property
    def advice(self) -> str:
        """What to do."""
        return _ADVICE[self.check]


class Verdict(Struct, frozen=True, kw_only=True):
    """Which checks failed, and what could not be checked."""

    failed: tuple[FailedCheck, ...] = ()
    remarks: tuple[str, ...] = ()

    def exit_code(self, code: int) -> int:
        """Of the rehearsal: the job's own, unless it succeeded and a check failed."""
        return exit_codes.FAILED if self.failed and code == exit_codes.SUCCEEDED else code

    def text(self) -> str:
        """A paragraph for the end, empty when there is nothing to say."""
        lines = []
        if self.failed:
            count = len(self.failed)
            lines.append(f"This job does not survive preemption: {counted(count, 'check')} failed.")
        for one in self.failed:
            told = f"FAILED: {one.check.value}, {names(one.pods)} at {one.at_s:.1f} s: {one.evidence}"
            lines += textwrap.wrap(told, _WIDTH, initial_indent="  ", subsequent_indent="    ")
            lines += textwrap.wrap(
                f"What to do: {one.advice}", _WIDTH, initial_indent="    ", subsequent_indent="    "
            )
        for remark in self.remarks:
            lines += textwrap.wrap(f"Not checked: {remark}", _WIDTH, subsequent_indent="  ")
        return "".join(f"{line}\n" for line in lines)


def names(pods: Sequence[str]) -> str:
    """Some pods by name, of many the first."""
    return listed(pods, _SHOWN_PODS)


# -- resume check ------------------------------------------------------------------------------


MAX_LOST_STEPS = 100  # the default of --max-lost-steps


def judge(analysis: Analysis, max_lost_steps: int = MAX_LOST_STEPS) -> Verdict:
    """Check the script, if a fault was injected."""
    if not analysis.totals.faults:
        return Verdict()
    broken = [*_of_steps(analysis, max_lost_steps), *of_stops(analysis.history)]
    return Verdict(failed=tuple(sorted(broken, key=lambda one: one.at_s)), remarks=tuple(_remarks(analysis)))


def _of_steps(analysis: Analysis, max_lost_steps: int) -> Iterator[FailedCheck]:
    """Each beginning is judged once, as what is worst about it."""
    judged = [one for one in analysis.resumes if one.is_counted and not one.is_apart]
    resumes_elsewhere = {one.pod for one in judged if not one.begins_anew and one.sure > one.first}
    found: dict[tuple[int | None, ScriptCheck], list[Resume]] = {}
    for one in judged:
        if one.begins_anew and one.sure > one.first and one.pod not in resumes_elsewhere:
            check = ScriptCheck.RESUME
        elif one.lost > max_lost_steps:
            check = ScriptCheck.STEPS
        else:
            continue
        found.setdefault((None if one.fault is None else id(one.fault), check), []).append(one)
    for (_, check), group in found.items():
        worst = max(group, key=lambda one: one.lost)
        pods = tuple(lane.pod for lane in analysis.lanes if any(one.pod == lane.pod for one in group))
        since = "after a restart" if worst.fault is None else f"after '{worst.fault.text}'"
        is_counted = check is ScriptCheck.STEPS
        begun = f"resumed from step {worst.last}" if is_counted else f"restarted at step {worst.last + 1}"
        evidence = f"{since} training {begun}, after it had reached step {worst.before}"
        if is_counted:
            evidence += f": {counted(worst.lost, 'repeated step')}, more than {max_lost_steps}"
        yield FailedCheck(check=check, pods=pods, at_s=group[0].at_s, evidence=evidence, fault=worst.fault)


def _remarks(analysis: Analysis) -> Iterator[str]:
    """What cannot be judged, and what would help."""
    if analysis.totals.top is None:
        yield (
            "whether the script resumes, because its steps are unknown. "
            "Print lines such as 'step 40', or call trainer_launch.report(step=40)"
        )
        return
    if any(not one.is_counted and not one.is_apart for one in analysis.resumes):
        yield "repeated steps, because the step number restarts each epoch. Print a step number that does not"
    job = [one for one in analysis.resumes if one.is_counted and not one.is_apart]
    if job and all(one.begins_anew and one.sure <= one.first for one in job):
        yield "whether the script resumes, because hardly a step was done. Inject the fault later (at=step:20)"


# -- SIGTERM check -----------------------------------------------------------------------------


KILLED = 137  # 128 + SIGKILL
BY_FAULT = "fault"  # who asked to stop
_LAST_STEP = re.compile(r"\bstep[ =:]+(\d+)\s*(?:/|of)\s*(\d+)", re.IGNORECASE)


def of_stops(history: History) -> Iterator[FailedCheck]:
    """The checks that they failed; none by a job that had succeeded before, or by work that was just done."""
    said_by = {one.container for one in history.entries if one.what is What.STEP}
    asked: dict[tuple[str, str | None], Entry] = {}
    steps: dict[str, Entry] = {}  # the newest of each pod
    has_succeeded = False
    for one in history.entries:
        key = (one.pod or "", one.container)
        if one.what is What.STEP:
            steps[key[0]] = one
        elif one.what is What.CONDITION:
            has_succeeded = one.code == exit_codes.SUCCEEDED or one.text.startswith("Succeeded")
        elif one.what is What.STOP_ASKED:
            if one.text == BY_FAULT:
                asked.setdefault(key, one)
            else:
                asked.pop(key, None)
        elif one.what is What.CONTAINER_STARTED:
            asked.pop(key, None)
        elif one.what is What.FAULT and one.text.strip().startswith("kill"):
            asked = {key: stop for key, stop in asked.items() if one.pod not in (None, key[0])}
        elif one.what is What.CONTAINER_ENDED:
            stop = asked.pop(key, None)
            is_suspect = stop and one.code in (exit_codes.SUCCEEDED, KILLED) and not has_succeeded
            if stop and is_suspect and _is_judged(history, key, said_by):
                yield from _of_stop(history, stop, one, steps.get(key[0]))


def _of_stop(history: History, stop: Entry, end: Entry, last: Entry | None) -> Iterator[FailedCheck]:
    pod, seconds = end.pod or "", end.at_s - stop.at_s
    faults = [one for one in history.entries if one.what is What.FAULT and one.pod in (None, pod)]
    fault = next((one for one in reversed(faults) if one.at_s <= stop.at_s), None)
    asked = f"container {end.container} was asked to stop"
    reached = "" if last is None else f" at step {last.step}"
    if end.code == exit_codes.SUCCEEDED and not _has_finished(history, pod, last, end):
        text = f"{asked} and exited with 0{reached} after {seconds:.1f} s, before its work was done"
        yield FailedCheck(check=ScriptCheck.EXIT_CODE, pods=(pod,), at_s=end.at_s, evidence=text, fault=fault)
    elif end.code == KILLED:
        text = f"{asked}{reached}, and was killed {seconds:.1f} s later, at the end of its grace period"
        yield FailedCheck(check=ScriptCheck.SIGTERM, pods=(pod,), at_s=end.at_s, evidence=text, fault=fault)


def _is_judged(history: History, key: tuple[str, str | None], said_by: set[str | None]) -> bool:
    """Whether a container trains: it says steps, as its like in other pods, or is its pod's only one."""
    started = [one for one in history.entries if one.what is What.CONTAINER_STARTED and one.pod == key[0]]
    if any(one.container == key[1] and one.text == INIT for one in started):
        return False
    mine = {one.container for one in started if one.text != INIT}
    return key[1] in said_by if mine & said_by else mine == {key[1]}


def _has_finished(history: History, pod: str, last: Entry | None, end: Entry) -> bool:
    """Whether it had just done its last step: as its line says, or as another pod's end with 0 shows."""
    if last is None:
        return False
    said = _LAST_STEP.search(last.text)
    if said and said[1] == said[2]:
        return True
    asked = {one.pod for one in history.entries if one.what is What.STOP_ASKED and one.at_s <= end.at_s}
    ended = {one.pod for one in history.entries if one.what is What.CONTAINER_ENDED and one.code == 0}
    again = any(
        one.pod == pod and one.at_s > end.at_s and one.what is What.CONTAINER_STARTED for one in history.entries
    )
    tops: dict[str, int] = {}
    for one in history.entries:
        if one.what is What.STEP and one.pod in ended - asked and one.step is not None:
            tops[one.pod or ""] = max(tops.get(one.pod or "", 0), one.step)
    return not again and bool(tops) and max(tops.values()) <= (last.step or 0)
