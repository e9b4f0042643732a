"""Findings as they travel between nodes: a JSON list, the worst first, as many as fit. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from trainer_launch.model.findings import Finding, Severity, Status
from trainer_launch.model.units import counted
from trainer_launch.preflight.cluster.node_facts import listed
from trainer_launch.preflight.cluster.protocol import MAX_FINDINGS_BYTES
from trainer_launch.preflight.report_formats import finding_as_json, finding_of

_TEXT = 600
_EVIDENCE = 6


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """In the order in which a person should read them; those that weigh the same keep theirs."""
    order = list(Severity)
    quiet = (Status.PASS, Status.SKIPPED)
    return sorted(findings, key=lambda found: (order.index(found.severity), found.status in quiet))


def dumped(findings: Iterable[Finding], limit: int = MAX_FINDINGS_BYTES) -> str:
    """Findings as a text; the worst ones go first, and what does not fit is only counted."""
    ordered = worst_first(findings)
    texts: list[str] = []
    size = 400  # for the last one, which counts
    for number, finding in enumerate(ordered):
        text = json.dumps(finding_as_json(_cut(finding)), separators=(",", ":"))
        if size + len(text) + 1 > limit:
            texts.append(json.dumps(finding_as_json(_more(finding, len(ordered) - number)), separators=(",", ":")))
            break
        texts.append(text)
        size += len(text) + 1
    return f"[{','.join(texts)}]"


def loaded(text: str) -> list[Finding]:
    """Findings of another node.

    Raises:
        ValueError: they are none.
    """
    try:
        told = json.loads(text)
    except RecursionError:
        raise ValueError("a nest that is too deep") from None
    if not isinstance(told, list):
        raise ValueError("no list of findings")
    return [finding_of(one) for one in told]


def _cut(finding: Finding) -> Finding:
    return replace(
        finding,
        text=finding.text[:_TEXT],
        action=finding.action[:_TEXT],
        subject=listed(finding.subject.split(", "))[:_TEXT],
        evidence=tuple(one[:_TEXT] for one in finding.evidence[:_EVIDENCE]),
    )


def _more(finding: Finding, count: int) -> Finding:
    return Finding(
        check=finding.check,
        status=finding.status,
        fault=finding.fault,
        text=f"and {counted(count, 'more finding')}",
    )
