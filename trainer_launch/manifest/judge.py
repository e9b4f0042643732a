"""What a controller makes of its pods' states: start again, give up, or be content. Pure; one function per family.

v1: pkg/controller.v1/common/pod.go, pkg/core/job.go. Jobs: Kubernetes' own Job controller, JobSet, mpi-operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from trainer_launch import exits
from trainer_launch.manifest.life import BACK_OFF_S, MAX_BACK_OFF_S, Phase, PodState
from trainer_launch.manifest.values import ChildRules, ExitRule, Pod, Rules

GIVE_UP = 6  # restarts of what lives for less than a minute on average: a cluster would go on for ever
_SHORT_LIFE_S = 60.0
UNKNOWN_CODE = 48879  # 0xbeef: what the v1 operator takes when a container has no exit code; retryable


@dataclass(frozen=True, slots=True)
class Condition:
    """How the job ended."""

    succeeded: bool
    reason: str  # CamelCase
    message: str
    exit_code: int = 0

    @property
    def is_victims(self) -> bool:
        """Whether it is told by one that ended because its peers did, or the network."""
        return not self.succeeded and self.exit_code == exits.INFRASTRUCTURE


@dataclass(frozen=True, slots=True)
class Again:
    """Delete this pod and make it anew, not before a time has passed; `counts` towards its Job's limit."""

    pod: str
    wait_s: float = 0.0
    counts: bool = False


@dataclass(frozen=True, slots=True)
class AllAgain:
    """Make all pods anew: JobSet restarts."""

    because: Condition


Decision = Condition | Again | AllAgain


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that a controller sees."""

    kind: str
    pods: Mapping[str, Pod]
    rules: Rules
    states: Mapping[str, PodState]
    failed: Mapping[str, int] = field(default_factory=dict)  # pods of each Job that failed and were made anew
    attempt: int = 0  # restarts of the JobSet so far
    age_s: float = 0.0


def decide(view: View) -> list[Decision]:
    """What is to be done now; nothing most of the time."""
    if _has_succeeded(view):
        return [Condition(True, f"{_word(view)}Succeeded", f"{view.kind} has completed")]
    deadline_s = view.rules.deadline_s
    if deadline_s is not None and view.age_s >= deadline_s:
        text = f"it ran longer than activeDeadlineSeconds, {deadline_s:g} s"
        return [Condition(False, "DeadlineExceeded", text, exits.FAILED)]
    decisions = list(_v1(view) if view.rules.family == "v1" else _jobs(view))
    decisions += _crash_loops(view)
    fatal = [one for one in decisions if isinstance(one, Condition | AllAgain)]
    fatal.sort(key=lambda one: isinstance(one, Condition) and one.is_victims)
    return list(fatal[:1]) or decisions


def _has_succeeded(view: View) -> bool:
    done = {name for name, state in view.states.items() if state.phase is Phase.SUCCEEDED}
    groups = [set(group) <= done for group in view.rules.success.groups if group]
    return bool(groups) and (any(groups) if view.rules.success.any_of else all(groups))


def _crash_loops(view: View) -> Iterator[Decision]:
    """What would be started again for ever: a rehearsal gives up, and says so."""
    for name, state in view.states.items():
        count = max(state.restart_count, state.failures)
        if count >= GIVE_UP and view.age_s < count * _SHORT_LIFE_S:
            text = f"{name} was started again {count} times; a cluster would go on, the rehearsal gives up"
            yield _failure(view, name, "CrashLoopBackOff", text)


# -- v1: bare pods ----------------------------------------------------------------------------


def _v1(view: View) -> Iterator[Decision]:
    for name, state in view.states.items():
        if state.phase is not Phase.FAILED or name in view.rules.may_fail:
            continue
        pod = view.pods[name]
        code = state.codes.get(pod.draft.main, UNKNOWN_CODE)
        by_code = pod.draft.restart == "ExitCode" and exits.retryable(code)
        if by_code or pod.draft.restart in ("OnFailure", "Always"):
            yield Again(name)
        else:
            why = " (1 to 127: permanent)" if pod.draft.restart == "ExitCode" else ""
            yield _failure(view, name, f"{_word(view)}Failed", f"its {pod.draft.role} {name} failed{why}")
    limit = view.rules.backoff_limit
    count = sum(
        state.restart_count
        for name, state in view.states.items()
        if state.phase is Phase.RUNNING and not state.stopping and view.pods[name].draft.restart != "Never"
    )
    if limit is not None and count >= max(limit, 1):
        name = max(view.states, key=lambda each: view.states[each].restart_count)
        text = f"{count} restarts of containers; backoffLimit is {limit}"
        yield _failure(view, name, "BackoffLimitExceeded", text)


# -- Jobs: of a JobSet, or mpi-operator's launcher --------------------------------------------


def _jobs(view: View) -> Iterator[Decision]:
    for child, rules in view.rules.children.items():
        for decision in _job(view, child, rules):
            if isinstance(decision, Condition) and view.attempt < view.rules.max_restarts:
                yield AllAgain(decision)
            else:
                yield decision


def _job(view: View, child: str, rules: ChildRules) -> Iterator[Decision]:
    own = {name: state for name, state in view.states.items() if view.pods[name].draft.child == child}
    restarts = sum(state.restart_count for state in own.values() if state.is_active)
    if restarts and restarts >= max(rules.backoff_limit, 1):
        worst = max(own, key=lambda name: own[name].restart_count)
        text = f"Job {child}: {restarts} restarts of containers; backoffLimit is {rules.backoff_limit}"
        yield _failure(view, worst, "BackoffLimitExceeded", text)
        return
    counted = view.failed.get(child, 0)
    for name, state in own.items():
        if state.phase is not Phase.FAILED:
            continue
        rule = next((rule for rule in rules.exit_rules if _matches(rule, state)), None)
        if rule is not None and rule.action in ("FailJob", "FailIndex"):
            yield _failure(
                view, name, "PodFailurePolicy", f"Job {child}: {name} ended with a code that fails the Job"
            )
        elif rule is not None and rule.action == "Ignore":
            yield Again(name, _wait_s(state.failures + 1))
        else:
            counted += 1
            if counted > rules.backoff_limit:
                text = f"Job {child}: {counted} pods failed; backoffLimit is {rules.backoff_limit}"
                yield _failure(view, name, "BackoffLimitExceeded", text)
                return
            yield Again(name, _wait_s(counted), counts=True)


def _wait_s(times: int) -> float:
    return min(BACK_OFF_S * 2.0 ** min(times - 1, 16), MAX_BACK_OFF_S)


def _matches(rule: ExitRule, state: PodState) -> bool:
    """Whether some container's exit code, never 0, is one that the rule means."""
    codes = [code for name, code in state.codes.items() if code != 0 and rule.container in (None, name)]
    return any((code in rule.codes) is rule.among for code in codes)


def _failure(view: View, pod: str, reason: str, text: str) -> Condition:
    return Condition(False, reason, text, code_of(view.pods[pod], view.states[pod]))


def code_of(pod: Pod, state: PodState) -> int:
    """The exit code to tell: that of the container that counts, else of one that failed, else 1."""
    main = state.codes.get(pod.draft.main)
    others = [code for code in state.codes.values() if code != 0]
    return main or (others[-1] if others else exits.FAILED)


def _word(view: View) -> str:
    """The kind as reasons begin with it."""
    return view.kind.partition(" ")[0]
