"""--report FILE.html: the verdict, what is wrong with its remedy, the nodes, and how fast each pair of nodes is."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape

from trainer_launch.model.findings import QUIET, Finding, PreflightVerdict, Report, Scope, Severity, Status
from trainer_launch.model.redaction import redact_text
from trainer_launch.model.units import counted, grouped, printable
from trainer_launch.observability.html import clean, document, table
from trainer_launch.preflight.cluster.present_nodes import PairTests, listed
from trainer_launch.preflight.report_formats import ReportPlace, advice, at_fault, heading, loud, summary, tally
from trainer_launch.preflight.thresholds import MBYTE

_MOST_NODES = 64  # rows; what is wrong with a node comes first
_MOST_PAIRS = 256
_GBYTES = 10_000  # MB/s, from which on figures are in GB/s
_SHEET = """
.broken li.warn{border-color:#b8860b}.broken li.warn b{color:#8a6508}
.broken li.unknown{border-color:var(--soft)}.broken li.unknown b{color:var(--soft)}
.broken ul{margin:4px 0 0;padding-left:18px;color:var(--soft);font-size:13px;list-style:disc}
@media(max-width:640px){td:empty{display:none}}
.broken ul li{border:0;margin:0;padding:0}
.pairs td{white-space:nowrap}.pairs .bar{width:50%}.pairs i{display:block;height:12px;background:var(--idle)}
.pairs .bad{color:var(--bad)}.pairs .bad i{background:var(--mark)}
@media(prefers-color-scheme:dark){.broken li.warn b{color:#e3b341}}
"""
_CLASSES = {PreflightVerdict.PASS: "good", PreflightVerdict.RETRYABLE: "bad", PreflightVerdict.FATAL: "bad"}
_LOOKS = {Severity.WARNING: "warn", Severity.INFO: "unknown"}
_SAYS = {Status.PASS: "passed", Status.SKIPPED: "skipped", Status.UNKNOWN: "unknown", Status.WARN: "warning"}


def page(
    report: Report,
    place: ReportPlace,
    code: int,
    at_s: float,
    names: Sequence[str] = (),
    pairs: PairTests | None = None,
) -> str:
    """The whole file; `names` are the nodes that were present, and `at_s` is in seconds since 1970."""
    title = f"Preflight {summary(report.verdict)}"
    body = [
        _header(report, place, code, at_s, title),
        *_wrong(report),
        _nodes(report, place, names),
        *_pictured(pairs),
        _checks(report),
    ]
    return document(title, _SHEET, [part for part in body if part], "Written by trainer-launch preflight.")


def _header(report: Report, place: ReportPlace, code: int, at_s: float, title: str) -> str:
    at = datetime.fromtimestamp(at_s, timezone.utc).isoformat(sep=" ", timespec="seconds")
    about = f"{place}; {at}; exit code {code}; {tally(report)}"
    faulty = at_fault(report)
    return (
        f'<header class="{_CLASSES.get(report.verdict, "")}"><h1>{escape(title)}</h1>'
        f"<p>{escape(_plain(about))}</p>"
        f"{f'<p><b>Faulty:</b> {escape(_plain(faulty))}</p>' if faulty else ''}</header>"
    )


def _wrong(report: Report) -> Sequence[str]:
    findings = loud(report.findings)
    items = "".join(map(_item, findings))
    return [f'<section><h2>Findings</h2><ul class="broken">{items}</ul></section>'] if findings else []


def _item(finding: Finding) -> str:
    evidence = "".join(f"<li>{escape(_plain(line))}</li>" for line in finding.evidence)
    to_do = escape(_plain(advice(finding)))
    action = f'<span class="mend">What to do: {to_do}</span>' if to_do else ""
    return (
        f'<li class="{_LOOKS.get(finding.severity, "")}"><b>{escape(_plain(heading(finding)))}</b>: '
        f"{escape(_plain(finding.text))}{f'<ul>{evidence}</ul>' if evidence else ''}{action}</li>"
    )


def _nodes(report: Report, place: ReportPlace, names: Sequence[str]) -> str:
    """Nodes with findings first, also absent ones; a finding that names no node is about this node, or the job."""
    by_node: dict[str, list[Finding]] = {name: [] for name in names or (place.name,)}
    for finding in loud(report.findings):
        subjects = finding.subject.replace(" - ", ", ").split(", ")
        about = [subject for subject in subjects if subject in by_node or subject.startswith("node ")]
        for node in about or ([] if finding.scope is Scope.JOB else [place.name]):
            by_node.setdefault(node, []).append(finding)
    ordered = sorted(by_node.items(), key=lambda row: (not row[1], -sum(its.fault is not None for its in row[1])))
    rows = [
        (_plain(name), _state(its), listed([*dict.fromkeys(finding.check for finding in its)]))
        for name, its in ordered[:_MOST_NODES]
    ]
    rest = len(ordered) - len(rows)
    title = counted(len(ordered), "node") + (f", of which {rest} are not shown" if rest else "")
    return table(title, ("node", "result", "checks"), rows)


def _state(findings: Sequence[Finding]) -> str:
    statuses = {finding.status for finding in findings}
    words = {Status.FAIL: "failed", Status.WARN: "warning", Status.UNKNOWN: "unknown"}
    return next((word for status, word in words.items() if status in statuses), "no finding")


def _pictured(pairs: PairTests | None) -> Sequence[str]:
    """A bar for each pair, by its slowest test, the slowest first."""
    if pairs is None or not pairs.tests:
        return ()
    tests = grouped((test.ends, test.rate / MBYTE if test.is_whole else 0.0) for test in pairs.tests)
    rates = sorted(((min(its), ends) for ends, its in tests.items()))
    fastest = rates[-1][0] or 1.0
    unit, size = ("GB/s", 1000.0) if fastest >= _GBYTES else ("MB/s", 1.0)
    faulty_nodes = {*pairs.faulty.nodes, *(node for node, _ in pairs.faulty.rails)}
    faulty_pairs = {*(link.ends for link in pairs.faulty.links), *pairs.faulty.unresolved}
    rows = []
    for rate, ends in rates[:_MOST_PAIRS]:
        names = " - ".join(escape(clean(pairs.names[node])) for node in sorted(ends))
        kind = "bad" if ends in faulty_pairs or faulty_nodes & {*ends} else ""
        bar = f'<i style="width:{100 * rate / fastest:.1f}%"></i>'
        figure = f"{rate / size:.4g} {unit}" if rate else "failed"
        rows.append(f'<tr class="{kind}"><td>{names}</td><td class="bar">{bar}</td><td>{figure}</td></tr>')
    title = f"Bandwidth between {len(pairs.names)} nodes, {counted(len(pairs.tests), 'test')}"
    rest = f"; {len(rates) - _MOST_PAIRS} faster pairs are not shown" if len(rates) > _MOST_PAIRS else ""
    note = f"Slowest test of each pair, the slowest first; faulty in red{rest}."
    body = "".join(rows)
    return (f'<section><h2>{title}</h2><p class="note">{note}</p><table class="pairs">{body}</table></section>',)


def _checks(report: Report) -> str:
    quiet = [finding for finding in report.findings if finding.status in QUIET]
    rows = [(finding.check, _SAYS[finding.status], _plain(finding.text)) for finding in quiet]
    rows += [(name, "silenced", "--policy") for name in report.silenced]
    return table("Other checks", ("check", "result", "what it saw"), rows) if rows else ""


def _plain(text: str) -> str:
    """Text in which names and outputs of others stand: no secrets by their looks, no control characters."""
    return printable(redact_text(text), " ")
