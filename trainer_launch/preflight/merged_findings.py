"""What this node has found, and what was decided for all nodes, as one list. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.preflight.cluster import verdict
from trainer_launch.preflight.cluster.node_stages import Stage
from trainer_launch.preflight.container import dns

LOUD = (Status.FAIL, Status.WARN)


def merged(
    own: Sequence[Finding], decided: Sequence[Finding], name: str, checks: Collection[str]
) -> tuple[Finding, ...]:
    """All findings, each once: what this node and others have found alike is told in this node's words.

    `checks` are those of all nodes together.
    """
    alike = {_kind(finding): finding for finding in decided if finding.check not in checks}
    told = []
    for finding in own:
        if finding.status in (*LOUD, Status.UNKNOWN):
            group = alike.pop(_kind(finding), None)
            others = [other for other in (group.subject.split(", ") if group else ()) if other != name]
            told.append(replace(finding, subject=", ".join((name, *others))))
        else:
            told.append(finding)
    rest = [finding for finding in decided if finding.check in checks or finding in alike.values()]
    return (*rest, *told)


def _kind(finding: Finding) -> tuple[str, Status, Fault | None]:
    """What `ending.grouped` puts together."""
    return finding.check, finding.status, finding.fault


def explained(own: Sequence[Finding], decided: Sequence[Finding], *, is_shared: bool) -> Iterator[Finding]:
    """This node's findings; that a name does not resolve is no fault of who looks when its node was never made.

    Nor does it matter to who rejoins a job that is at work, perhaps without that node.
    """
    reasons = (verdict.AT_WORK, Stage.NO_RECORD.value) if is_shared else (verdict.AT_WORK,)
    is_explained = any(one.check == verdict.NAME and one.measured in reasons for one in decided)
    for finding in own:
        if is_explained and finding.check == dns.NAME and finding.status is Status.FAIL:
            yield replace(finding, status=Status.WARN, fault=None)
        else:
            yield finding
