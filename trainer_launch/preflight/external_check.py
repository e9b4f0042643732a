"""--external-check: a site's own command, such as one around `dcgmi diag`, whose JSON becomes findings.

The command runs before all other checks, as two tests of a GPU slow each other. Whatever goes wrong with it
(no end in time, a crash, no JSON) is unknown: only its findings can fail this machine.
"""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct
from msgspec.structs import asdict

from trainer_launch.host.deadline_subprocess import REAP_S, Ended, RunningCommand
from trainer_launch.model import codec
from trainer_launch.model.errors import UsageError
from trainer_launch.model.findings import Fault, Finding, Scope, Status, Value, single_line
from trainer_launch.model.redaction import redact_text
from trainer_launch.model.units import counted
from trainer_launch.preflight.check import LIMIT_S, Subject, Where, check

EXTERNAL = "external"  # the check, and what the names of its findings begin with
MAX_BYTES = 256 << 10  # of its output
_ADVICE = "run it by hand in this container; its output is described by external.schema.json"
_running: list[RunningCommand] = []
_starting = threading.Lock()  # held until a command that has been started is among those that run

_Line: TypeAlias = Annotated[str, Meta(max_length=600)]
_Remedy: TypeAlias = Literal["", "RESET", "REBOOT", "DRAIN", "RMA", "FIX_JOB", "FIX_IMAGE"]


class ExternalFinding(Struct, frozen=True, forbid_unknown_fields=True):
    """A finding of the command about this machine."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=60)]
    status: Literal["pass", "warn", "fail", "unknown", "skipped"]
    text: Annotated[str, Meta(min_length=1, max_length=600)]
    fault: Fault = Fault.NODE  # of a failure
    gpu: Annotated[int, Meta(ge=0, le=1023)] | None = None
    action: _Line = ""
    remedy: _Remedy = ""
    measured: Value = None
    expected: Value = None
    unit: Annotated[str, Meta(max_length=60)] = ""
    evidence: Annotated[tuple[_Line, ...], Meta(max_length=6)] = ()

    def finding(self) -> Finding:
        """As a finding of this program: without secrets, and each text in one line."""
        values: dict[str, Any] = asdict(self)
        values |= {key: redact_text(value) for key, value in values.items() if isinstance(value, str)}
        status, name, gpu = Status(self.status), values.pop("name"), values.pop("gpu")
        values |= {"check": f"{EXTERNAL}-{name}", "status": status, "remedy": self.remedy}
        values |= {"fault": self.fault if status is Status.FAIL else None}
        values |= {"evidence": tuple(map(redact_text, self.evidence))}
        values |= {} if gpu is None else {"scope": Scope.GPU, "subject": f"GPU {gpu}"}
        return single_line(Finding(**values))


class ExternalReport(Struct, frozen=True, forbid_unknown_fields=True):
    """All that the command prints."""

    findings: Annotated[tuple[ExternalFinding, ...], Meta(max_length=100)]


def command_of(text: str | None) -> tuple[str, ...]:
    """The words of --external-check; none: it was not given.

    Raises:
        UsageError: a shell could not split it either.
    """
    try:
        words = tuple(shlex.split(text or ""))
    except ValueError as problem:
        raise UsageError(f"invalid value for --external-check: {problem}; expected a command line") from None
    if text is not None and not words:
        raise UsageError("invalid value '' for --external-check: expected a command line")
    return words


def _limit_s(subject: Subject) -> float:
    """Half of --wait-timeout: the other nodes wait for this one as long."""
    return max(LIMIT_S, subject.deadline_s / 2)


@check(EXTERNAL, Where.EXTERNAL, limit_s=lambda subject: _limit_s(subject) + REAP_S + 1)
def external(subject: Subject) -> Iterator[Finding]:
    """The command of --external-check ran on this machine; its output has its own findings."""
    argv = command_of(subject.external_check)
    if not argv:
        return
    name, ended = os.path.basename(argv[0]), _run(argv, subject)
    if isinstance(ended, OSError):
        yield external.unknown(f"{name} could not be started: {ended.strerror}", action=_ADVICE)
        return
    report = _report(ended, _limit_s(subject))
    if isinstance(report, str):
        yield external.unknown(f"{name} gave no result for this machine: {report}", action=_ADVICE)
        return
    yield external.passed(f"{name} reported {counted(len(report.findings), 'finding')} in {ended.took_s:.1f} s")
    yield from (external_finding.finding() for external_finding in report.findings)


def _run(argv: tuple[str, ...], subject: Subject) -> Ended | OSError:
    with _starting:
        try:
            child = RunningCommand(argv, subject.env)
        except (OSError, ValueError) as problem:  # the latter: a NUL in a word
            return problem if isinstance(problem, OSError) else OSError(0, str(problem))
        _running.append(child)
    child.stop(_limit_s(subject))
    return child.end()


def _report(ended: Ended, limit_s: float) -> ExternalReport | str:
    """The report that the command printed; or why its output does not count."""
    if ended.status is None or ended.was_killed:  # not what it left behind
        return f"it did not finish within {limit_s:g} s, and was killed"
    if ended.status:
        how = f"signal {-ended.status}" if ended.status < 0 else f"exit code {ended.status}"
        return f"it ended with {how}" + (f": {redact_text(ended.why())}" if ended.stderr.strip() else "")
    if len(ended.stdout) > MAX_BYTES:
        return f"it printed more than {MAX_BYTES >> 10} KiB"
    try:
        return codec.decode(ExternalReport, ended.stdout, MAX_BYTES)
    except codec.MessageError as problem:
        return f"its output is not a report: {redact_text(str(problem))}"


def kill() -> None:
    """End the command, as this program is about to end; none is started any more."""
    _starting.acquire()
    for child in _running:
        child.kill()
