"""A report as JSON, in the form that schemas/preflight.schema.json publishes, and read back from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer_launch.model import Json
from trainer_launch.model.findings import Basis, Fault, Finding, Report, Scope, Status
from trainer_launch.model.units import printable

FORMAT = "trainer-launch-preflight"
VERSION = 1  # raised when a reader of the old form would misread the new one
MAX_BYTES = 1 << 20  # of a document that is read back
_MAX_FINDINGS = 1000
_LONGEST_S = 1e9
_Word = TypeVar("_Word", Status, Scope, Fault, Basis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a report was made."""

    host: str
    node_rank: int | None
    nodes: str | None
    contract: str

    @property
    def name(self) -> str:
        """The node as findings name it."""
        return self.host if self.node_rank is None else f"node {self.node_rank} ({self.host})"

    def __str__(self) -> str:
        rank = "?" if self.node_rank is None else self.node_rank
        return f"node {rank} of {self.nodes or '?'} ({self.host})"


def document(report: Report, place: Place, *, mode: str, exit_code: int, at_s: float) -> dict[str, Json]:
    """The whole report; `at_s` is in seconds since 1970."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "verdict": report.verdict.value,
        "mode": mode,
        "exit_code": exit_code,
        "at": round(at_s, 3),
        "took_s": round(report.took_s, 4),
        "node": {
            "host": place.host,
            "node_rank": place.node_rank,
            "nodes": place.nodes,
            "contract": place.contract,
        },
        "counts": {status.value: count for status, count in report.counts.items()},
        "silenced": list(report.silenced),
        "findings": [finding_as_json(finding) for finding in report.findings],
    }


def finding_as_json(finding: Finding) -> dict[str, Json]:
    """A finding as an object of the report."""
    return {
        "check": finding.check,
        "status": finding.status.value,
        "severity": finding.severity.value,
        "scope": finding.scope.value,
        "subject": finding.subject,
        "text": finding.text,
        "fault": None if finding.fault is None else finding.fault.value,
        "measured": finding.measured,
        "expected": finding.expected,
        "unit": finding.unit,
        "basis": None if finding.basis is None else finding.basis.value,
        "evidence": list(finding.evidence),
        "action": finding.action,
        "took_s": round(finding.took_s, 4),
    }


def parse(data: bytes) -> tuple[Finding, ...]:
    """The findings of a document.

    Raises:
        ValueError: it is none, or one of another version.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES} bytes")
    try:
        told = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None
    if not isinstance(told, dict) or told.get("format") != FORMAT or told.get("version") != VERSION:
        raise ValueError(f"it is no {FORMAT} document of version {VERSION}")
    findings = told.get("findings")
    if not isinstance(findings, list) or len(findings) > _MAX_FINDINGS:
        raise ValueError("it has no list of findings")
    return tuple(map(finding_of, findings))


def finding_of(told: Any) -> Finding:
    """A finding made of such an object. Raises: ValueError: it is none."""
    if not isinstance(told, Mapping):
        raise ValueError("a finding is no object")
    texts: dict[str, Any] = {key: told.get(key, "") for key in ("check", "subject", "text", "unit", "action")}
    evidence, took_s = told.get("evidence", []), told.get("took_s", 0.0)
    values: dict[str, Any] = {key: told.get(key) for key in ("measured", "expected")}
    if not all(isinstance(text, str) for text in (*texts.values(), *_listed(evidence))):
        raise ValueError("a finding has a field that is no text")
    if not all(value is None or isinstance(value, (bool, int, float, str)) for value in values.values()):
        raise ValueError("a finding has a value that is neither number nor text")
    fault, basis = told.get("fault"), told.get("basis")
    return Finding(
        **{key: _plain(text) for key, text in texts.items()},
        **{key: _plain(value) if isinstance(value, str) else value for key, value in values.items()},
        status=_one_of(Status, told.get("status")),
        scope=_one_of(Scope, told.get("scope")),
        fault=None if fault is None else _one_of(Fault, fault),
        basis=None if basis is None else _one_of(Basis, basis),
        evidence=tuple(map(_plain, evidence)),
        took_s=float(took_s) if isinstance(took_s, (int, float)) and 0 <= took_s < _LONGEST_S else 0.0,
    )


def _one_of(words: type[_Word], value: Any) -> _Word:
    try:
        return words(value)
    except ValueError:
        raise ValueError(f"a finding's {words.__name__.lower()} is none of {', '.join(words)}") from None


def _plain(text: str) -> str:
    """Others wrote it: nothing of it may break a line or command a terminal."""
    return printable(text, " ")


def _listed(evidence: Any) -> list[Any]:
    if not isinstance(evidence, list):
        raise ValueError("a finding's evidence is no list")
    return evidence
