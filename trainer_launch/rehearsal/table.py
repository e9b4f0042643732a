"""What is shown when a rehearsal has ended: a row for each pod, and the job's condition. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trainer_launch import exits
from trainer_launch.manifest.machine import State
from trainer_launch.outcome import WHAT_TO_DO
from trainer_launch.rehearsal.fault import Fault

_OF_OTHERS = ("reason=Stopped", "reason=PeerLost", "reason=Succeeded")  # other pods tell why
_AT_MOST = 3  # different ones
HEAD = ("POD", "PHASE", "STARTS", "RESTARTS", "EXIT", "LAST WORDS")


def table(state: State, words: Mapping[str, str]) -> str:
    """The rows; `words` is the first line of the last words of each pod that has left some."""
    rows = [HEAD]
    for name, one in state.states.items():
        code = one.codes.get(state.pods[name].draft.main)
        said = words.get(name) or ("" if code is None else exits.describe(code))
        exit_code = "-" if code is None else str(code)
        rows.append((name, one.phase.value, str(one.starts), str(one.restart_count), exit_code, said))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD) - 1)]
    return "".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip() + "\n"
        for row in rows
    )


def condition(title: str, state: State, seconds: float) -> str:
    """One line: whether the job has succeeded, when, and why not."""
    end = state.condition
    if end is None:
        return f"{title}: stopped after {seconds:.1f} s\n"
    verdict = "Succeeded" if end.succeeded else "Failed"
    return f"{title}: {verdict} after {seconds:.1f} s ({end.reason}): {end.message}\n"


def advice(state: State, last_words: Mapping[str, str]) -> str:
    """What to do about the pods that failed by themselves, as their last words have it; each thing once."""
    if state.condition is None or state.condition.succeeded:
        return ""
    pods: dict[str, str] = {}
    for name, text in last_words.items():
        first, *rest = text.splitlines() or [""]
        if not first.startswith(_OF_OTHERS):
            for line in rest:
                if line.startswith(WHAT_TO_DO):
                    pods.setdefault(line[len(WHAT_TO_DO) :].strip(), name)
    return "".join(f"What to do ({name}): {text}\n" for text, name in list(pods.items())[:_AT_MOST])


def missed(faults: Iterable[tuple[Fault, str]]) -> str:
    """One line for each fault that was asked for and was not carried out, with the reason."""
    return "".join(f"fault missed: {fault.text}: {why}\n" for fault, why in faults)
