"""A fault on purpose, and when it comes: the values that the grammar, the timeline and who does it share. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """When a fault comes: exactly one of the three is set."""

    at_s: float | None = None  # after the beginning of the rehearsal
    step: int | None = None  # when the job reaches this step, by report() or by a line such as "step 40"
    line: str | None = None  # when a pod says a line that this regular expression is found in


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, once."""

    kind: str  # "kill worker", "stop worker", "kill pod", "term pod", "add node", "partition", "slow link",
    # "delay dns", "fill shm", "oom"
    when: When
    node: int | None = None  # index of the pod; None with no `pod`: the last node of the job
    pod: str | None = None  # by name, in place of `node`
    local_rank: int = 0  # which worker of the node
    for_s: float | None = None  # how long it lasts; None: as long as the job, or it is over at once
    grace_s: float | None = None  # of "term pod": until SIGKILL
    back_s: float | None = 1.0  # of "kill pod" and "term pod": until it is made anew; None: never
    bytes_per_s: float | None = None  # of "slow link"
    text: str = ""  # its canonical text (`grammar.render`): what people are shown, and what a replay takes
