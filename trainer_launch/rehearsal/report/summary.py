"""A rehearsal in words: the live table, the table at its end, a report's headline, sums and rows."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from trainer_launch.model import exit_codes
from trainer_launch.model.goodput import ratio, sentence
from trainer_launch.model.units import aligned, counted
from trainer_launch.observability.html import clean, seconds
from trainer_launch.rehearsal.controllers.pod_lifecycle import Phase, PodState
from trainer_launch.rehearsal.controllers.pod_values import Pod
from trainer_launch.rehearsal.controllers.restart_decisions import State
from trainer_launch.rehearsal.faults.grammar import Fault
from trainer_launch.rehearsal.report.fault_costs import Analysis, Cost
from trainer_launch.rehearsal.report.history import Lane, What
from trainer_launch.rehearsal.report.wall_time import lost, spent
from trainer_launch.rehearsal.script_checks import Verdict
from trainer_launch.supervisor import incident_bundle
from trainer_launch.supervisor.outcome import WHAT_TO_DO

UNKNOWN = "-"
MOST_ROWS = 200  # of faults
_NAME_CHARS = 63  # of a pod


class Headline(Struct, frozen=True, kw_only=True):
    """The verdict first, and what it is about."""

    tone: str  # "good", "bad" or "plain"
    text: str
    about: str  # the job, and how it ended
    sums: tuple[tuple[str, str], ...]  # figure and what it counts


def headline(analysis: Analysis, verdict: Verdict) -> Headline:
    """The whole rehearsal in one line, one sentence and five figures."""
    history, totals = analysis.history, analysis.totals
    ends = [one for one in history.entries if one.what is What.CONDITION]
    state = "runs since" if history.ended_s is None else "stopped after"
    state = {True: "succeeded after", False: "failed after"}.get(bool(history.succeeded), state) if ends else state
    about = f"{clean(history.kind)} {clean(history.name)} {state} {seconds(totals.took_s)}"
    if ends and (why := clean(ends[-1].text).removeprefix("Succeeded").removeprefix("Failed").strip(" :")):
        about += f" {why}" if why.startswith("(") else f": {why}"
    tone, text = _verdict(analysis, verdict, has_ended=bool(ends))
    return Headline(tone=tone, text=text, about=about, sums=_sums(analysis))


def _verdict(analysis: Analysis, verdict: Verdict, *, has_ended: bool) -> tuple[str, str]:
    totals = analysis.totals
    if verdict.failed:
        kinds = list(dict.fromkeys(one.check.value for one in verdict.failed))
        return "bad", f"FAILED: {', '.join(kinds)}"
    if not has_ended:
        return "plain", "Still running" if analysis.history.ended_s is None else "Stopped before the job ended"
    if not analysis.history.succeeded:
        return "bad", "The job failed"
    if totals.missed:
        return "bad", f"{counted(totals.missed, 'fault')} never happened"
    if not totals.faults:
        return "good", "The job succeeded"
    return "good", f"Survived {counted(totals.faults, 'fault')}"


def _sums(analysis: Analysis) -> tuple[tuple[str, str], ...]:
    totals, pods = analysis.totals, len(analysis.lanes)
    return (
        (str(pods), "pod" if pods == 1 else "pods"),
        (str(totals.faults), "fault" if totals.faults == 1 else "faults"),
        (str(totals.attempts), "attempt" if totals.attempts == 1 else "attempts"),
        (UNKNOWN if totals.downtime_s is None else seconds(totals.downtime_s), "without a new step"),
        (UNKNOWN if totals.lost is None else f"{totals.lost:,}", "repeated steps"),
        (UNKNOWN if totals.top is None else f"{totals.top:,}", "highest step"),
        *(((f"{100 * ratio(spent(analysis.spans)):.0f} %", "goodput"),) if analysis.spans else ()),
    )


FAULT_COLUMNS = ("#", "at", "fault", "pod", "downtime", "repeated steps", "effect")


def fault_rows(analysis: Analysis) -> list[tuple[str, ...]]:
    """One row of FAULT_COLUMNS for each fault."""
    return [_fault_row(analysis, one) for one in analysis.costs[:MOST_ROWS]]


def _fault_row(analysis: Analysis, cost: Cost) -> tuple[str, ...]:
    name = "all" if cost.fault.pod is None else short_name(analysis, cost.fault.pod)
    head = (str(cost.number or UNKNOWN), seconds(cost.fault.at_s), clean(cost.fault.text), name)
    if cost.is_missed:
        return (*head, UNKNOWN, UNKNOWN, "it never happened")
    downtime = UNKNOWN if cost.downtime_s is None else f"{'over ' * cost.is_open}{seconds(cost.downtime_s)}"
    effect = "; ".join(filter(None, (_followed(cost), _spent_on(analysis, cost))))
    return (*head, downtime, UNKNOWN if cost.lost is None else f"{cost.lost:,}", effect)


def _spent_on(analysis: Analysis, cost: Cost) -> str:
    """What the time from a fault on went into, until there was a new step or the next fault."""
    later = [one.fault.at_s for one in analysis.costs if one.fault.at_s > cost.fault.at_s]
    ends = [one for one in (cost.goes_on_s, *later) if one is not None]
    return lost(analysis.spans, cost.fault.at_s, min(ends, default=float("inf")))


def _followed(cost: Cost) -> str:
    away = f"pod away for {seconds(cost.away_s)}" if cost.away_s else ""
    if cost.downtime_s is None:
        return f"steps unknown; {away}" if away else "steps unknown"
    if cost.is_open:
        told = "no step at all" if cost.reached is None else f"no step after step {cost.reached:,}"
    elif cost.resumed is not None and cost.reached is not None:
        told = f"reached step {cost.reached:,}, resumed from step {max(0, cost.resumed):,}"
    else:
        told = "continued" if cost.reached is not None else "no step yet"
    return "; ".join(filter(None, (told, away)))


def cost_lines(analysis: Analysis) -> str:
    """What each fault that came has cost, one line each."""
    came = [one for one in analysis.costs[:MOST_ROWS] if not one.is_missed]
    told = "".join(f"Fault {one.number} ({_about(analysis, one)}) cost {_price(analysis, one)}\n" for one in came)
    return told + (f"Goodput: {sentence(spent(analysis.spans))}\n" if analysis.spans else "")


def _about(analysis: Analysis, cost: Cost) -> str:
    where = "" if cost.fault.pod is None else f", {short_name(analysis, cost.fault.pod)}"
    return f"{clean(cost.fault.text)}{where}, at {seconds(cost.fault.at_s)}"


def _price(analysis: Analysis, cost: Cost) -> str:
    went = _spent_on(analysis, cost)
    if cost.downtime_s is None:
        return "; ".join(filter(None, (f"an unknown time: {_followed(cost)}", went)))
    told = f"{'over ' * cost.is_open}{seconds(cost.downtime_s)} without a new step"
    told += f", {counted(cost.lost or 0, 'repeated step')}; {_followed(cost)}"
    return f"{told}; {went}" if went else told


POD_COLUMNS = ("pod", "created", "attempts", "exit", "message")


def pod_rows(analysis: Analysis) -> list[tuple[str, ...]]:
    """One row of POD_COLUMNS for each pod: its termination message, else the last line that it said."""
    return [_pod_row(analysis, lane) for lane in analysis.lanes]


def _pod_row(analysis: Analysis, lane: Lane) -> tuple[str, ...]:
    words, seen = analysis.history.words or {}, analysis.history.seen or {}
    code = UNKNOWN if lane.code is None else str(lane.code)
    last = clean(words.get(lane.pod) or seen.get(lane.pod) or "")
    return clean(lane.pod)[:_NAME_CHARS], str(lane.lives), str(lane.attempts), code, last or UNKNOWN


def short_name(analysis: Analysis, pod: str) -> str:
    """A pod's name without the job's, which all have."""
    head = f"{analysis.history.name}-"
    is_shared = all(lane.pod.startswith(head) and lane.pod != head for lane in analysis.lanes)
    return clean(pod.removeprefix(head) if is_shared else pod)[:_NAME_CHARS]


# -- the table at the end ----------------------------------------------------------------------


_STOPPED = "reason=Stopped"
_OF_OTHERS = (_STOPPED, "reason=PeerLost", "reason=Succeeded")  # other pods tell why
_AT_MOST = 3  # different ones
HEAD = ("POD", "STATUS", "CREATED", "RESTARTS", "EXIT", "MESSAGE")
_LEGEND = "CREATED: how often the pod was created. RESTARTS: container restarts in the pod that was created last.\n"


def table(state: State, messages: Mapping[str, str]) -> str:
    """The rows; `messages` is the first line of the termination message of each pod that has left one."""
    rows = [HEAD]
    for name, one in state.states.items():
        message = _message(state, name, messages.get(name, ""))
        rows.append((name, _status(state, one), *_figures(state, name), message))
    shown = "".join(f"{row.rstrip()}\n" for row in aligned(rows))
    is_plain = all(one.starts <= 1 and not one.restart_count for one in state.states.values())
    return shown if is_plain else shown + _LEGEND


def _figures(state: State, name: str) -> tuple[str, str, str]:
    """CREATED, RESTARTS and EXIT of a pod."""
    one = state.states[name]
    code = one.codes.get(deciding_container(state.pods[name], one))
    return str(one.starts), str(one.restart_count), UNKNOWN if code is None else str(code)


def deciding_container(pod: Pod, state: PodState) -> str:
    """The container whose end is told: the one that counts, or an init container that kept it from starting."""
    failed = [
        one.name for one in pod.init if state.codes.get(one.name, exit_codes.SUCCEEDED) != exit_codes.SUCCEEDED
    ]
    return failed[-1] if failed and pod.draft.main not in state.codes else pod.draft.main


def condition(title: str, state: State, seconds: float) -> str:
    """One line: whether the job has succeeded, when, and why not."""
    end = state.condition
    if end is None:
        return f"{title}: stopped after {seconds:.1f} s\n"
    verdict = "Succeeded" if end.succeeded else "Failed"
    return f"{title}: {verdict} after {seconds:.1f} s ({end.reason}): {end.message}\n"


def cause(state: State, messages: Mapping[str, str]) -> str:
    """One line about the pod for which the job failed, unless that pod only lost another one."""
    end = state.condition
    if end is None or end.succeeded or end.pod not in state.states:
        return ""
    failed = [name for name, one in state.states.items() if one.phase is Phase.FAILED]
    for name in (end.pod, *failed):
        container, said = deciding_container(state.pods[name], state.states[name]), messages.get(name, "")
        code = state.states[name].codes.get(container)
        is_told = bool(said) or container != state.pods[name].draft.main
        if code and is_told and not said.startswith(_OF_OTHERS):
            message = _message(state, name, said.partition(" | ")[2] or said)
            return f"Cause: {name} ended with exit code {code}: {message}\n"
    return ""


def advice(state: State, messages: Mapping[str, str]) -> str:
    """What to do about the pods that failed by themselves, as their messages have it; each thing once."""
    if state.condition is None or state.condition.succeeded:
        return ""
    pods: dict[str, str] = {}
    for name, text in messages.items():
        first, *rest = text.splitlines() or [""]
        if not first.startswith(_OF_OTHERS):
            for line in map(str.strip, rest):
                if line.startswith(WHAT_TO_DO):
                    pods.setdefault(line[len(WHAT_TO_DO) :].strip(), name)
    return "".join(f"What to do ({name}): {text}\n" for text, name in list(pods.items())[:_AT_MOST])


def missed(faults: Iterable[tuple[Fault, str]]) -> str:
    """One line for each fault that was asked for and was not carried out, with the reason."""
    return "".join(f"fault did not happen: {fault.text}: {why}\n" for fault, why in faults)


def incidents(place: str, began_s: float) -> str:
    """One line about what was collected since `began_s`, in seconds since the epoch, and where it is kept.

    Those of another rehearsal at the same time count, too, if it uses the same directory.
    """
    found = incident_bundle.stored(place) if os.path.isdir(place) else []
    new = sum(one.incident.time_s >= began_s for one in found)
    where = f"in {place}; see trainer-launch incidents show --incident-dir {shlex.quote(place)}"
    return f"{counted(new, 'incident')} {where}\n" if new else ""


def _status(state: State, one: PodState) -> str:
    """As kubectl has it; a pod that its controller removed after the job succeeded did its part."""
    return "Completed" if _is_completed(state, one) else one.phase.value


def _is_completed(state: State, one: PodState) -> bool:
    has_succeeded = state.condition is not None and state.condition.succeeded
    return has_succeeded and one.phase is Phase.GONE and not one.disrupted


def _message(state: State, name: str, said: str) -> str:
    pod, one = state.pods[name], state.states[name]
    container = deciding_container(pod, one)
    if _is_completed(state, one) and (not said or said.startswith(_STOPPED)):
        return "stopped after the job succeeded"
    code = one.codes.get(container)
    text = said or ("" if code is None else exit_codes.describe(code))
    return text if container == pod.draft.main or not text else f"init container {container}: {text}"


# -- the live table ----------------------------------------------------------------------------


LIVE_HEAD = ("POD", "STATUS", "STEP", *HEAD[2:5], "LAST LINE")
_WORST_FIRST = ("Failed", "Restarting", "Terminating", "Terminated", "Pending", "Init", "Running")


def live_title(title: str, state: State, took_s: float, top: int | None, came: int, to_come: Sequence[str]) -> str:
    """The line above the live table: the job, its highest step, how many faults came, and which come next."""
    parts = [title, seconds(took_s)]
    if top is not None:
        parts.append(f"step {top:,}")
    if came:
        parts.append(f"{counted(came, 'fault')} injected")
    if to_come:
        more = f" (and {len(to_come) - 1} more)" if len(to_come) > 1 else ""
        parts.append(f"next: {to_come[0]}{more}")
    if state.condition is not None:
        parts.append(state.condition.text)
    return clean(" · ".join(parts))


def live_table(state: State, steps: Mapping[str, int], last_line: Callable[[Pod], str], most: int) -> list[str]:
    """A header and at most `most` rows; where there are more pods, those in trouble, and a count of the others."""
    statuses = {name: _live_status(state, name) for name in state.states}
    shown, others = list(statuses), []
    if len(statuses) > most:
        shown.sort(key=lambda name: (*_WORST_FIRST, statuses[name]).index(statuses[name]))
        shown, others = shown[: most - 1], shown[most - 1 :]
    rows = [LIVE_HEAD]
    for name in shown:
        step = f"{steps[name]:,}" if name in steps else UNKNOWN
        line = clean(last_line(state.pods[name]))
        rows.append((name, statuses[name], step, *_figures(state, name), line))
    counts = Counter(statuses[name] for name in others)
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    return aligned(rows) + [f"and {len(others)} more: {told}"] * bool(others)


def _live_status(state: State, name: str) -> str:
    """As in the table at the end, but a pod that is stopped or waits to start again says so."""
    one = state.states[name]
    waits = one.phase is Phase.PENDING and one.starts > 0
    if waits or state.pods[name].draft.main in one.due_s:
        return "Restarting"
    return "Terminating" if one.stopping and not one.is_over else _status(state, one)
