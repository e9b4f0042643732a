"""What a controller makes of its pods' states: start again, give up, or be content. Pure; one function per family.

v1: pkg/controller.v1/common/pod.go, pkg/core/job.go. Jobs: Kubernetes' own Job controller, JobSet, mpi-operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.model import exit_codes
from trainer_launch.model.units import counted
from trainer_launch.rehearsal.controllers.pod_lifecycle import Phase, PodState, back_off_s, next_due_s
from trainer_launch.rehearsal.controllers.pod_values import ChildRules, ExitRule, Pod, Rules, SetRule

# -- what a controller can decide, and what it goes by -----------------------------------------


CANNOT_RUN = "ContainerCannotRun"


class Condition(Struct, frozen=True):
    """How the job ended."""

    succeeded: bool
    reason: str  # CamelCase
    message: str
    exit_code: int = 0
    pod: str = field(default="", compare=False)  # for which it failed, where it is one

    @property
    def text(self) -> str:
        """In words."""
        return f"{'Succeeded' if self.succeeded else 'Failed'} ({self.reason}): {self.message}"

    @property
    def is_victims(self) -> bool:
        """Whether it is told by one that ended because its peers did, or the network."""
        return not self.succeeded and self.exit_code == exit_codes.INFRASTRUCTURE

    @property
    def is_given_up(self) -> bool:
        """Whether the rehearsal ends it, because no restart makes a program that can be run of one that cannot."""
        return not self.succeeded and self.reason == CANNOT_RUN


class Again(Struct, frozen=True):
    """Delete this pod and make it anew, not before a time has passed; `counts` names the counters that go up."""

    pod: str
    wait_s: float = 0.0
    counts: tuple[str, ...] = ()


class AllAgain(Struct, frozen=True):
    """Make all pods anew: JobSet restarts, or one of its Jobs; `counts` towards its failurePolicy's limit."""

    because: Condition
    counts: bool = True
    child: str | None = None  # only this Job
    in_place: bool = False  # in the pods that there are


Decision = Condition | Again | AllAgain


class State(Struct, frozen=True, kw_only=True):
    """How the job stands."""

    kind: str
    pods: Mapping[str, Pod]
    rules: Rules
    states: Mapping[str, PodState]
    began_s: float
    failed: Mapping[str, int] = field(default_factory=dict)  # pods of a Job, or an index, that were made anew
    attempt: int = 0  # restarts of the JobSet, or of its Jobs
    counted: int = 0  # of these, those that the limit is for
    begun: Mapping[str, float] = field(default_factory=dict)  # when each Job has begun
    gathers: bool = False  # pods that restart in place wait for each other
    condition: Condition | None = None
    held_until_s: float | None = None  # when a failure that may not be the first is taken for it
    stop_at_s: float | None = None  # when pods that linger after the end are stopped
    asked: int = 0  # how often we were asked to stop
    grace_s: float | None = None  # shorter than the pods' own, when asked
    now_s: float = 0.0  # when the controller looks

    @property
    def there(self) -> Mapping[str, Pod]:
        """The pods that the job has, without those by which it was scaled down."""
        return {name: pod for name, pod in self.pods.items() if not self.states[name].removed}

    @property
    def age_s(self) -> float:
        """For how long the job has run."""
        return self.now_s - self.began_s

    @property
    def is_done(self) -> bool:
        """Whether the job has ended, and nothing of it runs."""
        over = self.condition is not None or self.asked > 0
        return over and not any(state.running for state in self.states.values())

    @property
    def running(self) -> frozenset[str]:
        """The pods that their controller sees as Running."""
        return frozenset(name for name, one in self.states.items() if one.phase is Phase.RUNNING and one.running)

    def due_s(self) -> float | None:
        """When something is to happen without an event."""
        times = [at_s for state in self.states.values() if (at_s := next_due_s(state)) is not None]
        if self.condition is None and not self.asked:
            times += [one.not_before_s for one in self.states.values() if one.phase is Phase.PENDING and one.starts]
            times += [self.held_until_s] if self.held_until_s is not None else []
            times += [self.began_s + self.rules.deadline_s] if self.rules.deadline_s is not None else []
            limits = ((at_s, self.rules.children.get(child)) for child, at_s in self.begun.items())
            times += [
                at_s + one.deadline_s for at_s, one in limits if one is not None and one.deadline_s is not None
            ]
        if self.stop_at_s is not None:
            times.append(self.stop_at_s)
        return min(times, default=None)


def failure_of(job: State, pod: str, reason: str, text: str) -> Condition:
    """The job fails because of this pod."""
    return Condition(False, reason, text, code_of(job.pods[pod], job.states[pod]), pod)


def code_of(pod: Pod, state: PodState) -> int:
    """The exit code to tell: that of the container that counts, else of one that failed, else 1."""
    main = state.codes.get(pod.draft.main)
    others = [code for code in state.codes.values() if code != 0]
    return main or (others[-1] if others else exit_codes.FAILED)


# -- what is to be done now --------------------------------------------------------------------


_SUCCEEDED = {
    "JobSet": "AllJobsCompleted",
    "Job": "CompletionsReached",
}  # reasons of other kinds begin with the kind
GIVE_UP = 6  # restarts of what lives for less than a minute on average: a cluster would go on for ever
_SHORT_LIFE_S = 60.0
_NO_RETRY = "a cluster would retry, the rehearsal stops because a restart will not help"
UNKNOWN_CODE = 48879  # 0xbeef: what the v1 operator takes when a container has no exit code; retryable


def decide(job: State) -> list[Decision]:
    """What is to be done now; nothing most of the time."""
    if _has_succeeded(job):
        reason = _SUCCEEDED.get(job.kind, f"{_word(job)}Succeeded")
        return [Condition(True, reason, f"{job.kind} has completed")]
    deadline_s = job.rules.deadline_s
    if deadline_s is not None and job.age_s >= deadline_s:
        text = f"the job ran longer than activeDeadlineSeconds ({deadline_s:g} s)"
        return [Condition(False, "DeadlineExceeded", text, exit_codes.FAILED)]
    decisions = list(_v1(job) if job.rules.family == "v1" else decide_jobs(job))
    decisions = [_without_hope(job, one) for one in decisions] + [*_cannot_run(job), *_crash_loops(job)]
    fatal = [one for one in decisions if isinstance(one, Condition | AllAgain)]
    fatal.sort(key=lambda one: isinstance(one, Condition) and one.is_victims)
    return list(fatal[:1]) or decisions


def _has_succeeded(job: State) -> bool:
    done = {name for name, state in job.states.items() if state.phase is Phase.SUCCEEDED}
    over = {name for name, state in job.states.items() if not state.running}
    spares = job.rules.success.spares
    groups = [
        set(group) <= (done | over) and len(set(group) - done) <= spares
        for group in job.rules.success.groups
        if group
    ]
    return bool(groups) and (any(groups) if job.rules.success.any_of else all(groups))


def _cannot_run(job: State) -> Iterator[Decision]:
    """What the kubelet would restart in place for ever, though its program cannot be run."""
    for name, state in job.states.items():
        for container in (*state.due_s, *(state.codes if state.in_place else ())):
            if exit_codes.cannot_run(state.codes.get(container)):
                yield _hopeless(job, name, container)


def _without_hope(job: State, decision: Decision) -> Decision:
    """Nor does a new pod help, or a new JobSet."""
    if isinstance(decision, AllAgain) and exit_codes.cannot_run(decision.because.exit_code):
        text = f"{decision.because.message}; {_NO_RETRY}"
        return replace(decision.because, reason=CANNOT_RUN, message=text)
    if not isinstance(decision, Again):
        return decision
    codes = job.states[decision.pod].codes
    failed = next((name for name, code in codes.items() if exit_codes.cannot_run(code)), None)
    return decision if failed is None else _hopeless(job, decision.pod, failed)


def _hopeless(job: State, pod: str, container: str) -> Condition:
    code = job.states[pod].codes[container]
    text = f"container {container} of {pod} ended with {code} ({exit_codes.describe(code)}); {_NO_RETRY}"
    return Condition(False, CANNOT_RUN, text, code)


def _crash_loops(job: State) -> Iterator[Decision]:
    """What would be started again for ever: a rehearsal gives up, and says so."""
    for name, state in job.states.items():
        asked = job.attempt if job.rules.strategy == IN_PLACE else 0
        count = max(state.most_restarts - asked, state.failures - job.counted)
        if count >= GIVE_UP and job.age_s < count * _SHORT_LIFE_S:
            text = f"{name} was restarted {count} times; a cluster would continue, the rehearsal gives up"
            yield failure_of(job, name, "CrashLoopBackOff", text)


# -- v1: bare pods ----------------------------------------------------------------------------


def _v1(job: State) -> Iterator[Decision]:
    n_failed = sum(state.phase is Phase.FAILED for state in job.states.values())
    for name, state in job.states.items():
        is_fatal = state.phase is Phase.FAILED and n_failed > job.rules.success.spares
        if not is_fatal or name in job.rules.may_fail:
            continue
        pod = job.pods[name]
        code = state.codes.get(pod.draft.main, UNKNOWN_CODE)
        by_code = pod.draft.restart == "ExitCode" and exit_codes.retryable(code)
        if by_code or pod.draft.restart in ("OnFailure", "Always"):
            yield Again(name)
        else:
            why = " (1 to 127: permanent)" if pod.draft.restart == "ExitCode" else ""
            yield failure_of(job, name, f"{_word(job)}Failed", f"its {pod.draft.role} {name} failed{why}")
    limit = job.rules.backoff_limit
    count = sum(
        state.restart_count
        for name, state in job.states.items()
        if state.phase is Phase.RUNNING and not state.stopping and job.pods[name].draft.restart != "Never"
    )
    if limit is not None and count >= max(limit, 1):
        name = max(job.states, key=lambda each: job.states[each].restart_count)
        text = f"{counted(count, 'container restart')}; backoffLimit is {limit}"
        yield failure_of(job, name, "BackoffLimitExceeded", text)


def _word(job: State) -> str:
    """The kind as reasons begin with it."""
    return job.kind.partition(" ")[0]


# -- Jobs and JobSets --------------------------------------------------------------------------


IN_PLACE = "InPlaceRestart"
RESTART = "RestartJobSet"  # what a failurePolicy does where none of its rules fits
DISRUPTED = "DisruptionTarget"  # the condition of a pod that was evicted, or whose node went


class _Failed(Struct, frozen=True):
    """A Job that has failed; `said` is the message that its condition has on a cluster."""

    child: str
    condition: Condition
    said: str


def decide_jobs(job: State) -> Iterator[Decision]:
    """What all Jobs ask for, and what the JobSet makes of those that have failed."""
    failed: list[_Failed] = []
    for child, rules in job.rules.children.items():
        for decision in _job(job, child, rules):
            if isinstance(decision, _Failed):
                failed.append(decision)
            else:
                yield decision
    if failed:
        yield _of_set(job, failed)
    elif job.rules.strategy == IN_PLACE:
        yield from _in_place(job)


# -- a JobSet ---------------------------------------------------------------------------------


def _of_set(job: State, failed: Sequence[_Failed]) -> Decision:
    """The first rule that fits any Job, else a restart, as long as the limit allows one."""
    rule, end = next(
        ((rule, end) for rule in job.rules.set_rules for end in failed if _fits(job, rule, end)), (None, failed[0])
    )
    action = rule.action if rule is not None else RESTART
    limit = job.rules.max_restarts
    because = end.condition
    if action == "FailJobSet":
        return replace(because, message=f"{because.message}; its failurePolicy fails the JobSet")
    if action.endswith("IgnoreMaxRestarts"):
        counts = False
    elif job.counted < limit:
        counts = True
    elif limit:
        return replace(because, message=f"{because.message}; its maxRestarts allow {counted(limit, 'restart')}")
    else:
        return because
    return AllAgain(because, counts=counts, child=None if action.startswith(RESTART) else end.child)


def _in_place(job: State) -> Iterator[Decision]:
    """A pod that starts again makes all others do so (reconcileInPlaceRestart)."""
    limit = job.rules.max_restarts
    anew = next((name for name in job.states if not job.gathers and _starts_again(job, name)), None)
    worst = max(job.states, key=lambda name: job.states[name].most_restarts)
    said = f"its maxRestarts allow {counted(limit, 'restart')}"
    if anew is not None and job.counted < limit:
        yield AllAgain(failure_of(job, anew, "", f"{anew} starts again"), in_place=True)
    elif anew is not None:
        yield failure_of(job, anew, "ReachedMaxRestarts", f"{anew} starts again; {said}")
    elif job.states[worst].most_restarts > limit:
        yield failure_of(job, worst, "ReachedMaxRestarts", f"{worst} restarts too often; {said}")


def _starts_again(job: State, name: str) -> bool:
    """Whether its agent begins anew, because its container or its whole pod does."""
    pod, one = job.pods[name], job.states[name]
    comes_back = one.phase is Phase.PENDING or (one.stopping and one.stop_as is Phase.PENDING)
    restarts = any(pod.container(container).is_agent for container in one.due_s)
    return bool(one.starts) and (one.phase is Phase.FAILED or comes_back or restarts)


def _fits(job: State, rule: SetRule, end: _Failed) -> bool:
    whose = job.rules.children[end.child].replicated
    return (
        (not rule.reasons or end.condition.reason in rule.reasons)
        and (not rule.jobs or whose in rule.jobs)
        and (not rule.patterns or any(re.search(pattern, end.said) for pattern in rule.patterns))
    )


# -- a Job ------------------------------------------------------------------------------------


def _job(job: State, child: str, rules: ChildRules) -> Iterator[Decision | _Failed]:
    own = {name: state for name, state in job.states.items() if job.pods[name].draft.child == child}
    age_s = job.now_s - job.begun.get(child, job.now_s)
    unfinished = next((name for name, state in own.items() if state.phase is not Phase.SUCCEEDED), None)
    if rules.deadline_s is not None and age_s >= rules.deadline_s and unfinished is not None:
        text = f"Job {child} ran longer than activeDeadlineSeconds, {rules.deadline_s:g} s"
        yield _failed(
            job, child, unfinished, "DeadlineExceeded", text, "Job was active longer than specified deadline"
        )
        return
    restarts = sum(
        state.restart_count
        for name, state in own.items()
        if state.is_active and job.pods[name].draft.restart == "OnFailure"
    )
    if restarts and restarts >= max(rules.backoff_limit, 1):
        worst = max(own, key=lambda name: own[name].restart_count)
        text = counted(restarts, "container restart")
        yield _backoff(job, child, worst, f"Job {child}: {text}; backoffLimit is {rules.backoff_limit}")
        return
    yield from _disrupted(job, child, rules, own)
    failed = {name: state for name, state in own.items() if state.phase is Phase.FAILED}
    lost: list[str] = []  # pods of indexes that have failed for good
    for name, state in failed.items():
        rule = next((rule for rule in rules.exit_rules if _matches(rule, state)), None)
        action = rule.action if rule is not None else "Count"
        if action == "FailJob":
            text = f"Job {child}: {name} ended with a code that fails the Job"
            yield _failed(job, child, name, "PodFailurePolicy", text, _of_policy(job, name, rule))
        elif action == "Ignore":
            yield Again(name, back_off_s(state.failures + 1))
        elif action == "FailIndex" or _is_spent(job, child, name, rules):
            lost.append(name)
        else:
            counts = (child, _index_of(job, child, name)) if rules.per_index is not None else (child,)
            yield Again(name, back_off_s(job.failed.get(counts[-1], 0) + 1), counts=counts)
    count = job.failed.get(child, 0) + len(failed)
    if count > rules.backoff_limit and any(name not in lost for name in failed):
        name = next(name for name in failed if name not in lost)
        text = f"Job {child}: {counted(count, 'failed pod')}; backoffLimit is {rules.backoff_limit}"
        yield _backoff(job, child, name, text)
    yield from _of_indexes(job, child, rules, lost, own)


def _of_indexes(
    job: State, child: str, rules: ChildRules, lost: Sequence[str], own: Mapping[str, PodState]
) -> Iterator[_Failed]:
    """A Job whose indexes fail one by one has failed when too many have, or when all others are done."""
    if not lost:
        return
    most = rules.max_failed_indexes
    if most is not None and len(lost) > most:
        text = f"Job {child}: {len(lost)} indexes failed; maxFailedIndexes is {most}"
        said = "Job has exceeded the specified maximal number of failed indexes"
        yield _failed(job, child, lost[-1], "MaxFailedIndexesExceeded", text, said)
    elif all(name in lost or state.phase is Phase.SUCCEEDED for name, state in own.items()):
        text = f"Job {child} has failed indexes: {', '.join(str(job.pods[name].draft.index) for name in lost)}"
        yield _failed(job, child, lost[0], "FailedIndexes", text, "Job has failed indexes")


def _disrupted(job: State, child: str, rules: ChildRules, own: Mapping[str, PodState]) -> Iterator[_Failed]:
    """A pod that somebody deletes is made anew, unless the podFailurePolicy fails the Job for that."""
    for name, state in own.items():
        rule = next((rule for rule in rules.exit_rules if DISRUPTED in rule.conditions), None)
        if state.disrupted and rule is not None and rule.action == "FailJob":
            said = f"Pod default/{name} has condition {DISRUPTED} matching FailJob rule at index {rule.number}"
            text = f"Job {child}: {name} was deleted, for which its podFailurePolicy fails the Job"
            yield _failed(job, child, name, "PodFailurePolicy", text, said)


def _is_spent(job: State, child: str, name: str, rules: ChildRules) -> bool:
    """Whether this failure is one more than an index may have."""
    return rules.per_index is not None and job.failed.get(_index_of(job, child, name), 0) >= rules.per_index


def _index_of(job: State, child: str, name: str) -> str:
    return f"{child}[{job.pods[name].draft.index}]"


def _matches(rule: ExitRule, state: PodState) -> bool:
    """Whether some container's exit code, never 0, is one that the rule means."""
    codes = [code for name, code in state.codes.items() if code != 0 and rule.container in (None, name)]
    return not rule.conditions and any(map(rule.means, codes))


def _of_policy(job: State, name: str, rule: ExitRule | None) -> str:
    number = rule.number if rule is not None else 0
    container, code = job.pods[name].draft.main, failure_of(job, name, "", "").exit_code
    ended = f"Container {container} for pod default/{name} failed with exit code {code}"
    return f"{ended} matching FailJob rule at index {number}"


def _backoff(job: State, child: str, name: str, text: str) -> _Failed:
    return _failed(job, child, name, "BackoffLimitExceeded", text, "Job has reached the specified backoff limit")


def _failed(job: State, child: str, name: str, reason: str, text: str, said: str) -> _Failed:
    return _Failed(child, failure_of(job, name, reason, text), said)
