"""What becomes of Jobs: of a JobSet with its failurePolicy, or mpi-operator's launcher. Pure.

Kubernetes' Job controller (backoffLimit, podFailurePolicy, backoffLimitPerIndex, activeDeadlineSeconds), and
kubernetes-sigs/jobset pkg/controllers/failure_policy.go.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainer_launch.model.units import counted
from trainer_launch.rehearsal.controllers.decisions import Again, AllAgain, Condition, Decision, View, failure_of
from trainer_launch.rehearsal.controllers.pod_lifecycle import BACK_OFF_S, MAX_BACK_OFF_S, Phase, PodState
from trainer_launch.rehearsal.controllers.pod_values import ChildRules, ExitRule, SetRule

RESTART = "RestartJobSet"  # what a failurePolicy does where none of its rules fits
DISRUPTED = "DisruptionTarget"  # the condition of a pod that was evicted, or whose node went


@dataclass(frozen=True, slots=True)
class _Failed:
    """A Job that has failed; `said` is the message that its condition has on a cluster."""

    child: str
    condition: Condition
    said: str


def decide(view: View) -> Iterator[Decision]:
    """What all Jobs ask for, and what the JobSet makes of those that have failed."""
    failed: list[_Failed] = []
    for child, rules in view.rules.children.items():
        for decision in _job(view, child, rules):
            if isinstance(decision, _Failed):
                failed.append(decision)
            else:
                yield decision
    if failed:
        yield _of_set(view, failed)


# -- a JobSet ---------------------------------------------------------------------------------


def _of_set(view: View, failed: Sequence[_Failed]) -> Decision:
    """The first rule that fits any Job, else a restart, as long as the limit allows one."""
    rule, job = next(
        ((rule, job) for rule in view.rules.set_rules for job in failed if _fits(view, rule, job)),
        (None, failed[0]),
    )
    action = rule.action if rule is not None else RESTART
    limit = view.rules.max_restarts
    because = job.condition
    if action == "FailJobSet":
        return replace(because, message=f"{because.message}; its failurePolicy fails the JobSet")
    if action.endswith("IgnoreMaxRestarts"):
        counts = False
    elif view.counted < limit:
        counts = True
    elif limit:
        return replace(because, message=f"{because.message}; its maxRestarts allow {counted(limit, 'restart')}")
    else:
        return because
    return AllAgain(because, counts=counts, child=None if action.startswith(RESTART) else job.child)


def _fits(view: View, rule: SetRule, job: _Failed) -> bool:
    whose = view.rules.children[job.child].replicated
    return (
        (not rule.reasons or job.condition.reason in rule.reasons)
        and (not rule.jobs or whose in rule.jobs)
        and (not rule.patterns or any(re.search(pattern, job.said) for pattern in rule.patterns))
    )


# -- a Job ------------------------------------------------------------------------------------


def _job(view: View, child: str, rules: ChildRules) -> Iterator[Decision | _Failed]:
    own = {name: state for name, state in view.states.items() if view.pods[name].draft.child == child}
    if rules.deadline_s is not None and view.ages_s.get(child, 0.0) >= rules.deadline_s and _is_unfinished(own):
        text = f"Job {child} ran longer than activeDeadlineSeconds, {rules.deadline_s:g} s"
        name = next(name for name, state in own.items() if state.phase is not Phase.SUCCEEDED)
        yield _failed(view, child, name, "DeadlineExceeded", text, "Job was active longer than specified deadline")
        return
    restarts = sum(state.restart_count for state in own.values() if state.is_active)
    if restarts and restarts >= max(rules.backoff_limit, 1):
        worst = max(own, key=lambda name: own[name].restart_count)
        text = counted(restarts, "container restart")
        yield _backoff(view, child, worst, f"Job {child}: {text}; backoffLimit is {rules.backoff_limit}")
        return
    yield from _disrupted(view, child, rules, own)
    failed = {name: state for name, state in own.items() if state.phase is Phase.FAILED}
    lost: list[str] = []  # pods of indexes that have failed for good
    for name, state in failed.items():
        rule = next((rule for rule in rules.exit_rules if _matches(rule, state)), None)
        action = rule.action if rule is not None else "Count"
        if action == "FailJob":
            text = f"Job {child}: {name} ended with a code that fails the Job"
            yield _failed(view, child, name, "PodFailurePolicy", text, _of_policy(view, name, rule))
        elif action == "Ignore":
            yield Again(name, _wait_s(state.failures + 1))
        elif action == "FailIndex" or _is_spent(view, child, name, rules):
            lost.append(name)
        else:
            counts = (child, _index_of(view, child, name)) if rules.per_index is not None else (child,)
            yield Again(name, _wait_s(view.failed.get(counts[-1], 0) + 1), counts=counts)
    count = view.failed.get(child, 0) + len(failed)
    if count > rules.backoff_limit and any(name not in lost for name in failed):
        name = next(name for name in failed if name not in lost)
        text = f"Job {child}: {counted(count, 'failed pod')}; backoffLimit is {rules.backoff_limit}"
        yield _backoff(view, child, name, text)
    yield from _of_indexes(view, child, rules, lost, own)


def _of_indexes(
    view: View, child: str, rules: ChildRules, lost: Sequence[str], own: Mapping[str, PodState]
) -> Iterator[_Failed]:
    """A Job whose indexes fail one by one has failed when too many have, or when all others are done."""
    if not lost:
        return
    most = rules.max_failed_indexes
    if most is not None and len(lost) > most:
        text = f"Job {child}: {len(lost)} indexes failed; maxFailedIndexes is {most}"
        said = "Job has exceeded the specified maximal number of failed indexes"
        yield _failed(view, child, lost[-1], "MaxFailedIndexesExceeded", text, said)
    elif all(name in lost or state.phase is Phase.SUCCEEDED for name, state in own.items()):
        text = f"Job {child} has failed indexes: {', '.join(str(view.pods[name].draft.index) for name in lost)}"
        yield _failed(view, child, lost[0], "FailedIndexes", text, "Job has failed indexes")


def _disrupted(view: View, child: str, rules: ChildRules, own: Mapping[str, PodState]) -> Iterator[_Failed]:
    """A pod that somebody deletes is made anew, unless the podFailurePolicy fails the Job for that."""
    for name, state in own.items():
        rule = next((rule for rule in rules.exit_rules if DISRUPTED in rule.conditions), None)
        if state.disrupted and rule is not None and rule.action == "FailJob":
            said = f"Pod default/{name} has condition {DISRUPTED} matching FailJob rule at index {rule.number}"
            text = f"Job {child}: {name} was deleted, for which its podFailurePolicy fails the Job"
            yield _failed(view, child, name, "PodFailurePolicy", text, said)


def _is_unfinished(own: Mapping[str, PodState]) -> bool:
    return any(state.phase is not Phase.SUCCEEDED for state in own.values())


def _is_spent(view: View, child: str, name: str, rules: ChildRules) -> bool:
    """Whether this failure is one more than an index may have."""
    return rules.per_index is not None and view.failed.get(_index_of(view, child, name), 0) >= rules.per_index


def _index_of(view: View, child: str, name: str) -> str:
    return f"{child}[{view.pods[name].draft.index}]"


def _wait_s(times: int) -> float:
    return min(BACK_OFF_S * 2.0 ** min(times - 1, 16), MAX_BACK_OFF_S)


def _matches(rule: ExitRule, state: PodState) -> bool:
    """Whether some container's exit code, never 0, is one that the rule means."""
    codes = [code for name, code in state.codes.items() if code != 0 and rule.container in (None, name)]
    return not rule.conditions and any((code in rule.codes) is rule.among for code in codes)


def _of_policy(view: View, name: str, rule: ExitRule | None) -> str:
    number = rule.number if rule is not None else 0
    container, code = view.pods[name].draft.main, failure_of(view, name, "", "").exit_code
    ended = f"Container {container} for pod default/{name} failed with exit code {code}"
    return f"{ended} matching FailJob rule at index {number}"


def _backoff(view: View, child: str, name: str, text: str) -> _Failed:
    return _failed(view, child, name, "BackoffLimitExceeded", text, "Job has reached the specified backoff limit")


def _failed(view: View, child: str, name: str, reason: str, text: str, said: str) -> _Failed:
    return _Failed(child, failure_of(view, name, reason, text), said)
