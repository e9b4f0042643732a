"""A job on paper: its containers end as a test says, and time passes as a test says."""

from __future__ import annotations

from tests.rehearsal.controllers.manifests import job_of
from trainer_launch.rehearsal.controllers import job_lifecycle
from trainer_launch.rehearsal.controllers.pod_lifecycle import Action, Start, Stop
from trainer_launch.rehearsal.controllers.pod_values import pods as pods


class Job:
    """The machine, and what it has asked for so far."""

    def __init__(self, *manifests: str) -> None:
        workload = job_of(*manifests)
        self.ignored = workload.ignored
        self.now_s = 100.0
        self.said: list[str] = []
        self.state, actions, said = job_lifecycle.begin(workload, pods(workload), self.now_s)
        self.began = self._take(actions, said)

    def end(self, pod: str, code: int = 0, container: str | None = None) -> list[str]:
        """A container ends (the one that counts, unless it is named); what is asked for then."""
        name = container or self.state.pods[pod].draft.main
        assert name in self.state.states[pod].running, f"{pod}/{name} does not run"
        return self._step(job_lifecycle.Exited(self.now_s, pod, name, code))

    def wait(self, seconds: float) -> list[str]:
        """Time passes."""
        self.now_s += seconds
        return self._step(job_lifecycle.Due(self.now_s))

    def go(self, steps: str) -> Job:
        """Several ends and waits: `worker-0=1 +60 worker-0/side=0`, pods by their names without the job's."""
        name = next(iter(self.state.pods.values())).draft.hostname.partition("-")[0]
        for step in steps.split():
            if step.startswith("+"):
                self.wait(float(step))
                continue
            place, _, code = step.partition("=")
            pod, _, container = place.partition("/")
            self.end(f"{name}-{pod}", int(code), container or None)
        return self

    def stop(self, grace_s: float = 5.0) -> list[str]:
        """Somebody presses Ctrl-C."""
        return self._step(job_lifecycle.StopAsked(self.now_s, grace_s))

    def delete(self, pod: str, grace_s: float = 0.0, back_s: float | None = 1.0) -> list[str]:
        """Somebody deletes a pod."""
        return self._step(job_lifecycle.PodDeleted(self.now_s, pod, grace_s, back_s))

    def finish(self) -> None:
        """Whoever is asked to end does, with 0."""
        while any(state.stopping and state.running for state in self.state.states.values()):
            name, state = next((n, s) for n, s in self.state.states.items() if s.stopping and s.running)
            self._step(job_lifecycle.Exited(self.now_s, name, min(state.running), 0))

    @property
    def verdict(self) -> tuple[bool, str] | None:
        """Whether it has succeeded, and the reason; None while it has not ended."""
        condition = self.state.condition
        return None if condition is None else (condition.succeeded, condition.reason)

    @property
    def code(self) -> int:
        """The exit code of a job that has ended."""
        assert self.state.condition is not None
        return self.state.condition.exit_code

    @property
    def message(self) -> str:
        """Why it has ended."""
        assert self.state.condition is not None
        return self.state.condition.message

    def phase(self, pod: str) -> str:
        return self.state.states[pod].phase.value

    def _step(self, event: job_lifecycle.Event) -> list[str]:
        self.state, actions, said = job_lifecycle.step(self.state, event)
        return self._take(actions, said)

    def _take(self, actions: list[Action], said: list[str]) -> list[str]:
        self.said += said
        return [_written(action) for action in actions]


def _written(action: Action) -> str:
    if isinstance(action, Start):
        return f"start {action.pod}/{action.container}"
    assert isinstance(action, Stop)
    return f"{'kill' if action.kill else 'stop'} {action.pod}/{action.container}"
