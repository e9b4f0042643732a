"""A whole job's life: pods and controller together, event by event. Pure; `driver.py` does the rest."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.model import exit_codes
from trainer_launch.rehearsal.controllers import pod_lifecycle
from trainer_launch.rehearsal.controllers.pod_lifecycle import Action, Phase, PodState
from trainer_launch.rehearsal.controllers.pod_values import JobRules, Pod, Workload
from trainer_launch.rehearsal.controllers.restart_decisions import (
    CANNOT_RUN,
    Condition,
    Decision,
    State,
    decide,
)

CAUSE_S = 3.0  # between the end of who lost a peer and that of who is to blame, at most
LINGER_S = 5.0  # after the end of a job whose cleanPodPolicy leaves its pods alone: to end by themselves


class Exited(Struct, frozen=True):
    """A container has ended; 128 + n when a signal ended it."""

    at_s: float
    pod: str
    container: str
    code: int


class Due(Struct, frozen=True):
    """Time has passed."""

    at_s: float


class StopAsked(Struct, frozen=True):
    """Somebody wants the rehearsal to end."""

    at_s: float
    grace_s: float


class PodDeleted(Struct, frozen=True):
    """Somebody deletes a pod, or its node goes: its containers are asked to end, with 0 s of grace killed at once.

    `back_s` after it is gone its controller has made it anew; with None nobody does. It counts as no failure.
    """

    at_s: float
    pod: str
    grace_s: float
    back_s: float | None


class Scaled(Struct, frozen=True):
    """Somebody scales the job, up or down, by which its rules change as well."""

    at_s: float
    pods: tuple[Pod, ...]  # all that it has from now on
    rules: JobRules


Event = Exited | Due | StopAsked | PodDeleted | Scaled
Step = tuple[State, list[Action], list[str]]  # and what to tell


def begin(workload: Workload, pods: tuple[Pod, ...], now_s: float) -> Step:
    """All pods that wait for nobody start."""
    made_of = {pod.name: pod for pod in pods}
    state = State(
        kind=workload.kind,
        pods=made_of,
        made_of=made_of,
        rules=workload.rules,
        states={pod.name: PodState() for pod in pods},
        began_s=now_s,
    )
    return _settle(state, now_s)


def step(state: State, event: Event) -> Step:
    """What an event makes of the job, and what is to be done."""
    actions: list[Action] = []
    if isinstance(event, Exited):
        pod = state.pods[event.pod]
        changed, actions = pod_lifecycle.exited(
            pod, state.states[event.pod], event.container, event.code, event.at_s
        )
        state = _with(state, event.pod, changed)
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
    elif isinstance(event, Scaled):
        state, actions = _scaled(state, event)
    for name in state.pods:
        changed, more = pod_lifecycle.due(state.pods[name], state.states[name], event.at_s)
        state, actions = _with(state, name, changed), actions + more
    state, more, said = _settle(state, event.at_s)
    return state, actions + more, said


def _scaled(state: State, event: Scaled) -> tuple[State, list[Action]]:
    """Pods that are too many are deleted with their own grace period, missing ones are made (ReconcilePods)."""
    actions: list[Action] = []
    wanted = {pod.name: pod for pod in event.pods}
    state = replace(state, rules=event.rules, pods={**wanted, **state.pods}, made_of={**state.made_of, **wanted})
    for name, pod in state.pods.items():
        one = state.states.get(name, PodState())
        if name not in wanted and not one.removed:
            one, more = pod_lifecycle.deleted(pod, one, event.at_s, pod.draft.template.grace_s, None)
            actions += more
            gone = one.phase is Phase.PENDING and not one.running
            one = replace(one, removed=True, stop_as=Phase.GONE, phase=Phase.GONE if gone else one.phase)
        elif name in wanted and one.removed and one.running:
            one = replace(one, removed=False, stop_as=Phase.PENDING)
        elif name in wanted and one.removed:
            one = PodState(starts=one.starts, deleted=one.deleted)
        state = _with(state, name, one)
    return state, actions


def _settle(state: State, now_s: float) -> Step:
    """Let the controller decide until it has nothing more to decide."""
    actions: list[Action] = []
    said: list[str] = []
    if state.asked:
        return state, actions, said
    if state.condition is None:
        state, decisions = _held(state, decide(replace(state, now_s=now_s)), now_s)
        for decision in decisions:
            state, more, text = _apply(state, decision, now_s)
            actions, said = actions + more, said + text
    if state.condition is None:
        state, more = _start_ready(state, now_s)
        actions += more
        if is_stuck(state.states, now_s):
            state = replace(state, condition=without_the_lost(state.states))
    elif state.stop_at_s is not None and now_s >= state.stop_at_s:
        state, more = _stop_all(replace(state, stop_at_s=None), now_s)
        actions += more
        left = sorted({action.pod for action in more})
        said += [f"stopped after the end of the job: {', '.join(left)}"] if left else []
    return state, actions, said


def _held(state: State, decisions: list[Decision], now_s: float) -> tuple[State, list[Decision]]:
    """Who lost its peer may end a moment before that peer, which is the cause: it gets time to end."""
    end = decisions[0] if decisions else None
    if (
        not isinstance(end, Condition)
        or not end.is_victims
        or not any(one.is_active for one in state.states.values())
    ):
        return state, decisions
    until_s = now_s + CAUSE_S if state.held_until_s is None else state.held_until_s
    return replace(state, held_until_s=until_s), decisions if now_s >= until_s else []


def _apply(state: State, decision: Decision, now_s: float) -> Step:
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


def _start_ready(state: State, now_s: float) -> tuple[State, list[Action]]:
    """Start the pods that are due and whose predecessors are ready, or complete."""
    actions: list[Action] = []
    for name, pod in [*state.pods.items(), *state.pods.items()]:  # twice: one may have waited for a later one
        one = state.states[name]
        if (
            one.phase is Phase.PENDING
            and not one.running
            and now_s >= one.not_before_s
            and may_start(pod, state.pods, state.states)
        ):
            made = state.made_of[name]
            born, more = pod_lifecycle.born(made, one)
            state = _with(replace(state, pods={**state.pods, name: made}), name, born)
            actions += more
    return state, actions


def _stop_all(state: State, now_s: float, *, kill: bool = False) -> tuple[State, list[Action]]:
    actions: list[Action] = []
    for name, pod in state.pods.items():
        old = state.states[name]
        if kill:
            actions += [pod_lifecycle.Stop(name, container, kill=True) for container in sorted(old.running)]
            continue
        changed, more = pod_lifecycle.stopped(pod, old, now_s, _grace_s(state, name))
        state, actions = _with(state, name, changed), actions + more
    return state, actions


def _grace_s(state: State, name: str) -> float:
    return state.pods[name].draft.template.grace_s if state.grace_s is None else state.grace_s


def _with(state: State, name: str, pod: PodState) -> State:
    return replace(state, states={**state.states, name: pod})


States = Mapping[str, PodState]


def may_start(pod: Pod, pods: Mapping[str, Pod], states: States) -> bool:
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


def is_stuck(states: States, now_s: float) -> bool:
    """Whether nothing runs or will by itself, and the job has not ended: a pod that it needs never comes back."""
    return not any(
        one.running or one.due_s or (one.phase is Phase.PENDING and one.not_before_s > now_s)
        for one in states.values()
    )


def without_the_lost(states: States) -> Condition:
    """How a job ends that is stuck."""
    lost = [name for name, one in states.items() if one.phase is not Phase.SUCCEEDED and not one.removed]
    text = f"no pod runs any more, and the job cannot complete without {', '.join(lost)}"
    return Condition(False, "PodLost", text, exit_codes.INFRASTRUCTURE)
