"""What each fault costs a job of three pods: seconds until it trains again, and how often each pod was started."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import contestants, tables, trees
from benchmarks.contestants import Contestant
from benchmarks.measuring import Case, Reading, Section, Setup, wait_for
from benchmarks.peers import versions_of_launchers
from benchmarks.results import Figure, Results
from tests.pods import Job, missing, pods_of
from tests.survival import jobs

BEGIN_S = 120.0  # for the start, on a busy machine
WATCH_S = 75.0
RUN_S = 12.0  # a start, a fault and an end on a quiet machine
BEYOND, FEWER = "beyond the pod's absence", "with fewer"
ABOUT = f"""\
Three pods of an elastic PyTorchJob with their own network, processes and files. Each has one gloo worker that saves
a checkpoint at each step. A kubelet restarts a failed pod after 3 s. A cell has the seconds from the fault to the
first step in which all train again, and how often each pod was started. `never`: not within {WATCH_S:g} s.

*expert* is torchrun without its shared store, with last_call_timeout=1 and keep_alive_interval=1. For the stopped
worker, trainer-launch has `--hang-timeout 5`."""
COLUMNS = (
    "trainer-launch, elastic",
    "torchrun, elastic",
    "torchrun, expert",
    "ft_launcher, elastic",
    "dlrover-run, elastic",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A fault, and what is asked of this project."""

    text: str
    fault: jobs.Fault
    starts: str
    limit_s: float | None  # beyond the absence of the pod `away`; None: however long it takes
    away: int | None = None
    before: int = 3  # workers that train before the fault, and after it
    after: int = 3
    is_elastic: bool = False

    def is_met(self, whole_s: float, beyond_s: float | None, starts: str) -> bool:
        """Whether one run did what is asked."""
        counted_s = whole_s if self.away is None else beyond_s
        in_time = self.limit_s is None or (counted_s is not None and counted_s <= self.limit_s)
        return in_time and starts == self.starts


def _stays(node: int) -> Row:
    return Row(text=f"worker of node {node} killed", fault=jobs.kill_worker(node), starts="1/1/1", limit_s=1.5)


def _away(node: int, text: str, fault: jobs.Fault) -> Row:
    return Row(text=text, fault=fault, starts=("2/1/1", "1/2/1")[node], limit_s=2.0, away=node)


def _elastic(text: str, fault: jobs.Fault, limit_s: float, before: int = 3, after: int = 2) -> Row:
    return Row(text=text, fault=fault, starts="1/1/1", limit_s=limit_s, before=before, after=after, is_elastic=True)


ROWS = {
    "worker-1": _stays(1),
    "worker-0": _stays(0),
    "pod-1": _away(1, "pod of node 1 killed", jobs.kill_pod(1)),
    "pod-0": _away(0, "pod of node 0 killed", jobs.kill_pod(0)),
    "term-1": _away(1, "pod of node 1 gets SIGTERM", jobs.stop_pod(1)),
    "term-0": _away(0, "pod of node 0 gets SIGTERM", jobs.stop_pod(0)),
    "new-ip-1": _away(1, "node 1 comes back with a new IP", jobs.move_pod(1)),
    "new-ip-0": _away(0, "node 0 comes back with a new IP", jobs.move_pod(0)),
    "lost-1": _elastic("node 1 lost for good", jobs.lose_pod(1), 4.0),
    "lost-0": _elastic("node 0 lost for good", jobs.lose_pod(0), 10.0),
    "late": _elastic("one pod joins late", jobs.start_late, 3.0, before=2, after=3),
    "hang": Row(text="a worker is stopped", fault=jobs.hang_worker(1), starts="1/1/1", limit_s=None),
}


def once(who: Contestant, row: Row) -> Mapping[str, Reading | str]:
    """Start a job, let the fault happen, watch."""
    with trees.folder() as folder:
        script = jobs.training(Path(folder))
        argv = (*trees.private(), *who.argv(script, is_hang=row.limit_s is None))
        names = (*who.contract.names, *who.helpers)
        with pods_of(names, argv, who.env, Path(folder), at_first=row.before) as job, who.beside(job):
            wait_for(lambda: jobs.is_steady(job.folder, row.before), "all to train at first", BEGIN_S, 0.05)
            return _watched(job, row)


def _watched(job: Job, row: Row) -> Mapping[str, Reading | str]:
    before = {step.start for step in jobs.steps(job.folder)}
    away = None if row.away is None else job.pods[row.away]
    had = 0 if away is None else away.starts
    at_s = time.monotonic()
    row.fault(job)
    is_back = False
    while not is_back and time.monotonic() < at_s + WATCH_S:
        time.sleep(0.05)
        is_back = jobs.is_steady(job.folder, row.after, tuple(before))
    new = [step for step in jobs.steps(job.folder) if step.start not in before and step.at_s > at_s]
    if not is_back:
        fewer = f", with fewer after {new[0].at_s - at_s:.1f} s" if new else ""
        return {row.text: f"never{fewer}, {_starts(job)}"}
    whole_s = next(step.at_s for step in new if step.start == new[-1].start) - at_s
    found = {row.text: Reading(whole_s, _starts(job))}
    if away is not None and away.starts > had:
        found[BEYOND] = Reading(whole_s - away.restart_s)  # how long it takes to end is not absence
    if new[0].at_s - at_s < whole_s:
        found[FEWER] = Reading(new[0].at_s - at_s)
    return found


def _starts(job: Job) -> str:
    return "/".join(str(pod.starts) for pod in job.pods)


def opened(row: Row) -> Setup:
    """All that can meet this fault: only elastic jobs shrink and grow."""
    found, absent = contestants.here()
    cases = [
        Case(
            who.name,
            {row.text: "s"},
            functools.partial(once, who, row),
            BEGIN_S + WATCH_S + 30.0,
            RUN_S,
            {BEYOND: "s", FEWER: "s"},
        )
        for who in found
        if who.is_elastic or not row.is_elastic
    ]
    return Setup(cases, absent)


def _section(name: str, row: Row) -> Section:
    return Section(
        name=f"survival-{name}",
        title=f"Survival: {row.text}",
        about=ABOUT,
        open=functools.partial(opened, row),
        versions=versions_of_launchers,
        whos=contestants.NAMES,
        missing=missing,
        is_by_default=name == next(iter(ROWS)),
    )


SECTIONS = tuple(_section(name, row) for name, row in ROWS.items())
NAMES = tuple(section.name for section in SECTIONS)
_BY_SECTION = dict(zip(NAMES, ROWS.values(), strict=True))


# -- the table ------------------------------------------------------------------------------------


def table(group: Sequence[Results]) -> str:
    """Faults down, contestants across; all of one machine and the same versions."""
    columns = tables.columns_of(group, COLUMNS)
    lines = [["fault", *(column.removesuffix(", elastic") for column in columns)]]
    for one in group:
        row = _BY_SECTION[one.section]
        lines.append([row.text, *(cell(row, who, one) for who in columns)])
    return tables.markdown(lines)


def rows(results: Results) -> list[str]:
    """The row that compares: how long the job was not whole."""
    return [_BY_SECTION[results.section].text]


def cell(row: Row, who: str, results: Results) -> str:
    """What the fault did to one contestant; `missed` stands behind what this project promises alone."""
    figures = {figure.row: figure for figure in results.figures if figure.who == who}
    main = figures.get(row.text)
    if main is None or not main.values:
        return "**never**" if main and main.failures else "-"
    text = f"{tables.number(statistics.median(main.values))} ({' or '.join(sorted(set(main.notes)))})"
    if main.failures:
        text += f"; **never** {len(main.failures)} of {len(main.failures) + len(main.values)}"
    missed = _missed(row, main, figures.get(BEYOND)) if who.startswith(tables.OURS) else 0
    return text + (f" — **missed {missed} of {len(main.values) + len(main.failures)}**" if missed else "")


def _missed(row: Row, main: Figure, beyond: Figure | None) -> int:
    rest = beyond.values if beyond and len(beyond.values) == len(main.values) else [None] * len(main.values)
    runs = zip(main.values, rest, main.notes, strict=True)
    return len(main.failures) + sum(not row.is_met(*run) for run in runs)
