"""`status`: the state of this container's runs and, from the coordinator, of each job. Changes nothing.

The tables for people are made of the values that --json prints.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, to_builtins

from trainer_launch.commands.options import Parsed
from trainer_launch.diagnosis.lateness import Lateness
from trainer_launch.diagnosis.stall import STALL, StallStatus
from trainer_launch.diagnosis.stragglers import STRAGGLERS, StragglerStatus
from trainer_launch.host.files import read_secret
from trainer_launch.membership.notes import opened
from trainer_launch.membership.protocol import JobStatus
from trainer_launch.model import Endpoint, Json
from trainer_launch.model.errors import NodeError, UsageError
from trainer_launch.model.units import aligned, counted, duration, grouped, listed, printable
from trainer_launch.observability import event_log, goodput, node_view, progress
from trainer_launch.observability.event_log import strict
from trainer_launch.observability.goodput import TRAINING, TrainingStatus
from trainer_launch.observability.goodput_keeper import as_json, shown
from trainer_launch.supervisor.run_observer import StateKept

_NOWHERE = "unknown; these nodes have no coordinator, so only the launchers of this container are shown"
_ANSWER_S = 3.0  # of each place
_MOST_ROWS = 200
_METRICS = 8
_NO_REPORT = "progress  unknown: no step passed through the launcher or came from trainer_launch.report(step=...)"
_NO_PLATFORM = "unknown"  # as contracts call it
_NO_TRAINING = ("sshd",)  # engines that train nothing themselves


def main(parsed: Parsed) -> int:
    """The command.

    Raises:
        UsageError: no launcher runs here, or not the one with that pid.
    """
    views = _chosen(node_view.find(), parsed.flags["pid"])
    jobs = [
        _Part(name, members, *_ask(members))
        for name, members in grouped((view.job, view) for view in views).items()
    ]
    if parsed.flags["json"]:
        sys.stdout.write(json.dumps(_as_json(views, jobs), indent=2, allow_nan=False) + "\n")
        return 0
    for number, part in enumerate(jobs):
        title = "Job" if len(jobs) == 1 else f"Job {part.name}"
        launchers = [_launcher_values(view) for view in part.views]
        if part.table is not None and part.table["goodput"] is not None:
            launchers = [{**launcher, "goodput": None} for launcher in launchers]  # the job's is shown
        lines = [*launcher_lines(launchers, time.time()), *job_lines(title, part.table, part.problem)]
        sys.stdout.write("\n" * (number > 0) + shown_lines(lines))
    return 0


class _Part(Struct, frozen=True):
    """The launchers of one job, and what its coordinator says or why nothing is known."""

    name: str | None
    views: Sequence[node_view.View]
    table: dict[str, Json] | None
    problem: str | None


def _as_json(views: Sequence[node_view.View], jobs: Sequence[_Part]) -> dict[str, Json]:
    """All of it; `job` is the first that is known."""
    first = next((part for part in jobs if part.table is not None), jobs[0])
    each = tuple(
        {"name": p.name, "pids": tuple(v.pid for v in p.views), "job": p.table, "job_problem": p.problem}
        for p in jobs
    )
    launchers = tuple(map(_launcher_values, views))
    return {"launchers": launchers, "job": first.table, "job_problem": first.problem, "jobs": each}


def _chosen(views: Sequence[node_view.View], pid: int | None) -> Sequence[node_view.View]:
    if not views:
        raise UsageError(
            "no running launcher was found in this container; run status while it runs, as the same user and "
            "with the same TMPDIR"
        )
    chosen = [view for view in views if pid in (None, view.pid)]
    if not chosen:
        pids = ", ".join(str(view.pid) for view in views)
        raise UsageError(f"no launcher has pid {pid}; running here: {pids}")
    return chosen


def _launcher_values(view: node_view.View) -> dict[str, Json]:
    """A launcher's own view and its workers' reports, by the names that JSON keeps."""
    now_s = time.monotonic()
    reports: list[Json] = []
    for report in event_log.reports(view.run_dir):
        values = to_builtins(report)
        values["age_s"] = round(max(0.0, now_s - values.pop("at_s")), 1)
        del values["first_at_s"], values["first_step"], values["not_finite"]
        values["checkpoint_s"] = round(report.checkpoint_s, 3)
        values["metrics"] = {name: strict(number) for name, number in report.metrics.items()}
        reports.append(values)
    printed = progress.printed(view.run_dir)
    step = None if printed is None else {"step": printed.step, "age_s": round(max(0.0, now_s - printed.at_s), 1)}
    standing = to_builtins(event_log.standing(view.run_dir))
    about = to_builtins(view)
    del about["ledger"]
    return {**about, "goodput": _goodput(view), "standing": standing, "reports": reports, "printed": step}


def _goodput(view: node_view.View) -> dict[str, Json] | None:
    """The ledger of this node, with what its workers have reported since it was written."""
    if view.ledger is None:
        return None
    now_s = time.monotonic()
    ledger = goodput.see(view.ledger, shown(view.ledger.since_s, progress.read(view.run_dir)), now_s)
    return as_json(goodput.totals(ledger, now_s))


def _ask(views: Sequence[node_view.View]) -> tuple[dict[str, Json] | None, str | None]:
    """The job's table by the first coordinator that answers, or why there is none."""
    problems = []
    from trainer_launch.membership.candidates import ask

    for job, place, secret_file, generation in dict.fromkeys(q for view in views for q in _questions(view)):
        try:
            secret = None if secret_file is None else read_secret(secret_file)
            status = ask(Endpoint(*place), job, secret, _ANSWER_S)
        except (NodeError, UsageError) as failed:
            problems.append(str(failed))
            continue
        if status.generation >= generation:
            return job_table(status), None
        problems.append(
            f"the coordinator at {Endpoint(*place)} does not know generation {generation}, which this node was in"
        )
    return None, problems[0] if problems else _NOWHERE


def job_table(status: JobStatus) -> dict[str, Json]:
    """The job's table, with what the notes add to it."""
    table, kinds = to_builtins(status), {STALL: StallStatus, STRAGGLERS: StragglerStatus, TRAINING: TrainingStatus}
    del table["kind"], table["ready"]
    notes = table.pop("notes")
    for topic, kind in kinds.items():
        table |= to_builtins(opened(kind, notes.get(topic), topic) or kind())
    seconds = table["goodput"]
    return {**table, "goodput": None if seconds is None else as_json(goodput.read(seconds))}


def _questions(view: node_view.View) -> Iterator[tuple[str, tuple[str, int], str | None, int]]:
    """Job, place, file of the secret, and the generation that who is asked has to know: a standby knows none."""
    if view.job is not None and view.coordinator is not None:
        standing = event_log.standing(view.run_dir)
        for place in (standing.coordinator or view.coordinator, view.coordinator):
            yield view.job, place, view.secret_file, standing.generation or 0


def shown_lines(lines: Iterable[str]) -> str:
    """Lines as a terminal may show them: what other launchers and hosts say cannot command it."""
    return "".join(f"{printable(line)}\n" for line in lines)


def launcher_lines(launchers: Iterable[Mapping[str, Any]], now_s: float) -> Iterator[str]:
    """The launchers of one job."""
    for number, launcher in enumerate(launchers):
        head, *rest = _launcher(launcher, now_s)
        yield from [""] * (number > 0)
        yield head
        yield from (f"  {line}" for line in rest)


def _launcher(launcher: Mapping[str, Any], now_s: float) -> Iterator[str]:
    node = "?" if launcher["node_rank"] is None else launcher["node_rank"]
    standing = launcher["standing"]
    age = duration(max(0.0, now_s - launcher["since_s"]))
    yield f"Node {node} ({launcher['host']}): {launcher['phase']} for {age}"
    started = f"started {duration(max(0.0, now_s - launcher['started_s']))} ago, attempt {launcher['attempt']}"
    platform = "no platform" if launcher["contract"] == _NO_PLATFORM else launcher["contract"]
    yield f"launcher  pid {launcher['pid']}, {platform}, {launcher['engine']}, {started}"
    yield from (f"running   {name}, pid {pid}" for name, pid in launcher["processes"])
    yield from (f"exited    {name}, code {code}" for name, code in launcher["exits"])
    if launcher["asked_to_stop_by"] is not None:
        yield f"stopping  after signal {launcher['asked_to_stop_by']}"
    if standing["generation"] is not None:
        yield f"member    of generation {standing['generation']}, {counted(standing['workers'] or 0, 'worker')}"
    if launcher["kept"]:
        yield f"recovered {StateKept(**launcher['kept'])}"
    if launcher.get("goodput"):
        yield f"goodput   {_spent(launcher['goodput'])}"
    if standing["incident"]:
        where = f"; see trainer-launch incidents show {standing['incident_id']}" if standing["incident_id"] else ""
        yield f"incident  {standing['incident']}{where}"
    yield from map(report_line, launcher["reports"])
    if launcher["printed"] and not any(report["step"] is not None for report in launcher["reports"]):
        printed = launcher["printed"]
        yield f"progress  step {printed['step']}, printed {duration(printed['age_s'])} ago"
    elif not launcher["reports"] and launcher["engine"] not in _NO_TRAINING:
        yield _NO_REPORT


def report_line(report: Mapping[str, Any]) -> str:
    """The last report of a training process."""
    words = [f"rank {report['local_rank'] if report['rank'] is None else report['rank']:<4}"]
    if report["step"] is not None:
        words.append(f"step {report['step']},")
    if report["progress"] is not None:
        words.append(f"{100 * report['progress']:.1f} % done,")
    if report["eta_s"] is not None:
        words.append(f"{duration(report['eta_s'])} left,")
    words += ["in a checkpoint,"] * report["checkpointing"]
    words.append(f"reported {duration(report['age_s'])} ago")
    metrics = report["metrics"].items()
    words += [f"{name}={value if isinstance(value, str) else f'{value:.6g}'}" for name, value in metrics]
    return listed(words, len(words) - len(metrics) + _METRICS, " ")


def job_lines(title: str, table: Mapping[str, Any] | None, problem: str | None) -> Iterator[str]:
    """The job as its coordinator knows it, or why nothing is known."""
    yield ""
    if table is None:
        yield f"{title}: {problem}"
        return
    low, high = table["min_nodes"], table["max_nodes"]
    nodes = counted(low, "node") if low == high else f"{low} to {high} nodes"
    line = f"{title}: {table['phase']}, generation {table['generation']}, {nodes}, "
    line += f"{table['restarts']} of {counted(table['max_restarts'], 'restart')} used"
    if table["progress"] is not None:
        line += f", {100 * table['progress']:.1f} % done ({duration(table['progress_age_s'] or 0)} ago)"
    yield line
    yield from (f"     {line}" for line in _about_job(table))
    rows = [("NODE", "HOST", "STATE")]
    for rank, host, word, away_s in table["nodes"][:_MOST_ROWS]:
        state = word if away_s is None else f"{word} for {duration(away_s)}"
        rows.append(("-" if rank is None else str(rank), printable(host) or "-", state))
    yield from (f"  {row}" for row in aligned(rows))
    if table["n_nodes"] >= len(rows):
        yield f"  and {table['n_nodes'] - len(rows) + 1} more"


def _about_job(table: Mapping[str, Any]) -> Iterator[str]:
    if table.get("goodput"):
        yield f"goodput {_spent(table['goodput'])}"
    if table["end"]:
        yield f"ended: {table['end']}"
    if table.get("stall"):
        yield f"no progress, {duration(table['stall_age_s'] or 0)} ago: {table['stall']}"
    yield from (str(Lateness(**rank)) for rank in table.get("stragglers", ()))
    yield from (f"quarantined: {host}: {why}" for host, _, why in table.get("quarantined", ()))


def _spent(values: Mapping[str, Any]) -> str:
    return goodput.sentence(goodput.read(values["seconds"]))
