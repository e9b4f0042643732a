"""What is shown when a rehearsal has ended: a row for each pod, the job's condition, the cause. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trainer_launch.model import exit_codes
from trainer_launch.rehearsal.controllers.job_lifecycle import State
from trainer_launch.rehearsal.controllers.pod_lifecycle import Phase, PodState
from trainer_launch.rehearsal.controllers.pod_values import Pod
from trainer_launch.rehearsal.faults.fault import Fault
from trainer_launch.supervisor.outcome import WHAT_TO_DO

_STOPPED = "reason=Stopped"
_OF_OTHERS = (_STOPPED, "reason=PeerLost", "reason=Succeeded")  # other pods tell why
_AT_MOST = 3  # different ones
HEAD = ("POD", "STATUS", "CREATED", "RESTARTS", "EXIT", "MESSAGE")
_LEGEND = "CREATED: how often the pod was created. RESTARTS: container restarts in the pod that was created last.\n"


def table(state: State, messages: Mapping[str, str]) -> str:
    """The rows; `messages` is the first line of the termination message of each pod that has left one."""
    rows = [HEAD]
    for name, one in state.states.items():
        code = one.codes.get(teller(state.pods[name], one))
        exit_code = "-" if code is None else str(code)
        message = _message(state, name, messages.get(name, ""))
        rows.append((name, _status(state, one), str(one.starts), str(one.restart_count), exit_code, message))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD) - 1)]
    shown = "".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip() + "\n"
        for row in rows
    )
    is_plain = all(one.starts <= 1 and not one.restart_count for one in state.states.values())
    return shown if is_plain else shown + _LEGEND


def teller(pod: Pod, state: PodState) -> str:
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
        container, said = teller(state.pods[name], state.states[name]), messages.get(name, "")
        code = state.states[name].codes.get(container)
        is_told = bool(said) or container != state.pods[name].draft.main
        if code and is_told and not said.startswith(_OF_OTHERS):
            message = _message(state, name, said.partition(" | ")[2] or said)
            return f"Cause: {name} ended with exit code {code}: {message}\n"
    return ""


def advice(state: State, last_words: Mapping[str, str]) -> str:
    """What to do about the pods that failed by themselves, as their messages have it; each thing once."""
    if state.condition is None or state.condition.succeeded:
        return ""
    pods: dict[str, str] = {}
    for name, text in last_words.items():
        first, *rest = text.splitlines() or [""]
        if not first.startswith(_OF_OTHERS):
            for line in map(str.strip, rest):
                if line.startswith(WHAT_TO_DO):
                    pods.setdefault(line[len(WHAT_TO_DO) :].strip(), name)
    return "".join(f"What to do ({name}): {text}\n" for text, name in list(pods.items())[:_AT_MOST])


def missed(faults: Iterable[tuple[Fault, str]]) -> str:
    """One line for each fault that was asked for and was not carried out, with the reason."""
    return "".join(f"fault did not happen: {fault.text}: {why}\n" for fault, why in faults)


def _status(state: State, one: PodState) -> str:
    """As kubectl has it; a pod that its controller removed after the job succeeded did its part."""
    return "Completed" if _is_completed(state, one) else one.phase.value


def _is_completed(state: State, one: PodState) -> bool:
    has_succeeded = state.condition is not None and state.condition.succeeded
    return has_succeeded and one.phase is Phase.GONE and not one.disrupted


def _message(state: State, name: str, said: str) -> str:
    pod, one = state.pods[name], state.states[name]
    container = teller(pod, one)
    if _is_completed(state, one) and (not said or said.startswith(_STOPPED)):
        return "stopped after the job succeeded"
    code = one.codes.get(container)
    text = said or ("" if code is None else exit_codes.describe(code))
    return text if container == pod.draft.main or not text else f"init container {container}: {text}"
