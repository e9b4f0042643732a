"""When a pod may start, and when nothing ever will again. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from trainer_launch.model import exit_codes
from trainer_launch.rehearsal.controllers.decisions import Condition
from trainer_launch.rehearsal.controllers.pod_lifecycle import Phase, PodState
from trainer_launch.rehearsal.controllers.pod_values import Pod, Rules

States = Mapping[str, PodState]


def may_start(pod: Pod, pods: Mapping[str, Pod], states: States, rules: Rules) -> bool:
    """Whether its Job's predecessors are ready, or complete, and nothing of its Job's last life runs any more."""
    if _old_ones_run(pod, pods, states, rules):
        return False
    for condition in pod.draft.after:
        child, _, status = condition.partition("=")
        phases = [states[name].phase for name, other in pods.items() if other.draft.child == child]
        wanted = (Phase.SUCCEEDED,) if status == "Complete" else (Phase.RUNNING, Phase.SUCCEEDED)
        if not all(phase in wanted for phase in phases):
            return False
    return True


def _old_ones_run(pod: Pod, pods: Mapping[str, Pod], states: States, rules: Rules) -> bool:
    """Pods that have to start again and still run: of the same Job, or any where the JobSet waits for all."""
    return any(
        one.stopping and one.running and one.stop_as is Phase.PENDING and not one.disrupted
        for name, one in states.items()
        if rules.is_blocking or (pod.draft.child and pods[name].draft.child == pod.draft.child)
    )


def is_stuck(states: States, now_s: float) -> bool:
    """Whether nothing runs or will by itself, and the job has not ended: a pod that it needs never comes back."""
    return not any(
        one.running or one.due_s or (one.phase is Phase.PENDING and one.not_before_s > now_s)
        for one in states.values()
    )


def without_the_lost(states: States) -> Condition:
    """How a job ends that is stuck."""
    lost = [name for name, one in states.items() if one.phase is not Phase.SUCCEEDED]
    text = f"no pod runs any more, and the job cannot complete without {', '.join(lost)}"
    return Condition(False, "PodLost", text, exit_codes.INFRASTRUCTURE)
