"""The output of a rehearsal: a live table while it runs; at its end the report, on the terminal and in files."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_launch.host import files, logs
from trainer_launch.model import exit_codes, removed
from trainer_launch.model.errors import NodeError, UsageError
from trainer_launch.model.redaction import redact_text
from trainer_launch.model.units import aligned, counted, listed
from trainer_launch.observability import live
from trainer_launch.observability.html import clean, seconds
from trainer_launch.preflight.report_formats import check_ending
from trainer_launch.pytorch.worker_ends import SEE_NODE
from trainer_launch.rehearsal.controllers.job_lifecycle import Exited, JobRecord
from trainer_launch.rehearsal.controllers.pod_lifecycle import Phase, PodState
from trainer_launch.rehearsal.controllers.pod_values import Pod
from trainer_launch.rehearsal.history import FaultReport, History, PodResult
from trainer_launch.rehearsal.html_page import page
from trainer_launch.rehearsal.rehearsal_report import (
    COLUMNS,
    MOST_FAULTS,
    UNKNOWN,
    RehearsalReport,
    as_json,
    condition,
    downtime,
    effect,
    pod_cells,
    report_of,
)
from trainer_launch.supervisor.outcome import WHAT_TO_DO

_STOPPED = "reason=Stopped"
_OF_OTHERS = (_STOPPED, "reason=PeerLost", "reason=Succeeded")  # the cause is in other pods
_MOST_ADVICE = 3
_GOODPUT = "Goodput: "
_LIVE_COLUMNS = ("POD", "STATUS", "STEP", "CREATED", "RESTARTS", "EXIT", "LAST LINE")
_WORST_FIRST = ("Failed", "Restarting", "Terminating", "Terminated", "Pending", "Init", "Running")
_MODE = 0o644
_MOST_PODS = 12  # in the live table
_LEGEND = "CREATED: how often the pod was created. RESTARTS: container restarts in the pod that was created last."
_SHOWN_PODS = 3
_WIDTH = 100
Rows = Callable[[int], tuple[str, Sequence[Sequence[str]]]]  # title, heading and rows, with at most so many pods


def paths_of(flags: Mapping[str, Any]) -> tuple[str, ...]:
    """The reports that the command line asks for. Raises UsageError: one cannot be written."""
    paths = tuple(flags["reports"] or ())
    if paths and flags["render"]:
        raise UsageError("--report and --render exclude each other: --render runs nothing; remove one of them")
    for path in paths:
        check(path)
    return paths


def table(rows: Rows) -> contextlib.AbstractContextManager[None]:
    """The live table until the block ends, if it goes to a terminal; `rows` is called in another thread."""
    return live.table(lambda most: rows(min(most, _MOST_PODS))) if live.is_wanted() else contextlib.nullcontext()


def conclude(history: History, paths: Sequence[str]) -> int:
    """Print and write the report; return the rehearsal's exit code."""
    report = report_of(history)
    sys.stderr.write(text(report))
    for path in paths:
        is_page = Path(path).suffix.lower() == ".html"
        _write(path, page(report) if is_page else json.dumps(as_json(report), indent=2) + "\n")
    return report.exit_code


def check(path: str) -> None:
    """Find out before the job starts whether a report can be written.

    Raises:
        UsageError: another ending, or a folder that is not there or not ours.
    """
    if Path(path).suffix.lower() == ".png":
        removed.refuse("--report FILE.png", f"--report {path}")
    check_ending(path)
    if os.path.isdir(path) or not os.access(os.path.dirname(os.path.realpath(path)), os.W_OK):
        raise UsageError(f"--report {path!r} cannot be written; name a file in a writable directory")


def _write(path: str, content: str) -> None:
    """Write a report; a rehearsal that fails to does not end otherwise."""
    try:
        files.replace(os.path.realpath(path), content.encode(errors="replace"), _MODE)
    except (NodeError, OSError) as problem:
        why = problem.strerror if isinstance(problem, OSError) and problem.strerror else problem
        logs.warn(f"--report: {path} was not written: {why}")
    else:
        logs.warn(f"report: {path}")


def text(report: RehearsalReport) -> str:
    """The report on the terminal: pods, how the job ended, faults, failed checks."""
    lines = [
        *_table(report),
        condition(report),
        *report.remarks,
        *(f"fault did not happen: {fault.fault}: {fault.why_not}" for fault in report.faults if not fault.happened),
        *(_cost(report, fault) for fault in report.happened[:MOST_FAULTS]),
        *_failed_checks(report),
    ]
    return "".join(f"{line}\n" for line in lines)


def _table(report: RehearsalReport) -> Iterator[str]:
    rows = [COLUMNS, *pod_cells(report)]
    yield from (row.rstrip() for row in aligned(rows))
    if any(pod.created > 1 or pod.restarts for pod in report.pods):
        yield _LEGEND


def _cost(report: RehearsalReport, fault: FaultReport) -> str:
    """The cost of a fault, in one line."""
    where = "" if fault.pod is None else f", {report.short_name(fault.pod)}"
    head = f"Fault {fault.number} ({clean(fault.fault)}{where}, at {seconds(fault.at_s)}) cost"
    if fault.downtime_s is None:
        return f"{head} an unknown time: steps unknown"
    repeated = "" if fault.repeated_steps is None else f", {counted(fault.repeated_steps, 'repeated step')}"
    return f"{head} {downtime(fault)} without a new step{repeated}; {effect(fault)}"


def _failed_checks(report: RehearsalReport) -> Iterator[str]:
    if report.failed_checks:
        yield f"This job does not survive preemption: {counted(len(report.failed_checks), 'check')} failed."
    for failure in report.failed_checks:
        pods = listed(failure.pods, _SHOWN_PODS)
        sentence = f"FAILED: {failure.check.value}, {pods} at {failure.at_s:.1f} s: {failure.evidence}"
        yield from textwrap.wrap(sentence, _WIDTH, initial_indent="  ", subsequent_indent="    ")
        advice = f"What to do: {failure.advice}"
        yield from textwrap.wrap(advice, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    for remark in report.not_checked:
        yield from textwrap.wrap(f"Not checked: {remark}", _WIDTH, subsequent_indent="  ")


def status(state: JobRecord, name: str) -> str:
    """The state of a pod, as kubectl shows it; a pod that is removed after the job succeeded is completed."""
    pod = state.states[name]
    if _is_completed(state, pod):
        return "Completed"
    if (pod.phase is Phase.PENDING and pod.starts > 0) or state.pods[name].draft.main in pod.due_s:
        return "Restarting"
    return "Terminating" if pod.stopping and not pod.is_over else pod.phase.value


def results(
    state: JobRecord, messages: Mapping[str, str], last_line: Callable[[Pod], str]
) -> tuple[PodResult, ...]:
    """How each pod stands at the end; `messages` are the termination messages, empty where there is none."""
    return tuple(_result(state, name, messages[name], last_line(pod)) for name, pod in state.pods.items())


def _result(state: JobRecord, name: str, message: str, last_line: str) -> PodResult:
    pod = state.states[name]
    is_completed = _is_completed(state, pod)
    return PodResult(
        name=name,
        status="Completed" if is_completed else pod.phase.value,
        created=pod.starts,
        restarts=pod.restart_count,
        exit_code=pod.codes.get(deciding_container(state, name)),
        message=redact_text(_message(state, name, message.partition("\n")[0])),
        last_line=redact_text(last_line),
    )


def remarks(state: JobRecord, messages: Mapping[str, str]) -> tuple[str, ...]:
    """Lines below the table: why the job failed and what to do about it, and what its time was spent on."""
    spent = [line for text in messages.values() for line in text.splitlines() if line.startswith(_GOODPUT)]
    if state.condition is None or state.condition.succeeded:
        return tuple(spent[:1])
    return (*_cause(state, messages), *_advice(messages), *spent[:1])


def _cause(state: JobRecord, messages: Mapping[str, str]) -> list[str]:
    """A line about the pod for which the job failed, unless that pod only lost another pod."""
    end = state.condition
    failed = [name for name, pod in state.states.items() if pod.phase is Phase.FAILED]
    for name in (end.pod, *failed) if end is not None and end.pod in state.states else ():
        container, message = deciding_container(state, name), messages[name].partition("\n")[0]
        code = state.states[name].codes.get(container)
        has_reason = bool(message) or container != state.pods[name].draft.main
        if code and has_reason and not _is_of_others(messages[name]):
            why = _message(state, name, message.partition(" | ")[2] or message)
            return [f"Cause: {name} ended with exit code {code}: {why}"]
    return []


def _is_of_others(message: str) -> bool:
    return message.startswith(_OF_OTHERS) or f"{WHAT_TO_DO} {SEE_NODE} " in message


def _advice(messages: Mapping[str, str]) -> list[str]:
    """Advice about the pods that failed by themselves, as their messages have it; the same text once."""
    pods: dict[str, str] = {}
    for name, text in messages.items():
        if not _is_of_others(text):
            for line in map(str.strip, text.splitlines()[1:]):
                if line.startswith(WHAT_TO_DO):
                    pods.setdefault(line[len(WHAT_TO_DO) :].strip(), name)
    return [f"What to do ({name}): {text}" for text, name in list(pods.items())[:_MOST_ADVICE]]


def deciding_container(state: JobRecord, name: str) -> str:
    """The container whose end counts: the main one, or an init container that kept it from starting."""
    pod, codes = state.pods[name], state.states[name].codes
    failed = [container.name for container in pod.init if codes.get(container.name, 0) != exit_codes.SUCCEEDED]
    return failed[-1] if failed and pod.draft.main not in codes else pod.draft.main


def _is_completed(state: JobRecord, pod: PodState) -> bool:
    has_succeeded = state.condition is not None and state.condition.succeeded
    return has_succeeded and pod.phase is Phase.GONE and not pod.disrupted


def _message(state: JobRecord, name: str, message: str) -> str:
    container = deciding_container(state, name)
    if _is_completed(state, state.states[name]) and (not message or message.startswith(_STOPPED)):
        return "stopped after the job succeeded"
    code = state.states[name].codes.get(container)
    if not message and state.states[name].is_lost:
        return "the pod was deleted, and not created again"
    text = message or ("" if code is None else exit_codes.describe(code))
    return text if container == state.pods[name].draft.main or not text else f"init container {container}: {text}"


def live_title(title: str, state: JobRecord, took_s: float, top: int | None, faults: int) -> str:
    """The line above the live table: the job, its highest step, and how many faults came."""
    parts = [title, seconds(took_s)]
    if top is not None:
        parts.append(f"step {top:,}")
    if faults:
        parts.append(f"{counted(faults, 'fault')} injected")
    if state.condition is not None:
        parts.append(state.condition.text)
    return clean(" · ".join(parts))


def live_rows(
    state: JobRecord, steps: Mapping[str, int], last_line: Callable[[Pod], str], most: int
) -> list[Sequence[str]]:
    """A heading and at most `most` rows; where there are more pods, those in trouble, and a count of the others."""
    statuses = {name: status(state, name) for name in state.states}
    shown, others = list(statuses), []
    if len(statuses) > most:
        shown.sort(key=lambda name: (*_WORST_FIRST, statuses[name]).index(statuses[name]))
        shown, others = shown[: most - 1], shown[most - 1 :]
    rows: list[Sequence[str]] = [_LIVE_COLUMNS]
    for name in shown:
        pod, code = state.states[name], state.states[name].codes.get(deciding_container(state, name))
        step = f"{steps[name]:,}" if name in steps else UNKNOWN
        figures = (str(pod.starts), str(pod.restart_count), UNKNOWN if code is None else str(code))
        rows.append((name, statuses[name], step, *figures, clean(last_line(state.pods[name]))))
    counts = Counter(statuses[name] for name in others)
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    return rows + [(f"and {len(others)} more: {summary}",)] * bool(others)


def ending(before: JobRecord, after: JobRecord, event: Exited, message: str) -> str:
    """How a container ended and what follows, in a sentence; empty where there is nothing to explain.

    `message` is the first line that its launcher left at its end.
    """
    old, new = before.states[event.pod], after.states[event.pod]
    if before.condition is not None or before.asked:
        return ""  # everything ends
    follows = _follows(old, new, event) if after.condition is None else ""
    if event.code == exit_codes.SUCCEEDED and not follows:
        return ""
    is_main = event.container == after.pods[event.pod].draft.main
    name = event.pod if is_main else f"{event.pod}/{event.container}"
    why = message.partition(" | ")[2] or exit_codes.describe(event.code)
    return f"{name} ended with exit code {event.code} ({why})" + (f"; {follows}" if follows else "")


def _follows(old: PodState, new: PodState, event: Exited) -> str:
    if old.stopping:
        if new.running or not old.disrupted:
            return ""
        return "it is not created again" if new.phase is Phase.GONE else f"a new pod follows in {old.back_s:g} s"
    count = new.restarts.get(event.container, 0)
    if new.starts == old.starts and count > old.restarts.get(event.container, 0):
        wait_s = new.due_s.get(event.container, event.at_s) - event.at_s
        return f"restart {count} " + (f"in {wait_s:g} s" if wait_s else "now")
    return ""
