"""The life of a pod, as its kubelet has it: init containers, then all others; restarts with back-off. Pure.

Times are monotonic seconds. The back-off is a tenth of the kubelet's: a rehearsal is for people who wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.model import exit_codes
from trainer_launch.rehearsal.controllers.pod_values import Container, Pod

BACK_OFF_S = 1.0  # before the second restart, doubled before each further one; the first is at once
MAX_BACK_OFF_S = 30.0


class Phase(str, Enum):
    """Where a pod is in its life."""

    PENDING = "Pending"  # not started: it waits for others, or for its time
    INIT = "Init"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    GONE = "Terminated"  # deleted, not to come back


class Start(Struct, frozen=True):
    """Start this container of this pod."""

    pod: str
    container: str


class Stop(Struct, frozen=True):
    """Ask this container to end, or with `kill` end it."""

    pod: str
    container: str
    kill: bool = False


Action = Start | Stop


class PodState(Struct, frozen=True, kw_only=True):
    """How a pod stands."""

    phase: Phase = Phase.PENDING
    step: int = 0  # which init container
    running: frozenset[str] = frozenset()
    codes: Mapping[str, int] = field(default_factory=dict)  # exit code of each container's last run
    restarts: Mapping[str, int] = field(default_factory=dict)  # by container, in this life
    due_s: Mapping[str, float] = field(default_factory=dict)  # containers that wait for their next start
    not_before_s: float = 0.0  # of the pod itself, made again
    back_s: float = 0.0  # from its end to its next life, when it was deleted
    starts: int = 0  # lives, this one counted
    deleted: int = 0  # how many of them a deletion of the pod has ended
    disrupted: bool = False  # this one, too
    stopping: bool = False
    stop_as: Phase = Phase.GONE  # what it is when it has stopped
    kill_at_s: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing of it will run again by itself."""
        return self.phase in (Phase.SUCCEEDED, Phase.FAILED, Phase.GONE)

    @property
    def is_lost(self) -> bool:
        """Whether the pod was deleted for good."""
        return self.phase is Phase.GONE and self.disrupted

    @property
    def is_active(self) -> bool:
        """Whether the pod has begun and was not asked to end."""
        return self.phase in (Phase.INIT, Phase.RUNNING) and not self.stopping

    @property
    def restart_count(self) -> int:
        """Restarts in place of all its containers."""
        return sum(self.restarts.values())

    @property
    def failures(self) -> int:
        """Lives that ended otherwise than by a deletion of the pod."""
        return max(0, self.starts - 1 - self.deleted)


def born(pod: Pod, state: PodState) -> tuple[PodState, list[Action]]:
    """A new life begins."""
    return _next_step(pod, PodState(phase=Phase.INIT, starts=state.starts + 1, deleted=state.deleted), 0)


def exited(pod: Pod, state: PodState, name: str, code: int, now_s: float) -> tuple[PodState, list[Action]]:
    """A container has ended."""
    state = replace(state, running=state.running - {name}, codes={**state.codes, name: code})
    if state.stopping:
        gone = replace(state, phase=state.stop_as, kill_at_s=None, not_before_s=now_s + state.back_s)
        return (state if state.running else gone), []
    if state.is_over:
        return state, []
    if _restarts(pod, name, code):
        return _waiting(state, name, now_s), []
    if state.phase is Phase.INIT:
        if code != 0:
            return _over(pod, state, Phase.FAILED)
        return _next_step(pod, state, state.step + 1)
    names = {container.name for container in pod.containers}
    if names & (state.running | state.due_s.keys()):
        return state, []
    has_failed = any(state.codes.get(name, exit_codes.FAILED) != exit_codes.SUCCEEDED for name in names)
    return _over(pod, state, Phase.FAILED if has_failed else Phase.SUCCEEDED)


def due(pod: Pod, state: PodState, now_s: float) -> tuple[PodState, list[Action]]:
    """Start what has waited long enough; kill what did not end in time."""
    if state.kill_at_s is not None and now_s >= state.kill_at_s:
        return replace(state, kill_at_s=None), _stops(pod, state, kill=True)
    ready = [name for name, at_s in state.due_s.items() if now_s >= at_s]
    if not ready or state.stopping or state.is_over:
        return state, []
    waits = {name: at_s for name, at_s in state.due_s.items() if name not in ready}
    started: list[Action] = [Start(pod.name, name) for name in ready]
    return replace(state, due_s=waits, running=state.running | set(ready)), started


def stopped(
    pod: Pod, state: PodState, now_s: float, grace_s: float, stop_as: Phase = Phase.GONE
) -> tuple[PodState, list[Action]]:
    """Ask the whole pod to end; what has ended by itself stays as it is."""
    if state.is_over and not state.running:
        return state, []
    if not state.running:
        return replace(state, phase=stop_as, due_s={}, stopping=True), []
    if state.stopping:  # deleted before: the end of the job leaves it no more time, and no further life
        kill_at_s = None if state.kill_at_s is None else min(state.kill_at_s, now_s + grace_s)
        last = stop_as if stop_as is Phase.GONE else state.stop_as
        return replace(state, kill_at_s=kill_at_s, stop_as=last), []
    if state.is_over and stop_as is Phase.GONE:  # only its sidecars still run
        stop_as = state.phase
    return replace(state, stopping=True, stop_as=stop_as, due_s={}, kill_at_s=now_s + grace_s), _stops(pod, state)


def deleted(
    pod: Pod, state: PodState, now_s: float, grace_s: float, back_s: float | None
) -> tuple[PodState, list[Action]]:
    """The pod is deleted; `back_s` after it is gone it is made anew, never with None. No failure."""
    if state.is_over:
        return state, []
    asked: list[Action] = []
    if not state.stopping:
        wait_s = back_s or 0.0
        deletions = state.deleted + 1
        state = replace(state, deleted=deletions, disrupted=True, back_s=wait_s, not_before_s=now_s + wait_s)
        state, asked = stopped(pod, state, now_s, grace_s, Phase.GONE if back_s is None else Phase.PENDING)
    if grace_s > 0:
        return state, asked
    return replace(state, kill_at_s=None), _stops(pod, state, kill=True)


def next_due_s(state: PodState) -> float | None:
    """When this pod wants to be looked at."""
    times = (*state.due_s.values(), state.kill_at_s)
    return min((at_s for at_s in times if at_s is not None), default=None)


def back_off_s(times: int) -> float:
    """The wait before the next restart after so many."""
    return min(BACK_OFF_S * 2.0 ** min(max(times - 1, 0), 16), MAX_BACK_OFF_S)


def own_init(pod: Pod) -> list[Container]:
    """The init containers that a rehearsal runs: not those that the platform adds for itself."""
    return [container for container in pod.init if not container.platforms]


def _next_step(pod: Pod, state: PodState, step: int) -> tuple[PodState, list[Action]]:
    """The next init container that is to end, sidecars before it started beside; after the last the main ones."""
    actions: list[Action] = []
    running = set(state.running)
    waiting = own_init(pod)[step:]
    for container in waiting:
        actions.append(Start(pod.name, container.name))
        running.add(container.name)
        if not container.sidecar:
            return replace(state, step=step, running=frozenset(running)), actions
        step += 1
    names = [container.name for container in pod.containers]
    actions += [Start(pod.name, name) for name in names]
    return replace(state, phase=Phase.RUNNING, step=step, running=frozenset({*running, *names})), actions


def _restarts(pod: Pod, name: str, code: int) -> bool:
    """Whether the kubelet starts it again in place; ExitCode is Never to it."""
    container = pod.container(name)
    if code == 0 and not container.sidecar and container in pod.init:
        return False
    policy = container.restart or pod.draft.restart
    always = container.sidecar or policy == "Always" or any(rule.means(code) for rule in container.restart_rules)
    return always or (policy == "OnFailure" and code != 0)


def _waiting(state: PodState, name: str, now_s: float) -> PodState:
    """The first restart is at once, unless the program cannot be run."""
    before = state.restarts.get(name, 0)
    is_at_once = before == 0 and not exit_codes.cannot_run(state.codes.get(name))
    at_s = now_s if is_at_once else now_s + back_off_s(before)
    return replace(state, restarts={**state.restarts, name: before + 1}, due_s={**state.due_s, name: at_s})


def _over(pod: Pod, state: PodState, phase: Phase) -> tuple[PodState, list[Action]]:
    """The pod has ended: what still runs of it, as its sidecars do, ends too."""
    return replace(state, phase=phase, due_s={}), _stops(pod, state, kill=True)


def _stops(pod: Pod, state: PodState, *, kill: bool = False) -> list[Action]:
    return [Stop(pod.name, name, kill=kill) for name in sorted(state.running)]
