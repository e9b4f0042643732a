"""The resume check and the SIGTERM check: does the script survive preemption. Pure.

Only proof in the history counts against a program. A check without proof is listed as not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

from msgspec import Struct

from trainer_launch.model import exit_codes
from trainer_launch.rehearsal.history import Attempt, HistoryEntry, Resume, Training, What

KILLED = 137  # 128 + SIGKILL
_STEPS_UNKNOWN = (
    "whether the script resumes, because its steps are unknown. "
    "Print lines such as 'step 40', or call trainer_launch.report(step=40)"
)
_STEPS_RESTART = "repeated steps, because the step number restarts each epoch. Print a step number that does not"
_NO_STEP_AFTER = "whether the script resumes, because no step came after its workers began again"
_TOO_EARLY = "whether the script resumes, because hardly a step was done. Inject the fault later (at=step:20)"


class ScriptCheck(str, Enum):
    """The checks of a script, in the words of their failure."""

    RESUME = "the script did not resume from its checkpoint"
    EXIT_CODE = "the script exited with 0 on SIGTERM"
    STOP_SIGNAL = "the script ignored the stop signal"


_ADVICE = {
    ScriptCheck.RESUME: "load the newest checkpoint when the script starts. If it does so already, save earlier: "
    "there was no checkpoint yet",
    ScriptCheck.EXIT_CODE: "on SIGTERM, save and exit with another code, such as 143: a controller takes 0 "
    "for success. Under `trainer-launch run` the pod ends with 143 even if the script exits with 0",
    ScriptCheck.STOP_SIGNAL: "handle SIGTERM (or lifecycle.stopSignal): save after the current step, then exit. "
    "If that takes longer, raise terminationGracePeriodSeconds",
}


class FailedCheck(Struct, frozen=True, kw_only=True):
    """A check that failed, once, for one pod or for several together."""

    check: ScriptCheck
    pods: tuple[str, ...]
    at_s: float
    evidence: str  # with numbers
    advice: str  # what to do


def judge(entries: Sequence[HistoryEntry], training: Training) -> tuple[tuple[FailedCheck, ...], tuple[str, ...]]:
    """Check the script, if a fault was injected: which checks failed, and what could not be checked."""
    if all(entry.what is not What.FAULT for entry in entries):
        return (), ()
    failed = [*_resume_checks(training), *_sigterm_checks(entries)]
    return tuple(sorted(failed, key=lambda failure: failure.at_s)), tuple(_not_checked(entries, training))


def _failed(check: ScriptCheck, pods: Sequence[str], at_s: float, evidence: str) -> FailedCheck:
    return FailedCheck(check=check, pods=tuple(pods), at_s=at_s, evidence=evidence, advice=_ADVICE[check])


def _resume_checks(training: Training) -> Iterator[FailedCheck]:
    """Each restart is judged once for its pods."""
    if not training.is_counted:
        return
    late = [(attempt, resume) for attempt, resume in training.restarts if _is_late(training, attempt)]
    loads = {resume.pod for _, resume in late if not _starts_over(training, resume)}
    for attempt in training.attempts[1:]:
        mine = [resume for other, resume in late if other is attempt]
        over = [resume for resume in mine if _starts_over(training, resume) and resume.pod not in loads]
        if over:
            worst = max(over, key=lambda resume: resume.repeated)
            evidence = f"training restarted at step {worst.last + 1}, after it had reached step {worst.before}"
            yield _failed(ScriptCheck.RESUME, *_where(over), f"{_since(attempt)} {evidence}")


def _starts_over(training: Training, resume: Resume) -> bool:
    """Whether training does all steps once more."""
    return resume.last <= 0 if resume.is_stated else resume.last < training.points[0][1]


def _is_late(training: Training, attempt: Attempt) -> bool:
    """Whether two steps or more had been done when the fault came."""
    fault_s = float("inf") if attempt.fault is None else attempt.fault.at_s
    steps = [step for at_s, step in training.before(attempt).points if at_s <= fault_s]
    return bool(steps) and steps[-1] > training.points[0][1]


def _where(resumes: Sequence[Resume]) -> tuple[list[str], float]:
    return sorted({resume.pod for resume in resumes}), resumes[0].at_s


def _since(attempt: Attempt) -> str:
    return "after a restart" if attempt.fault is None else f"after '{attempt.fault.text}'"


def _not_checked(entries: Sequence[HistoryEntry], training: Training) -> Iterator[str]:
    """Sentences about checks without proof, and what would help."""
    if not training.attempts:
        yield _STEPS_UNKNOWN
    elif not training.restarts:
        fault_s, again_s = _first_restart(entries)
        if fault_s is not None and training.points[0][0] > fault_s:
            yield _TOO_EARLY
        elif fault_s is not None and all(entry.at_s <= again_s for entry in entries if entry.what is What.STEP):
            yield _NO_STEP_AFTER
    elif not training.is_counted:
        yield _STEPS_RESTART
    elif all(
        _starts_over(training, resume) and not _is_late(training, attempt) for attempt, resume in training.restarts
    ):
        yield _TOO_EARLY


def _first_restart(entries: Sequence[HistoryEntry]) -> tuple[float | None, float]:
    """When the first fault came after which workers began again, and when these did; None: there was none."""
    faults_s = [entry.at_s for entry in entries if entry.what is What.FAULT]
    begun: set[tuple[str | None, What]] = set()  # before the first fault
    for entry in entries:
        if entry.what not in (What.STARTED, What.GENERATION):
            continue
        if faults_s and entry.at_s >= faults_s[0] and (entry.pod, entry.what) in begun:
            return max(at_s for at_s in faults_s if at_s <= entry.at_s), entry.at_s
        begun.add((entry.pod, entry.what))
    return None, 0.0


def _sigterm_checks(entries: Sequence[HistoryEntry]) -> Iterator[FailedCheck]:
    """How the containers that a fault had asked to stop ended, unless the job had succeeded before."""
    asked: dict[str, HistoryEntry] = {}
    steps: dict[str, int] = {}  # the newest of each pod
    for place, entry in enumerate(entries):
        pod = entry.pod or ""
        if entry.what is What.CONDITION and entry.code == exit_codes.SUCCEEDED:
            return
        if entry.what is What.STEP:
            steps[pod] = entry.step or 0
        elif entry.what is What.STOP_ASKED:
            asked.setdefault(pod, entry)
        elif entry.what is What.FAULT and entry.text.startswith("kill"):  # that, too, ends it by SIGKILL
            asked.pop(pod, None)
        elif entry.what is What.ENDED and (stop := asked.pop(pod, None)) is not None:
            took_s, at = entry.at_s - stop.at_s, f" at step {steps[pod]}" if pod in steps else ""
            top = steps.get(pod, max(steps.values(), default=None))
            if entry.code == exit_codes.SUCCEEDED and not _is_finished(top, entries[place:]):
                evidence = f"exited with 0{at} after {took_s:.1f} s, before its work was done"
                yield _failed(ScriptCheck.EXIT_CODE, [pod], entry.at_s, f"the pod was asked to stop and {evidence}")
            elif entry.code == KILLED:
                asked_so = f"the pod was asked to stop by {stop.text}{at}"
                evidence = f"{asked_so}, and was killed {took_s:.1f} s later, at the end of its grace period"
                yield _failed(ScriptCheck.STOP_SIGNAL, [pod], entry.at_s, evidence)


def _is_finished(step: int | None, later: Sequence[HistoryEntry]) -> bool:
    """Whether the pod had just done its last step: the job succeeds without another."""
    succeeds = any(entry.what is What.CONDITION and entry.code == exit_codes.SUCCEEDED for entry in later)
    goes_on = any(entry.what is What.STEP and (entry.step or 0) > (step or 0) for entry in later)
    return step is not None and succeeds and not goes_on
