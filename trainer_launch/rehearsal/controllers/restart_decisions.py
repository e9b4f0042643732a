"""What a controller makes of its pods' states: start again, give up, or be content. Pure; one function per family.

v1: pkg/controller.v1/common/pod.go, pkg/core/job.go. Jobs: Kubernetes' own Job controller, JobSet, mpi-operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.model import exit_codes
from trainer_launch.model.units import counted, listed
from trainer_launch.rehearsal.controllers.pod_lifecycle import Phase, PodState, back_off_s, next_due_s
from trainer_launch.rehearsal.controllers.pod_values import ChildRules, ExitRule, JobRules, Pod, SetRule

CANNOT_RUN = "ContainerCannotRun"


class Condition(Struct, frozen=True):
    """How the job ended, or a Job of it."""

    succeeded: bool
    reason: str  # CamelCase
    message: str
    exit_code: int = 0
    pod: str = ""  # for which it failed, where it is one

    @property
    def text(self) -> str:
        """In words."""
        return f"{'Succeeded' if self.succeeded else 'Failed'} ({self.reason}): {self.message}"

    @property
    def is_victims(self) -> bool:
        """Whether it is told by one that ended because its peers did, or the network."""
        return not self.succeeded and self.exit_code == exit_codes.INFRASTRUCTURE


class Recreate(Struct, frozen=True, kw_only=True):
    """Delete these pods and make them anew, not before a time has passed."""

    pods: tuple[str, ...]
    text: str  # what to tell
    wait_s: float = 0.0
    of: str | None = None  # it counts as a failed pod of this Job
    is_whole: bool = False  # the JobSet restarts
    counts: bool = False  # towards the limit of its failurePolicy


Decision = Condition | Recreate


class State(Struct, frozen=True, kw_only=True):
    """How the job stands."""

    kind: str
    pods: Mapping[str, Pod]  # as they were made
    made_of: Mapping[str, Pod]  # what the controller makes them of from now on: of a scaled job others
    rules: JobRules
    states: Mapping[str, PodState]
    began_s: float
    failed: Mapping[str, int] = field(default_factory=dict)  # pods of a Job that were made anew
    counted: int = 0  # restarts of the JobSet that the limit is for
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


_SUCCEEDED = {
    "JobSet": "AllJobsCompleted",
    "Job": "CompletionsReached",
}  # reasons of other kinds begin with the kind
GIVE_UP = 6  # restarts of what lives for less than a minute on average: a cluster would go on for ever
_SHORT_LIFE_S = 60.0
_SHOWN = 3  # lost pods
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
    decisions = list(_v1(job)) if job.rules.family == "v1" else _jobs(job)
    decisions += _crash_loops(job)
    if not any(isinstance(decision, Condition) for decision in decisions):
        decisions = list(_cannot_run(job, is_retried=bool(decisions))) or decisions
    fatal = [decision for decision in decisions if isinstance(decision, Condition) or decision.is_whole]
    fatal.sort(key=lambda decision: isinstance(decision, Condition) and decision.is_victims)
    end, lost = next(iter(fatal), None), [name for name, state in job.states.items() if state.is_lost]
    if isinstance(end, Condition) and end.is_victims and lost:
        return [replace(end, message=f"{listed(lost, _SHOWN)}: deleted, and not created again; {end.message}")]
    return fatal[:1] or decisions


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


def _cannot_run(job: State, *, is_retried: bool) -> Iterator[Condition]:
    """A program that cannot be run, which its kubelet would restart, or its controller in a new pod."""
    for name, state in job.states.items():
        for container, code in state.codes.items():
            restarts = container in state.due_s or (is_retried and state.phase is Phase.FAILED)
            if restarts and exit_codes.cannot_run(code):
                why = f"ended with {code} ({exit_codes.describe(code)})"
                yield Condition(False, CANNOT_RUN, f"container {container} of {name} {why}; {_NO_RETRY}", code)


def _crash_loops(job: State) -> Iterator[Decision]:
    """What would be started again for ever: a rehearsal gives up, and says so."""
    for name, state in job.states.items():
        count = max(state.most_restarts, state.failures - job.counted)
        if count >= GIVE_UP and job.age_s < count * _SHORT_LIFE_S:
            text = f"{name} was restarted {count} times; a cluster would continue, the rehearsal gives up"
            yield failure_of(job, name, "CrashLoopBackOff", text)


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
            yield _again(job, name)
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


def _again(job: State, name: str, wait_s: float = 0.0, of: str | None = None) -> Recreate:
    code = code_of(job.pods[name], job.states[name])
    text = f"{name} failed (exit code {code}): the controller recreates it"
    return Recreate(pods=(name,), text=text, wait_s=wait_s, of=of)


def _word(job: State) -> str:
    """The kind as reasons begin with it."""
    return job.kind.partition(" ")[0]


RESTART = "RestartJobSet"  # what a failurePolicy does where none of its rules fits


def _jobs(job: State) -> list[Decision]:
    """What all Jobs ask for, and what the JobSet makes of those that have failed."""
    decisions = [decision for child, rules in job.rules.children.items() for decision in _job(job, child, rules)]
    failed = [decision for decision in decisions if isinstance(decision, Condition)]
    return [_of_set(job, failed)] if failed else decisions


def _of_set(job: State, failed: Sequence[Condition]) -> Decision:
    """The first rule that fits any Job, else a restart, as long as the limit allows one."""
    fitting = ((rule.action, end) for rule in job.rules.set_rules for end in failed if _fits(job, rule, end))
    action, end = next(fitting, (RESTART, failed[0]))
    limit, counts = job.rules.max_restarts, action == RESTART
    if action == "FailJobSet":
        return replace(end, message=f"{end.message}; its failurePolicy fails the JobSet")
    if counts and job.counted >= limit:
        allowed = f"; its maxRestarts allow {counted(limit, 'restart')}" if limit else ""
        return replace(end, message=end.message + allowed)
    which = f"{job.counted + 1} of {limit}" if counts else "does not count"
    text = f"{end.message}: the controller restarts all pods ({which})"
    return Recreate(pods=tuple(job.pods), text=text, is_whole=True, counts=counts)


def _fits(job: State, rule: SetRule, end: Condition) -> bool:
    whose = job.rules.children[job.pods[end.pod].draft.child].replicated
    return (not rule.reasons or end.reason in rule.reasons) and (not rule.jobs or whose in rule.jobs)


def _job(job: State, child: str, rules: ChildRules) -> Iterator[Decision]:
    """What one Job asks for; a condition is its failure."""
    own = {name: state for name, state in job.states.items() if job.pods[name].draft.child == child}
    restarts = sum(
        state.restart_count
        for name, state in own.items()
        if state.is_active and job.pods[name].draft.restart == "OnFailure"
    )
    if restarts and restarts >= max(rules.backoff_limit, 1):
        worst = max(own, key=lambda name: own[name].restart_count)
        text = f"Job {child}: {counted(restarts, 'container restart')}; backoffLimit is {rules.backoff_limit}"
        yield failure_of(job, worst, "BackoffLimitExceeded", text)
        return
    failed = {name: state for name, state in own.items() if state.phase is Phase.FAILED}
    before = job.failed.get(child, 0)
    for name, state in failed.items():
        action = next((rule.action for rule in rules.exit_rules if _matches(rule, state)), "Count")
        if action == "FailJob":
            text = f"Job {child}: {name} ended with a code that fails the Job"
            yield failure_of(job, name, "PodFailurePolicy", text)
        elif action == "Ignore":
            yield _again(job, name, back_off_s(state.failures + 1))
        else:
            yield _again(job, name, back_off_s(before + 1), of=child)
    count = before + len(failed)
    if failed and count > rules.backoff_limit:
        text = f"Job {child}: {counted(count, 'failed pod')}; backoffLimit is {rules.backoff_limit}"
        yield failure_of(job, next(iter(failed)), "BackoffLimitExceeded", text)


def _matches(rule: ExitRule, state: PodState) -> bool:
    """Whether some container's exit code, never 0, is one that the rule means."""
    codes = [code for name, code in state.codes.items() if code != 0 and rule.container in (None, name)]
    return any(map(rule.means, codes))
