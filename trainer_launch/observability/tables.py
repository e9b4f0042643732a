"""The tables of `status` for people, made of the same values that --json prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer_launch.model import goodput
from trainer_launch.model.stragglers import Lateness
from trainer_launch.model.units import aligned, counted, duration, listed, printable

_MOST_ROWS = 200
_METRICS = 8
_NO_REPORT = "progress  unknown: the script does not call trainer_launch.report(step=...)"
_NO_TRAINING = ("sshd",)  # engines that train nothing themselves


def launchers(known: Sequence[Mapping[str, Any]], now_s: float) -> str:
    """The launchers of one job."""
    return "\n".join(_launcher(one, now_s) for one in known)


def job(table: Mapping[str, Any] | None, problem: str | None, name: str | None = None) -> str:
    """The job as its coordinator knows it; named where there are several."""
    title = "Job" if name is None else f"Job {printable(name)}"
    if table is None:
        return f"\n{title}: {printable(problem or '')}\n"
    nodes = _range(table["min_nodes"], table["max_nodes"])
    line = (
        f"\n{title}: {table['phase']}, generation {table['generation']}, {nodes}, "
        f"{table['restarts']} of {counted(table['max_restarts'], 'restart')} used"
    )
    if table["progress"] is not None:
        line += f", {_percent(table['progress'])} done ({duration(table['progress_age_s'] or 0)} ago)"
    if table.get("goodput"):
        line += f"\n     goodput {_spent(table['goodput'])}"
    if table["end"]:
        line += f"\n     ended: {printable(table['end'])}"
    if table.get("stall"):
        line += f"\n     no progress, {duration(table['stall_age_s'] or 0)} ago: {printable(table['stall'])}"
    line += "".join(f"\n     {printable(str(Lateness(**one)))}" for one in table.get("stragglers", ()))
    line += "".join(
        f"\n     quarantined: {printable(host)}: {printable(why)}" for host, _, why in table.get("quarantined", ())
    )
    rows = [("NODE", "HOST", "STATE")]
    for rank, host, word, away_s in table["nodes"]:
        rows.append((_or_dash(rank), printable(host) or "-", _state(word, away_s)))
    left = table["n_nodes"] - min(len(table["nodes"]), _MOST_ROWS)
    more = f"  and {left} more\n" if left > 0 else ""
    shown = "".join(f"  {row}\n" for row in aligned(rows[: _MOST_ROWS + 1]))
    return f"{line}\n{shown}{more}"


def _launcher(one: Mapping[str, Any], now_s: float) -> str:
    node = "?" if one["node_rank"] is None else one["node_rank"]
    standing = one["standing"]
    lines = [f"Node {node} ({one['host']}): {one['phase']} for {duration(max(0.0, now_s - one['since_s']))}"]
    started = f"started {duration(max(0.0, now_s - one['started_s']))} ago, attempt {one['attempt']}"
    lines.append(f"launcher  pid {one['pid']}, {one['contract']}, {one['engine']}, {started}")
    lines += [f"running   {name}, pid {pid}" for name, pid in one["processes"]]
    lines += [f"exited    {name}, code {code}" for name, code in one["exits"]]
    if one["asked_to_stop_by"] is not None:
        lines.append(f"stopping  after signal {one['asked_to_stop_by']}")
    if standing["generation"] is not None:
        workers = counted(standing["workers"] or 0, "worker")
        lines.append(f"member    of generation {standing['generation']}, {workers}")
    if one.get("goodput"):
        lines.append(f"goodput   {_spent(one['goodput'])}")
    if standing["incident"]:
        where = f"; see trainer-launch incidents show {standing['incident_id']}" if standing["incident_id"] else ""
        lines.append(f"incident  {printable(standing['incident'])}{printable(where)}")
    lines += [_report(report) for report in one["reports"]] or [_NO_REPORT] * (one["engine"] not in _NO_TRAINING)
    return "\n  ".join(lines) + "\n"


def _report(report: Mapping[str, Any]) -> str:
    who = report["local_rank"] if report["rank"] is None else report["rank"]
    words = [f"rank {who:<4}"]
    if report["step"] is not None:
        words.append(f"step {report['step']},")
    if report["progress"] is not None:
        words.append(f"{_percent(report['progress'])} done,")
    if report["eta_s"] is not None:
        words.append(f"{duration(report['eta_s'])} left,")
    words += ["in a checkpoint,"] * report["checkpointing"]
    words.append(f"reported {duration(report['age_s'])} ago")
    words += [f"{printable(name)}={_short(value)}" for name, value in report["metrics"].items()]
    return listed(words, len(words) - len(report["metrics"]) + _METRICS, " ")


def _spent(told: Mapping[str, Any]) -> str:
    return goodput.sentence(goodput.read(told["seconds"]))


def _state(word: str, away_s: float | None) -> str:
    return word if away_s is None else f"{word} for {duration(away_s)}"


def _range(low: int, high: int) -> str:
    return counted(low, "node") if low == high else f"{low} to {high} nodes"


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
