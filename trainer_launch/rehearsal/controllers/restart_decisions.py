"""What a controller makes of its pods' states: start again, give up, or be content. Pure; one function per family.

v1: pkg/controller.v1/common/pod.go, pkg/core/job.go. Jobs: Kubernetes' own Job controller, JobSet, mpi-operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainer_launch.model import exit_codes
from trainer_launch.model.units import counted
from trainer_launch.rehearsal.controllers import job_outcomes
from trainer_launch.rehearsal.controllers.decisions import (
    CANNOT_RUN,
    Again,
    AllAgain,
    Condition,
    Decision,
    View,
    failure_of,
)
from trainer_launch.rehearsal.controllers.pod_lifecycle import Phase

GIVE_UP = 6  # restarts of what lives for less than a minute on average: a cluster would go on for ever
_SHORT_LIFE_S = 60.0
_NO_RETRY = "a cluster would retry, the rehearsal stops because a restart will not help"
UNKNOWN_CODE = 48879  # 0xbeef: what the v1 operator takes when a container has no exit code; retryable


def decide(view: View) -> list[Decision]:
    """What is to be done now; nothing most of the time."""
    if _has_succeeded(view):
        return [Condition(True, f"{_word(view)}Succeeded", f"{view.kind} has completed")]
    deadline_s = view.rules.deadline_s
    if deadline_s is not None and view.age_s >= deadline_s:
        text = f"the job ran longer than activeDeadlineSeconds ({deadline_s:g} s)"
        return [Condition(False, "DeadlineExceeded", text, exit_codes.FAILED)]
    decisions = list(_v1(view) if view.rules.family == "v1" else job_outcomes.decide(view))
    decisions = [_without_hope(view, one) for one in decisions] + [*_cannot_run(view), *_crash_loops(view)]
    fatal = [one for one in decisions if isinstance(one, Condition | AllAgain)]
    fatal.sort(key=lambda one: isinstance(one, Condition) and one.is_victims)
    return list(fatal[:1]) or decisions


def _has_succeeded(view: View) -> bool:
    done = {name for name, state in view.states.items() if state.phase is Phase.SUCCEEDED}
    groups = [set(group) <= done for group in view.rules.success.groups if group]
    return bool(groups) and (any(groups) if view.rules.success.any_of else all(groups))


def _cannot_run(view: View) -> Iterator[Decision]:
    """What the kubelet would restart in place for ever, though its program cannot be run."""
    for name, state in view.states.items():
        for container in state.due_s:
            if exit_codes.cannot_run(state.codes.get(container)):
                yield _hopeless(view, name, container)


def _without_hope(view: View, decision: Decision) -> Decision:
    """Nor does a new pod help, or a new JobSet."""
    if isinstance(decision, AllAgain) and exit_codes.cannot_run(decision.because.exit_code):
        text = f"{decision.because.message}; {_NO_RETRY}"
        return replace(decision.because, reason=CANNOT_RUN, message=text)
    if not isinstance(decision, Again):
        return decision
    codes = view.states[decision.pod].codes
    failed = next((name for name, code in codes.items() if exit_codes.cannot_run(code)), None)
    return decision if failed is None else _hopeless(view, decision.pod, failed)


def _hopeless(view: View, pod: str, container: str) -> Condition:
    code = view.states[pod].codes[container]
    text = f"container {container} of {pod} ended with {code} ({exit_codes.describe(code)}); {_NO_RETRY}"
    return Condition(False, CANNOT_RUN, text, code)


def _crash_loops(view: View) -> Iterator[Decision]:
    """What would be started again for ever: a rehearsal gives up, and says so."""
    for name, state in view.states.items():
        count = max(state.restart_count, state.failures - view.counted)
        if count >= GIVE_UP and view.age_s < count * _SHORT_LIFE_S:
            text = f"{name} was restarted {count} times; a cluster would continue, the rehearsal gives up"
            yield failure_of(view, name, "CrashLoopBackOff", text)


# -- v1: bare pods ----------------------------------------------------------------------------


def _v1(view: View) -> Iterator[Decision]:
    for name, state in view.states.items():
        if state.phase is not Phase.FAILED or name in view.rules.may_fail:
            continue
        pod = view.pods[name]
        code = state.codes.get(pod.draft.main, UNKNOWN_CODE)
        by_code = pod.draft.restart == "ExitCode" and exit_codes.retryable(code)
        if by_code or pod.draft.restart in ("OnFailure", "Always"):
            yield Again(name)
        else:
            why = " (1 to 127: permanent)" if pod.draft.restart == "ExitCode" else ""
            yield failure_of(view, name, f"{_word(view)}Failed", f"its {pod.draft.role} {name} failed{why}")
    limit = view.rules.backoff_limit
    count = sum(
        state.restart_count
        for name, state in view.states.items()
        if state.phase is Phase.RUNNING and not state.stopping and view.pods[name].draft.restart != "Never"
    )
    if limit is not None and count >= max(limit, 1):
        name = max(view.states, key=lambda each: view.states[each].restart_count)
        text = f"{counted(count, 'container restart')}; backoffLimit is {limit}"
        yield failure_of(view, name, "BackoffLimitExceeded", text)


def _word(view: View) -> str:
    """The kind as reasons begin with it."""
    return view.kind.partition(" ")[0]
