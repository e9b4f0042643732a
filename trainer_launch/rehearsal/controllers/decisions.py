"""What a controller can decide, and all that it goes by: values that `judge`, `jobs` and `machine` share. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer_launch.model import exit_codes
from trainer_launch.rehearsal.controllers.pod_lifecycle import PodState
from trainer_launch.rehearsal.controllers.pod_values import Pod, Rules

CANNOT_RUN = "ContainerCannotRun"


@dataclass(frozen=True, slots=True)
class Condition:
    """How the job ended."""

    succeeded: bool
    reason: str  # CamelCase
    message: str
    exit_code: int = 0
    pod: str = field(default="", compare=False)  # for which it failed, where it is one

    @property
    def is_victims(self) -> bool:
        """Whether it is told by one that ended because its peers did, or the network."""
        return not self.succeeded and self.exit_code == exit_codes.INFRASTRUCTURE

    @property
    def is_given_up(self) -> bool:
        """Whether the rehearsal ends it, because no restart makes a program that can be run of one that cannot."""
        return not self.succeeded and self.reason == CANNOT_RUN


@dataclass(frozen=True, slots=True)
class Again:
    """Delete this pod and make it anew, not before a time has passed; `counts` names the counters that go up."""

    pod: str
    wait_s: float = 0.0
    counts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AllAgain:
    """Make all pods anew: JobSet restarts, or one of its Jobs; `counts` towards its failurePolicy's limit."""

    because: Condition
    counts: bool = True
    child: str | None = None  # only this Job


Decision = Condition | Again | AllAgain


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that a controller sees."""

    kind: str
    pods: Mapping[str, Pod]
    rules: Rules
    states: Mapping[str, PodState]
    failed: Mapping[str, int] = field(default_factory=dict)  # pods of a Job, or an index, that were made anew
    counted: int = 0  # restarts of the JobSet, or of its Jobs, that its limit is for
    ages_s: Mapping[str, float] = field(default_factory=dict)  # of each Job that has begun
    age_s: float = 0.0


def failure_of(view: View, pod: str, reason: str, text: str) -> Condition:
    """The job fails because of this pod."""
    return Condition(False, reason, text, code_of(view.pods[pod], view.states[pod]), pod)


def code_of(pod: Pod, state: PodState) -> int:
    """The exit code to tell: that of the container that counts, else of one that failed, else 1."""
    main = state.codes.get(pod.draft.main)
    others = [code for code in state.codes.values() if code != 0]
    return main or (others[-1] if others else exit_codes.FAILED)
