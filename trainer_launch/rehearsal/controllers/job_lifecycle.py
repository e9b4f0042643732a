"""A whole job's life: pods and controller together, event by event. Pure; `driver.py` does the rest.

The controller looks at its pods' states and decides: start again, give up, or be content. v1:
pkg/controller.v1/common/pod.go, pkg/core/job.go. Jobs: Kubernetes' own Job controller, JobSet, mpi-operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.model import exit_codes
from trainer_launch.model.units import counted, listed
from trainer_launch.rehearsal.controllers import pod_lifecycle
from trainer_launch.rehearsal.controllers.pod_lifecycle import Action, Phase, PodState, back_off_s, next_due_s
from trainer_launch.rehearsal.controllers.pod_values import ChildRules, ExitRule, JobRules, Pod, Workload

CAUSE_S = 3.0  # between the end of a pod that lost a peer and that of the peer, which is to blame, at most
LINGER_S = 5.0  # after the end of a job whose cleanPodPolicy leaves its pods alone: to end by themselves
CANNOT_RUN = "ContainerCannotRun"
_SUCCEEDED = {
    "JobSet": "AllJobsCompleted",
    "Job": "CompletionsReached",
}  # reasons of other kinds begin with the kind
GIVE_UP = 6  # restarts of what lives for less than a minute on average: a cluster would go on for ever
_SHORT_LIFE_S = 60.0
_SHOWN = 3  # lost pods
_NO_RETRY = "a cluster would retry, the rehearsal stops because a restart will not help"
UNKNOWN_CODE = 48879  # 0xbeef: what the v1 operator takes when a container has no exit code; retryable
_RESTART = "RestartJobSet"  # what a failurePolicy does where none of its rules fits


class Condition(Struct, frozen=True):
    """How the job ended, or a Job of it."""

    succeeded: bool
    reason: str  # CamelCase
    message: str
    exit_code: int = 0
    pod: str = ""  # for which it failed, where it is one

    @property
    def text(self) -> str:
        """The end in words, with its reason."""
        return f"{'Succeeded' if self.succeeded else 'Failed'} ({self.reason}): {self.message}"

    @property
    def is_victims(self) -> bool:
        """Whether the pod ended because its peers did, or the network."""
        return not self.succeeded and self.exit_code == exit_codes.INFRASTRUCTURE


class Recreate(Struct, frozen=True, kw_only=True):
    """Delete these pods and make them anew, not before a time has passed."""

    pods: tuple[str, ...]
    text: str  # for people
    wait_s: float = 0.0
    of: str | None = None  # the Job of which the pod counts as failed
    is_whole: bool = False  # the JobSet restarts
    counts: bool = False  # towards the limit of its failurePolicy


Decision = Condition | Recreate


class JobRecord(Struct, frozen=True, kw_only=True):
    """How the job stands."""

    kind: str
    pods: Mapping[str, Pod]
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
    def age_s(self) -> float:
        """For how long the job has run."""
        return self.now_s - self.began_s

    @property
    def is_done(self) -> bool:
        """Whether the job has ended, and nothing of it runs."""
        over = self.condition is not None or self.asked > 0
        return over and not any(state.running for state in self.states.values())

    def due_s(self) -> float | None:
        """When something is to happen without an event."""
        times = [at_s for state in self.states.values() if (at_s := next_due_s(state)) is not None]
        if self.condition is None and not self.asked:
            times += [pod.not_before_s for pod in self.states.values() if pod.phase is Phase.PENDING and pod.starts]
            times += [self.held_until_s] if self.held_until_s is not None else []
        if self.stop_at_s is not None:
            times.append(self.stop_at_s)
        return min(times, default=None)


def failure_of(job: JobRecord, pod: str, reason: str, text: str) -> Condition:
    """The failure of the job because of this pod."""
    return Condition(False, reason, text, code_of(job.pods[pod], job.states[pod]), pod)


def code_of(pod: Pod, state: PodState) -> int:
    """The pod's exit code: that of the container that counts, else of one that failed, else 1."""
    main = state.codes.get(pod.draft.main)
    others = [code for code in state.codes.values() if code != 0]
    return main or (others[-1] if others else exit_codes.FAILED)


def decide(job: JobRecord) -> list[Decision]:
    """The controller's decisions now; none most of the time."""
    if _has_succeeded(job):
        reason = _SUCCEEDED.get(job.kind, f"{_word(job)}Succeeded")
        return [Condition(True, reason, f"{job.kind} has completed")]
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


def _has_succeeded(job: JobRecord) -> bool:
    done = {name for name, state in job.states.items() if state.phase is Phase.SUCCEEDED}
    over = {name for name, state in job.states.items() if not state.running}
    spares = job.rules.success.spares
    groups = [
        set(group) <= (done | over) and len(set(group) - done) <= spares
        for group in job.rules.success.groups
        if group
    ]
    return bool(groups) and (any(groups) if job.rules.success.any_of else all(groups))


def _cannot_run(job: JobRecord, *, is_retried: bool) -> Iterator[Condition]:
    """A program that cannot be run, which its kubelet would restart, or its controller in a new pod."""
    for name, state in job.states.items():
        for container, code in state.codes.items():
            restarts = container in state.due_s or (is_retried and state.phase is Phase.FAILED)
            if restarts and exit_codes.cannot_run(code):
                why = f"ended with {code} ({exit_codes.describe(code)})"
                yield Condition(False, CANNOT_RUN, f"container {container} of {name} {why}; {_NO_RETRY}", code)


def _crash_loops(job: JobRecord) -> Iterator[Decision]:
    """Pods that a cluster would start again for ever: a rehearsal gives up."""
    for name, state in job.states.items():
        count = max(*state.restarts.values(), 0, state.failures - job.counted)
        if count >= GIVE_UP and job.age_s < count * _SHORT_LIFE_S:
            text = f"{name} was restarted {count} times; a cluster would continue, the rehearsal gives up"
            yield failure_of(job, name, "CrashLoopBackOff", text)


def _v1(job: JobRecord) -> Iterator[Decision]:
    n_failed = sum(state.phase is Phase.FAILED for state in job.states.values())
    for name, state in job.states.items():
        if state.phase is not Phase.FAILED or n_failed <= job.rules.success.spares:
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


def _again(job: JobRecord, name: str, wait_s: float = 0.0, of: str | None = None) -> Recreate:
    code = code_of(job.pods[name], job.states[name])
    text = f"{name} failed (exit code {code}): the controller recreates it"
    return Recreate(pods=(name,), text=text, wait_s=wait_s, of=of)


def _word(job: JobRecord) -> str:
    """The kind as reasons begin with it."""
    return job.kind.partition(" ")[0]


def _jobs(job: JobRecord) -> list[Decision]:
    """The decisions of all Jobs, and the JobSet's about those that have failed."""
    decisions = [decision for child, rules in job.rules.children.items() for decision in _job(job, child, rules)]
    failed = [decision for decision in decisions if isinstance(decision, Condition)]
    return [_of_set(job, failed)] if failed else decisions


def _of_set(job: JobRecord, failed: Sequence[Condition]) -> Decision:
    """The first rule that fits any Job, else a restart, as long as the limit allows one."""
    pairs = ((rule, end) for rule in job.rules.set_rules for end in failed)
    fitting = ((rule.action, end) for rule, end in pairs if not rule.reasons or end.reason in rule.reasons)
    action, end = next(fitting, (_RESTART, failed[0]))
    limit, counts = job.rules.max_restarts, action == _RESTART
    if action == "FailJobSet":
        return replace(end, message=f"{end.message}; its failurePolicy fails the JobSet")
    if counts and job.counted >= limit:
        allowed = f"; its maxRestarts allow {counted(limit, 'restart')}" if limit else ""
        return replace(end, message=end.message + allowed)
    which = f"{job.counted + 1} of {limit}" if counts else "does not count"
    text = f"{end.message}: the controller restarts all pods ({which})"
    return Recreate(pods=tuple(job.pods), text=text, is_whole=True, counts=counts)


def _job(job: JobRecord, child: str, rules: ChildRules) -> Iterator[Decision]:
    """The decisions of a Job; a condition is its failure."""
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


class Exited(Struct, frozen=True):
    """A container has ended; its code is 128 + n when a signal ended it."""

    at_s: float
    pod: str
    container: str
    code: int


class Due(Struct, frozen=True):
    """Time has passed."""

    at_s: float


class StopAsked(Struct, frozen=True):
    """A signal asks the rehearsal to end."""

    at_s: float
    grace_s: float


class PodDeleted(Struct, frozen=True):
    """A pod is deleted, or its node goes: its containers are asked to end, with 0 s of grace killed at once.

    `back_s` after it is gone its controller makes it anew, with None never. A deletion counts as no failure.
    """

    at_s: float
    pod: str
    grace_s: float
    back_s: float | None


Event = Exited | Due | StopAsked | PodDeleted
Step = tuple[JobRecord, list[Action], list[str]]  # and sentences for people


def begin(workload: Workload, pods: tuple[Pod, ...], now_s: float) -> Step:
    """Start all pods that wait for no other Job."""
    state = JobRecord(
        kind=workload.kind,
        pods={pod.name: pod for pod in pods},
        rules=workload.rules,
        states={pod.name: PodState() for pod in pods},
        began_s=now_s,
    )
    return _settle(state, now_s)


def step(state: JobRecord, event: Event) -> Step:
    """The state after an event, what is to be done, and sentences for people."""
    actions: list[Action] = []
    waits: list[str] = []
    if isinstance(event, Exited):
        pod = state.pods[event.pod]
        changed, actions = pod_lifecycle.exited(
            pod, state.states[event.pod], event.container, event.code, event.at_s
        )
        state, waits = _with(state, event.pod, changed), _waits(pod, event.container, changed)
    elif isinstance(event, StopAsked):
        state = replace(state, asked=state.asked + 1, grace_s=event.grace_s)
        state, actions = _stop_all(state, event.at_s, kill=state.asked > 1)
        return state, actions, []
    elif isinstance(event, PodDeleted):
        pod = state.pods[event.pod]
        changed, actions = pod_lifecycle.deleted(
            pod, state.states[pod.name], event.at_s, event.grace_s, event.back_s
        )
        state = _with(state, pod.name, changed)
    for name in state.pods:
        changed, more = pod_lifecycle.due(state.pods[name], state.states[name], event.at_s)
        state, actions = _with(state, name, changed), actions + more
    state, more, sentences = _settle(state, event.at_s)
    return state, actions + more, waits + sentences


def _waits(pod: Pod, name: str, state: PodState) -> list[str]:
    """A sentence about a pod whose training has ended, but not its other containers."""
    left = sorted(state.running & {container.name for container in pod.containers})
    if name != pod.draft.main or not left or not state.is_active or name in state.due_s:
        return []
    return [
        f"{pod.name}: {name} has ended with exit code {state.codes[name]}, and the pod waits for "
        f"{', '.join(left)}; an init container with restartPolicy: Always would end with it"
    ]


def _settle(state: JobRecord, now_s: float) -> Step:
    """Let the controller decide until it has nothing more to decide."""
    actions: list[Action] = []
    sentences: list[str] = []
    if state.asked:
        return state, actions, sentences
    if state.condition is None:
        state, decisions = _held(state, decide(replace(state, now_s=now_s)), now_s)
        for decision in decisions:
            state, more, text = _apply(state, decision, now_s)
            actions, sentences = actions + more, sentences + text
    if state.condition is None:
        state, more = _start_ready(state, now_s)
        actions += more
        if _is_stuck(state.states, now_s):
            state = replace(state, condition=_without_the_lost(state.states))
    elif state.stop_at_s is not None and now_s >= state.stop_at_s:
        state, more = _stop_all(replace(state, stop_at_s=None), now_s)
        actions += more
        left = sorted({action.pod for action in more})
        sentences += [f"stopped after the end of the job: {', '.join(left)}"] if left else []
    return state, actions, sentences


def _held(state: JobRecord, decisions: list[Decision], now_s: float) -> tuple[JobRecord, list[Decision]]:
    """A pod that lost a peer may end a moment before that peer, the cause, which gets time to end."""
    end = decisions[0] if decisions else None
    is_active = any(pod.is_active for pod in state.states.values())
    if not isinstance(end, Condition) or not end.is_victims or not is_active:
        return state, decisions
    until_s = now_s + CAUSE_S if state.held_until_s is None else state.held_until_s
    return replace(state, held_until_s=until_s), decisions if now_s >= until_s else []


def _apply(state: JobRecord, decision: Decision, now_s: float) -> Step:
    if isinstance(decision, Condition):
        state = replace(state, condition=decision)
        if state.rules.clean == "None" and decision.reason != CANNOT_RUN:
            return replace(state, stop_at_s=now_s + LINGER_S), [], []
        return (*_stop_all(state, now_s), [])
    actions: list[Action] = []
    for name in decision.pods:
        before = state.states[name]
        if not before.stopping:  # what still runs of it has its next life when it has ended
            before = replace(before, back_s=decision.wait_s)
        pod, more = pod_lifecycle.stopped(state.pods[name], before, now_s, _grace_s(state, name), Phase.PENDING)
        if not pod.running and pod.phase is not Phase.GONE:
            pod = replace(pod, phase=Phase.PENDING, not_before_s=now_s + decision.wait_s)
        state, actions = _with(state, name, pod), actions + more
    failed = {} if decision.is_whole else dict(state.failed)
    if decision.of is not None:
        failed[decision.of] = failed.get(decision.of, 0) + 1
    return replace(state, failed=failed, counted=state.counted + decision.counts), actions, [decision.text]


def _start_ready(state: JobRecord, now_s: float) -> tuple[JobRecord, list[Action]]:
    """Start the pods that are due and whose predecessors are ready, or complete."""
    actions: list[Action] = []
    for name, pod in [*state.pods.items(), *state.pods.items()]:  # twice: a pod may have waited for a later pod
        old = state.states[name]
        is_due = old.phase is Phase.PENDING and not old.running and now_s >= old.not_before_s
        if is_due and _may_start(pod, state.pods, state.states):
            born, more = pod_lifecycle.born(pod, old)
            state, actions = _with(state, name, born), actions + more
    return state, actions


def _stop_all(state: JobRecord, now_s: float, *, kill: bool = False) -> tuple[JobRecord, list[Action]]:
    actions: list[Action] = []
    for name, pod in state.pods.items():
        old = state.states[name]
        if kill:
            actions += [pod_lifecycle.Stop(name, container, kill=True) for container in sorted(old.running)]
            continue
        changed, more = pod_lifecycle.stopped(pod, old, now_s, _grace_s(state, name))
        state, actions = _with(state, name, changed), actions + more
    return state, actions


def _grace_s(state: JobRecord, name: str) -> float:
    return state.pods[name].draft.template.grace_s if state.grace_s is None else state.grace_s


def _with(state: JobRecord, name: str, pod: PodState) -> JobRecord:
    return replace(state, states={**state.states, name: pod})


States = Mapping[str, PodState]


def _may_start(pod: Pod, pods: Mapping[str, Pod], states: States) -> bool:
    """Whether its Job's predecessors are ready, or complete, and nothing of its Job's last life runs any more."""
    own = (states[name] for name, other in pods.items() if other.draft.child == pod.draft.child)
    if any(old.stopping and old.running and old.stop_as is Phase.PENDING and not old.disrupted for old in own):
        return False
    for condition in pod.draft.after:
        child, _, status = condition.partition("=")
        phases = [states[name].phase for name, other in pods.items() if other.draft.child == child]
        wanted = (Phase.SUCCEEDED,) if status == "Complete" else (Phase.RUNNING, Phase.SUCCEEDED)
        if not all(phase in wanted for phase in phases):
            return False
    return True


def _is_stuck(states: States, now_s: float) -> bool:
    """Whether nothing runs or will by itself, and the job has not ended: a pod that it needs never comes back."""
    return not any(
        pod.running or pod.due_s or (pod.phase is Phase.PENDING and pod.not_before_s > now_s)
        for pod in states.values()
    )


def _without_the_lost(states: States) -> Condition:
    """The end of a job that is stuck."""
    lost = [name for name, pod in states.items() if pod.phase is not Phase.SUCCEEDED]
    text = f"no pod runs any more, and the job cannot complete without {', '.join(lost)}"
    return Condition(False, "PodLost", text, exit_codes.INFRASTRUCTURE)
