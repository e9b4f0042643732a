"""The resume check and the SIGTERM check: does the script survive preemption. Pure.

Only what the chronicle proves is held against a program; what cannot be judged is said, and is no fault.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.units import counted
from trainer_launch.rehearsal.report.overview import Story
from trainer_launch.rehearsal.resume_check import Resume
from trainer_launch.rehearsal.sigterm_check import of_stops
from trainer_launch.rehearsal.verdict import Broken, Promise, Verdict

MAX_LOST_STEPS = 100  # the default of --max-lost-steps


def judge(story: Story, max_lost_steps: int = MAX_LOST_STEPS) -> Verdict:
    """Check the script, if a fault was injected."""
    if not story.totals.faults:
        return Verdict()
    broken = [*_of_steps(story, max_lost_steps), *of_stops(story.chronicle)]
    return Verdict(broken=tuple(sorted(broken, key=lambda one: one.at_s)), remarks=tuple(_remarks(story)))


def _of_steps(story: Story, max_lost_steps: int) -> Iterator[Broken]:
    """Each beginning is judged once, as what is worst about it."""
    counted = [one for one in story.resumes if one.is_counted and not one.is_apart]
    resumes_elsewhere = {one.pod for one in counted if not one.begins_anew and one.sure > one.first}
    found: dict[tuple[int | None, Promise], list[Resume]] = {}
    for one in counted:
        if one.begins_anew and one.sure > one.first and one.pod not in resumes_elsewhere:
            promise = Promise.RESUME
        elif one.lost > max_lost_steps:
            promise = Promise.STEPS
        else:
            continue
        found.setdefault((None if one.fault is None else id(one.fault), promise), []).append(one)
    for (_, promise), group in found.items():
        worst = max(group, key=lambda one: one.lost)
        pods = tuple(lane.pod for lane in story.lanes if any(one.pod == lane.pod for one in group))
        told = _resume_told if promise is Promise.RESUME else _lost_told
        evidence = told(worst, max_lost_steps)
        yield Broken(promise=promise, pods=pods, at_s=group[0].at_s, evidence=evidence, fault=worst.fault)


def _resume_told(one: Resume, _: int) -> str:
    return f"{_after(one)} training restarted at step {one.last + 1}, after it had reached step {one.before}"


def _lost_told(one: Resume, most: int) -> str:
    told = f"{_after(one)} training resumed from step {one.last}, after it had reached step {one.before}"
    return f"{told}: {counted(one.lost, 'repeated step')}, more than {most}"


def _after(one: Resume) -> str:
    return "after a restart" if one.fault is None else f"after '{one.fault.text}'"


def _remarks(story: Story) -> Iterator[str]:
    """What cannot be judged, and what would help."""
    if story.totals.top is None:
        yield (
            "whether the script resumes, because its steps are unknown. "
            "Print lines such as 'step 40', or call trainer_launch.report(step=40)"
        )
        return
    if any(not one.is_counted and not one.is_apart for one in story.resumes):
        yield "repeated steps, because the step number restarts each epoch. Print a step number that does not"
    job = [one for one in story.resumes if one.is_counted and not one.is_apart]
    if job and all(one.begins_anew and one.sure <= one.first for one in job):
        yield "whether the script resumes, because hardly a step was done. Inject the fault later (at=step:20)"
