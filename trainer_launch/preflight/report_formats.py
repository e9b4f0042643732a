"""A report as JSON, read back from it, as text for people and for the pod's status; its files."""

from __future__ import annotations

import errno
import os
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

from msgspec import Meta, Struct, to_builtins
from msgspec.structs import replace

from trainer_launch.host import files, logs, slow_files
from trainer_launch.model import Json, codec
from trainer_launch.model.errors import UsageError
from trainer_launch.model.findings import (
    OF_MACHINES,
    QUIET,
    Finding,
    PreflightVerdict,
    Report,
    Scope,
    Severity,
    Status,
    single_line,
    worst_first,
)
from trainer_launch.model.units import grouped, listed
from trainer_launch.preflight.policy import Policy
from trainer_launch.preflight.thresholds import REPORT, REPORT_VERSION, Reference

_WIDTH = 80
# In words, and in the pod's status.
_WORDS = {
    PreflightVerdict.PASS: ("PASSED", "PreflightPassed"),
    PreflightVerdict.UNKNOWN: ("PASSED: nothing failed, but some results are unknown", "PreflightIncomplete"),
    PreflightVerdict.WARN: ("PASSED with warnings", "PreflightWarned"),
    PreflightVerdict.RETRYABLE: (
        "FAILED: a node or its environment is faulty; retry on other nodes",
        "PreflightRetryable",
    ),
    PreflightVerdict.FATAL: ("FAILED: fix the job; a retry will not help", "PreflightFatal"),
}
_MARKS = {Severity.FATAL: "FATAL", Severity.RETRYABLE: "FAIL", Severity.WARNING: "WARN", Severity.INFO: "UNKNOWN"}
_RETRYABLE = {PreflightVerdict.RETRYABLE: "retryable=true ", PreflightVerdict.FATAL: "retryable=false "}
_BLAMED = 6
_FIRST_LINE = 900  # what stays readable where only the beginning is shown
_FILE_LIMIT_S = 5.0  # a file server that is gone lets each of its callers wait for ever
# The setting is at fault; what else may happen there is the volume's, of which a check speaks.
_OF_THE_SETTING = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS))
PAGE, DATA = ".html", ".json"  # endings of --report


class ReportPlace(Struct, frozen=True, kw_only=True):
    """Where a report was made."""

    host: str
    node_rank: int | None
    nodes: str | None
    contract: str
    machine: str = ""  # the Kubernetes node where it is known; "": it is not

    @property
    def name(self) -> str:
        """The node as findings name it."""
        return self.host if self.node_rank is None else f"node {self.node_rank} ({self.host})"

    def __str__(self) -> str:
        rank = "?" if self.node_rank is None else self.node_rank
        return f"node {rank} of {self.nodes or '?'} ({self.host})"


def document(
    report: Report,
    place: ReportPlace,
    *,
    policy: Policy = Policy(),  # noqa: B008  frozen
    exit_code: int,
    at_s: float,
    measured: Sequence[Reference] = (),
) -> dict[str, Json]:
    """The whole report; `at_s` is in seconds since 1970, `measured` are medians that --reference reads."""
    return {
        "format": REPORT,
        "version": REPORT_VERSION,
        "verdict": report.verdict.value,
        "policy": {"observe": policy.observe, "rules": dict(policy.rules)},
        "exit_code": exit_code,
        "at": round(at_s, 3),
        "took_s": round(report.took_s, 4),
        "node": to_builtins(place),
        "counts": {status.value: count for status, count in report.counts.items()},
        "silenced": list(report.silenced),
        "findings": [finding_as_json(finding) for finding in report.findings],
        "measured": [to_builtins(row) for row in measured],
    }


def finding_as_json(finding: Finding) -> dict[str, Json]:
    """A finding as an object of the report."""
    values: dict[str, Json] = to_builtins(finding)
    return {**values, "severity": finding.severity.value, "took_s": round(finding.took_s, 4)}


class _Writer(Struct, frozen=True):
    host: str


class _ReadDocument(Struct, frozen=True):
    format: str
    version: int
    node: _Writer
    findings: Annotated[tuple[Finding, ...], Meta(max_length=1000)]


def parse(data: bytes) -> tuple[str, tuple[Finding, ...]]:
    """The host and the findings of a document. Raises MessageError: it is none, or one of another version."""
    document = codec.decode(_ReadDocument, data)
    if (document.format, document.version) != (REPORT, REPORT_VERSION):
        raise codec.MessageError(f"it is not a {REPORT} document of version {REPORT_VERSION}")
    return document.node.host, tuple(map(single_line, document.findings))


def fault_of(path: str, host: str) -> str:
    """Return the faults that the init container's preflight proved of this node; "": none, or no report.

    Nodes that share a volume may have written over each other's report.
    """
    try:
        writer, findings = parse(files.LiveFiles(codec.MAX_FILE_BYTES + 1).read(path) or b"")
    except codec.MessageError:
        return ""
    own = [finding for finding in findings if writer == host and finding.is_about(f"({host})")]
    return "; ".join(f"{finding.check}: {finding.text}" for finding in own if finding.proves_a_fault)[:500]


def summary(verdict: PreflightVerdict) -> str:
    """The verdict in words: `PASSED with warnings`."""
    return _WORDS[verdict][0]


def screen(report: Report, place: ReportPlace, code: int) -> str:
    """The whole report on one screen: the summary, what is wrong by severity, what is well in a line."""
    lines = [f"Preflight {summary(report.verdict)} (exit code {code})", f"  {place}: {tally(report)}"]
    blamed, findings = at_fault(report), loud(report.findings)
    lines += _wrapped(f"faulty: {blamed}", "  ", "    ") if blamed else []
    for finding in worst_first(sorted(findings, key=lambda finding: place.name not in finding.subject)):
        lines += ["", *_paragraph(finding, place)]
    by_status = grouped((finding.status, finding.check) for finding in report.findings)
    quiet = {"passed": by_status.get(Status.PASS, ()), "skipped": by_status.get(Status.SKIPPED, ())}
    lines += [""]
    for word, checks in {**quiet, "silenced": report.silenced}.items():
        lines += _wrapped(f"{word}: {', '.join(dict.fromkeys(checks))}", "", "  ") if checks else []
    return "\n".join(lines) + "\n"


def at_fault(report: Report) -> str:
    """The nodes, links and folders that failures name, the worst first, each with its checks."""
    failed = [finding for finding in loud(report.findings) if finding.status is Status.FAIL]
    of_job = [("the job", finding.check) for finding in failed if finding.scope is Scope.JOB]
    named = [(one.subject, one.check) for one in failed if one.subject and one.scope is not Scope.JOB]
    blamed = grouped(named or of_job)
    parts = [f"{subject}: {', '.join(dict.fromkeys(checks))}" for subject, checks in blamed.items()]
    return listed(parts, _BLAMED, "; ")


def tally(report: Report) -> str:
    """How many of each, in words."""
    counts = report.counts
    words = {Status.FAIL: "failed", Status.WARN: "warned", Status.UNKNOWN: "unknown", Status.PASS: "passed"}
    parts = [f"{counts[status]} {word}" for status, word in words.items() if counts[status]]
    return f"{', '.join(parts) or 'nothing was checked'} in {report.took_s:.2f} s"


def loud(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that a person has to read, the worst first."""
    return worst_first(finding for finding in findings if finding.status not in QUIET)


def termination_message(report: Report, place: ReportPlace, code: int) -> str:
    """The pod's termination message, before it is cut: the first line can be read alone."""
    findings = loud(report.findings)
    first = f"reason={_WORDS[report.verdict][1]} exit={code} {_RETRYABLE.get(report.verdict, '')}{_whose(place)}"
    remedy = remedy_here(report, place)
    first += f"{f' remedy={remedy}' if remedy else ''} | {tally(report)}"
    if findings:
        first += f": {findings[0].check}: {findings[0].text}"
    lines = [first if len(first) <= _FIRST_LINE else first[:_FIRST_LINE] + " ..."]
    for finding in findings:
        lines.append(f"{heading(replace(finding, subject=''))}: {finding.text}")
        lines += [f"  What to do: {advice(finding)}"] if advice(finding) else []
    return "\n".join(lines) + "\n"


def remedy_here(report: Report, place: ReportPlace) -> str:
    """The remedy for this pod or its machine, for programs: that of its worst failure that has any.

    A machine's remedy in the status of a pod on another machine would drain the wrong one.
    """
    failed = [finding for finding in loud(report.findings) if finding.status is Status.FAIL and finding.remedy]
    for finding in failed:
        if finding.is_about(place.name) or finding.remedy not in OF_MACHINES:
            return finding.remedy
    return ""


def stopped(place: ReportPlace, code: int, text: str) -> str:
    """The termination message of a preflight that was asked to stop."""
    return f"reason=PreflightStopped exit={code} retryable=true {_whose(place)} | {text}\n"


def _whose(place: ReportPlace) -> str:
    return f"node={'?' if place.node_rank is None else place.node_rank} host={place.host}"


def heading(finding: Finding) -> str:
    """The beginning of a finding: `FAIL dns (node 3)`, without a subject that its text names."""
    about = f" ({finding.subject})" if finding.subject and finding.subject not in finding.text else ""
    own = finding.without_policy
    changed = "" if own is None else f" [policy: was {_MARKS[own]}]"
    return f"{_MARKS[finding.severity]} {finding.check}{about}{changed}"


def advice(finding: Finding) -> str:
    """The action of a finding, with the remedy for programs."""
    return f"{finding.action}{f' [{finding.remedy}]' if finding.remedy else ''}".strip()


def _paragraph(finding: Finding, place: ReportPlace) -> list[str]:
    if finding.subject == place.name and finding.subject not in finding.text:
        finding = replace(finding, subject="this node")
    lines = _wrapped(f"{heading(finding)}: {finding.text}", "", "    ")
    for line in finding.evidence:
        lines += _wrapped(f"- {line}", "    ", "      ")
    return lines + (_wrapped(f"-> {advice(finding)}", "    ", "       ") if advice(finding) else [])


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    # Names and values are to be copied: they are not broken.
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def check_ending(path: str | None) -> None:
    """See whether --report can write this file.

    Raises:
        UsageError: its name says neither a page nor data.
    """
    if path is not None and not path.lower().endswith((PAGE, DATA)):
        raise UsageError(
            f"invalid value {path!r} for --report: expected a file that ends with {PAGE} (a page for people) "
            f"or {DATA} (data)"
        )


def check_file(path: str | None) -> None:
    """Find out whether the file of --report could be written.

    Raises:
        UsageError: another ending, or its folder is not there or not ours.
    """
    check_ending(path)
    problem = None if path is None else _problem_of(path, _try)
    if problem is not None and problem.errno in _OF_THE_SETTING:
        raise UsageError(f"--report {path} cannot be written: {problem.strerror}; name a writable directory")


def write_file(path: str | None, text: str) -> None:
    """Replace a file, whole or not at all, or warn. What is no file is written as it is; None: nothing to do."""
    problem = None if path is None else _problem_of(path, _write, text)
    if problem is not None:
        logs.warn(f"--report: {path} was not written: {problem.strerror}")


def _problem_of(path: str, act: Callable[..., OSError | None], *args: object) -> OSError | None:
    late: OSError | None = OSError(errno.ETIMEDOUT, f"no answer in {_FILE_LIMIT_S:g} s")
    try:
        return slow_files.within(path, late, act, path, *args, wait_s=_FILE_LIMIT_S)
    except OSError as problem:
        return problem


def _try(path: str) -> None:
    if not os.path.exists(path) or os.path.isfile(path):
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(os.path.realpath(path)), prefix=".trainer-launch-"):
            pass
    elif os.path.isdir(path):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))


def _write(path: str, text: str) -> None:
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8", opener=_opened) as file:
            file.write(text)
    else:
        files.replace(os.path.realpath(path), text.encode(), 0o644)


def _opened(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)  # fails for a FIFO that nobody reads
    os.set_blocking(descriptor, True)
    return descriptor
