"""What happened in a rehearsal, in its order: the live table, the picture and the verdict are made of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class What(str, Enum):
    """What can happen."""

    POD_STARTED = "pod started"  # a life of a pod begins; `attempt` counts its lives from 1
    POD_ENDED = "pod ended"  # `text` is its phase, such as Succeeded, Failed, Gone, Pending
    # `attempt` counts the starts of this container in this life from 1; `text` is "init" for one that ends first
    CONTAINER_STARTED = "container started"
    CONTAINER_ENDED = "container ended"  # `code` is its exit code
    STOP_ASKED = "stop asked"  # SIGTERM to a container; `text` says by whom: "fault", "controller" or "user"
    GENERATION = "generation"  # the pod's workers have met (again); `attempt` counts from 1
    STEP = "step"  # training has reached `step`; `text` is the line that says so, empty when the pod reports it
    FAULT = "fault"  # `text` is the fault as it was written; `pod` None: of all
    FAULT_OVER = "fault over"  # one that lasts has ended, same `text`
    FAULT_MISSED = "fault missed"  # it could not be carried out when its time came, or its time never came
    CONDITION = "condition"  # the job has ended; `text` says how, `code` is the rehearsal's exit code


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """One thing that happened."""

    at_s: float  # seconds since the rehearsal began
    what: What
    pod: str | None = None
    container: str | None = None
    attempt: int | None = None
    step: int | None = None
    code: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chronicle:
    """A whole rehearsal; `ended_s` is None while it runs."""

    kind: str  # of the job, such as TrainJob
    name: str
    pods: tuple[str, ...]  # in the order people expect them: node 0 first
    happenings: tuple[Happening, ...] = ()
    ended_s: float | None = None
    succeeded: bool | None = None
    seen: Mapping[str, str] | None = None  # the last line that each pod said
    words: Mapping[str, str] | None = None  # the first line of the termination message that each pod left
