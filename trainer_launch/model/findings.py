"""The findings of a preflight: one value for each sentence, one for all of them, and the pod's exit code.

Made by checks of one container, by comparisons between nodes and by tests of pairs alike. "Unknown" is a state of
its own: it counts neither as passed nor as failed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Annotated, NamedTuple, TypeAlias, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from trainer_launch.model import exit_codes
from trainer_launch.model.units import printable

Value: TypeAlias = bool | int | float | str | None


class Status(str, Enum):
    """How a check ended."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"  # it could not be found out
    SKIPPED = "skipped"  # it was not asked for, or means nothing here


class Fault(str, Enum):
    """Whose fault a failure is, and so whether another try may help."""

    JOB = "job"  # its settings, image, limits: the same everywhere, each time
    NODE = "node"  # this node or what surrounds it


class Scope(str, Enum):
    """The kind of thing that a finding is about."""

    NODE = "node"
    GPU = "gpu"
    RAIL = "rail"
    LINK = "link"
    JOB = "job"


class Basis(str, Enum):
    """The value that a measured value was compared with."""

    ABSOLUTE = "absolute"
    PEER = "peer"
    BOTH = "both"


class Severity(str, Enum):
    """How much a finding matters."""

    FATAL = "fatal"
    RETRYABLE = "retryable"
    WARNING = "warning"
    INFO = "info"


class PreflightVerdict(str, Enum):
    """All findings in a word."""

    PASS = "pass"
    UNKNOWN = "unknown"  # nothing failed, but not all that matters could be found out
    WARN = "warn"
    RETRYABLE = "retryable"
    FATAL = "fatal"


QUIET = (Status.PASS, Status.SKIPPED)  # which nobody has to read
_SEVERITIES = {Fault.JOB: Severity.FATAL, Fault.NODE: Severity.RETRYABLE}
_EXIT_CODES = {  # of verdicts that stop a pod
    PreflightVerdict.RETRYABLE: exit_codes.PREFLIGHT_RETRYABLE,
    PreflightVerdict.FATAL: exit_codes.PREFLIGHT_FATAL,
}


# What a program may do about a finding whose cause is certain: to the machine of its subject, or to the job.
OF_MACHINES = ("RESET", "REBOOT", "DRAIN", "RMA")
REMEDIES = (*OF_MACHINES, "FIX_JOB", "FIX_IMAGE")


class Finding(Struct, frozen=True, kw_only=True):
    """A sentence of a preflight."""

    check: str  # the check's stable name, by which a policy sets its severity
    status: Status
    text: str  # one sentence: what is, with its numbers
    scope: Scope = Scope.NODE
    subject: str = ""  # which node, GPU, rail or link; "": the node that looked
    fault: Fault | None = None  # of a failure, and only of that
    measured: Value = None
    expected: Value = None
    unit: str = ""
    basis: Basis | None = None  # what `measured` was compared with
    evidence: tuple[str, ...] = ()
    action: str = ""  # what to do
    remedy: Annotated[str, Meta(pattern="^[A-Z_]{0,20}$")] = ""  # the same for programs; "": the cause is unknown
    without_policy: Severity | None = None  # what the check itself makes of it, where a policy has changed that
    took_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0

    def __post_init__(self) -> None:
        if (self.status is Status.FAIL) != (self.fault is not None):
            raise ValueError(
                f"a failure, and nothing else, is somebody's fault: {self.check} is {self.status.value}"
            )

    @property
    def severity(self) -> Severity:
        """The severity that its status and fault come to."""
        if self.fault is not None:
            return _SEVERITIES[self.fault]
        return Severity.WARNING if self.status is Status.WARN else Severity.INFO

    def is_about(self, name: str) -> bool:
        """Whether it is about the node of this name, or names none: then it is about the node that looked."""
        return "node " not in self.subject or name in self.subject

    @property
    def proves_a_fault(self) -> bool:
        """Whether the check itself, and not a site's policy, finds the machine of its subject faulty."""
        is_here = self.scope in (Scope.NODE, Scope.GPU, Scope.RAIL)
        return is_here and self.fault is Fault.NODE and self.without_policy is None


def single_line(finding: Finding) -> Finding:
    """A finding with each of its texts in one line."""
    texts = {name: printable(text, " ") for name, text in asdict(finding).items() if type(text) is str}
    return replace(finding, **texts, evidence=tuple(printable(text, " ") for text in finding.evidence))


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """In the order in which a person should read them; those that weigh the same keep theirs."""
    order = list(Severity)
    return sorted(findings, key=lambda finding: (order.index(finding.severity), finding.status in QUIET))


class Report(Struct, frozen=True, kw_only=True):
    """All findings, in the order of the checks."""

    findings: tuple[Finding, ...]
    silenced: tuple[str, ...] = ()  # checks that were told not to speak
    took_s: float = 0.0

    @property
    def counts(self) -> Mapping[Status, int]:
        """How many findings have each status."""
        numbers = Counter(finding.status for finding in self.findings)
        return {status: numbers[status] for status in Status}

    @property
    def verdict(self) -> PreflightVerdict:
        """The worst finding; where nothing was found out, that is not a pass."""
        counts = self.counts
        if any(finding.fault is Fault.JOB for finding in self.findings):
            return PreflightVerdict.FATAL
        if counts[Status.FAIL]:
            return PreflightVerdict.RETRYABLE
        if counts[Status.WARN]:
            return PreflightVerdict.WARN
        return (
            PreflightVerdict.UNKNOWN if counts[Status.UNKNOWN] or not counts[Status.PASS] else PreflightVerdict.PASS
        )


def exit_code(verdict: PreflightVerdict) -> int:
    """The exit code of the pod; any but 0 stops a pod whose init container has it, so a warning is 0."""
    return _EXIT_CODES.get(verdict, exit_codes.SUCCEEDED)


MAX_MEASURES = 256
MAX_BYTES = 12_000  # of all measures of a node as JSON
_MAX_NAME = 120
_Word: TypeAlias = Annotated[str, Meta(max_length=_MAX_NAME)]
_Row = TypeVar("_Row")
_Gpu: TypeAlias = Annotated[int, Meta(ge=0, le=1023)]


class Measure(NamedTuple):
    """A figure: the greater, the better."""

    name: _Word  # what was measured, by a stable name: gemm, hbm-copy, h2d, d2h
    value: Annotated[float, Meta(ge=0, le=1e18)]
    unit: _Word  # TFLOP/s, GB/s (10^9 bytes)
    model: _Word  # of the GPU that it was measured on; "" where none was
    gpu: _Gpu | None  # its number on the node, as nvidia-smi has it; None: of the whole node


Measures: TypeAlias = Annotated[tuple[Measure, ...], Meta(max_length=MAX_MEASURES)]


def fitted(measures: Iterable[Measure]) -> tuple[Measure, ...]:
    """As many as fit into a message, in their order; a name that is too long is cut."""
    return tuple(within(map(_cut, measures), MAX_MEASURES, MAX_BYTES))


def within(rows: Iterable[_Row], count: int, size: int) -> Iterator[_Row]:
    """As many rows as `count` and, written as JSON, `size` bytes allow."""
    used = 2
    for number, row in enumerate(rows):
        used += len(json.dumps(row)) + 1
        if used > size or number == count:
            return
        yield row


def _cut(measure: Measure) -> Measure:
    value = measure.value if math.isfinite(measure.value) else 0.0
    return measure._replace(
        name=measure.name[:_MAX_NAME], unit=measure.unit[:_MAX_NAME], model=measure.model[:_MAX_NAME], value=value
    )
