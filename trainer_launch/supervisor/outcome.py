"""Report how a run ended: an exit code for the controller, a log line, the termination message for a person."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence

from msgspec.structs import replace

from trainer_launch.host import files
from trainer_launch.host.slow_files import within
from trainer_launch.model import Failure, Outcome, Verdict, exit_codes
from trainer_launch.model.errors import LaunchError
from trainer_launch.model.settings import Settings
from trainer_launch.model.signal_policy import signal_name

log = logging.getLogger(__name__)

TERMINATION_MESSAGE_BYTES = 4096  # kubelet reads no more
_SUMMARY_BYTES = 1024
_HINT_BYTES = 512
_LINE_BYTES = 512
_CUT = " [...]"
_DEFAULT = Settings.model_fields["termination_log"].default
WHAT_TO_DO = "What to do:"  # begins the last line


def exit_code(outcome: Outcome) -> int:
    """Return what the pod ends with."""
    if outcome.verdict is Verdict.STOPPED:
        # A person's Ctrl-C is 130 to every shell; a controller sends SIGTERM.
        return exit_codes.of_signal(signal.SIGINT) if outcome.stop_signal == signal.SIGINT else exit_codes.STOPPED
    if outcome.verdict is Verdict.SUCCEEDED:
        return exit_codes.SUCCEEDED
    return outcome.failure.exit_code if outcome.failure else exit_codes.FAILED


def placed(outcome: Outcome, node_rank: int | None, host: str) -> Outcome:
    """Return the outcome with this pod's place, and the failure's; what the agent knows of that stands."""
    node_rank = node_rank if outcome.node_rank is None else outcome.node_rank
    outcome, failure = replace(outcome, node_rank=node_rank, host=host), outcome.failure
    if failure is None:
        return outcome
    rank = node_rank if failure.node_rank is None else failure.node_rank
    where = host if failure.host is None else failure.host or None  # "": elsewhere, and nobody knows where
    return replace(outcome, failure=replace(failure, node_rank=rank, host=where))


def summary(outcome: Outcome) -> str:
    """Return one line that can be read alone."""
    failure = outcome.failure
    words = [f"reason={failure.reason if failure else outcome.verdict.value}"]
    if failure:
        words += _place(failure)
    elif outcome.verdict is not Verdict.SUCCEEDED:
        words += _named(node=outcome.node_rank, host=outcome.host or None)
    code = exit_code(outcome)
    words += [f"exit={code}", f"attempt={outcome.attempt}"]
    words += _retryable(failure.restart_helps if failure else exit_codes.retryable(code))
    words.append(f"seconds={outcome.took_s:.1f}")
    if outcome.survivors:
        words.append(f"survivors={len(outcome.survivors)}")
    text = failure.message if failure else outcome.note
    return _cut(" ".join(words) + (f" | {_single_line(text)}" if text else ""), _SUMMARY_BYTES)


def while_stopping(number: int, node_rank: int | None, host: str, took_s: float) -> str:
    """Return the termination message from a request to stop on, until it is known how all ended."""
    stopped = Outcome(
        verdict=Verdict.STOPPED,
        stop_signal=number,
        took_s=took_s,
        node_rank=node_rank,
        host=host,
        note=f"asked to stop by {signal_name(number)}; the launcher was killed before all processes had ended: "
        f"set terminationGracePeriodSeconds higher than --grace",
    )
    return summary(stopped) + "\n"


def refusal(message: str, code: int, host: str) -> str:
    """Return the termination message of a run that could not begin."""
    reason = "NotRunnable" if exit_codes.cannot_run(code) else "NotStarted"
    reason = "Misconfigured" if code == exit_codes.MISCONFIGURED else reason
    line = " ".join([f"reason={reason}", f"host={host}", f"exit={code}", *_retryable(exit_codes.retryable(code))])
    return _cut(f"{line} | {_single_line(message)}\n", TERMINATION_MESSAGE_BYTES)


def termination_message(outcome: Outcome, spent: str = "") -> str:
    """Return the termination message: the summary, the last lines, the evidence, how time was spent, what to do."""
    first = summary(outcome)
    failure = outcome.failure
    if failure is None and not outcome.survivors:
        return "\n".join(filter(None, (first, spent))) + "\n"
    hint = f"{WHAT_TO_DO} {_single_line(failure.hint)}" if failure and failure.hint else ""
    stuck = f"Not ended: {', '.join(outcome.survivors)}" if outcome.survivors else ""
    shown = f"Evidence: {_single_line('; '.join(failure.evidence))}" if failure and failure.evidence else ""
    ends = [_cut(text, _HINT_BYTES) for text in (shown, stuck, spent, hint) if text]
    room = TERMINATION_MESSAGE_BYTES - sum(_size(line) for line in (first, *ends))
    lines = _latest(failure.last_lines, room) if failure else []
    return "\n".join([first, *lines, *ends]) + "\n"


def fitted(text: str) -> str:
    """Cut a text to what kubelet reads of it."""
    return _cut(text, TERMINATION_MESSAGE_BYTES)


def write_termination_message(text: str, path: str) -> None:
    """Write the pod's termination message; the default file exists only in Kubernetes."""
    is_default = path == _DEFAULT
    if is_default and not within(path, False, os.path.exists, path):
        return  # not in a Kubernetes container
    try:
        files.overwrite(path, text.encode(errors="replace"), may_make=not is_default)
    except OSError as error:
        log.warning("cannot write the termination message to %s: %s", path, error.strerror)


def refuse(problem: LaunchError, path: str) -> None:
    """Write the reason why nothing was started to the termination message."""
    write_termination_message(refusal(str(problem), problem.exit_code, os.uname().nodename), path)


def _place(failure: Failure) -> list[str]:
    words = _named(rank=failure.rank, node=failure.node_rank, host=failure.host)
    return words if failure.signal is None else [*words, f"signal={signal_name(failure.signal)}"]


def _named(**values: object) -> list[str]:
    return [f"{name}={value}" for name, value in values.items() if value is not None]


def _retryable(helps: bool | None) -> list[str]:
    """Whether a restart can help; nothing where nobody knows."""
    return [] if helps is None else [f"retryable={str(helps).lower()}"]


def _latest(lines: Sequence[str], room: int) -> list[str]:
    """Return as many of the last lines as fit; the very last one matters most."""
    kept: list[str] = []
    for line in reversed(lines):
        short = _cut(line, _LINE_BYTES)
        room -= _size(short)
        if room < 0:
            break
        kept.insert(0, short)
    return kept


def _size(line: str) -> int:
    return len(line.encode(errors="replace")) + 1


def _cut(text: str, limit: int) -> str:
    """Shorten to `limit` bytes of UTF-8, never inside a character."""
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return data.decode()
    end = _CUT + ("\n" if text.endswith("\n") else "")
    return data[: limit - len(end)].decode(errors="ignore") + end


def _single_line(text: str) -> str:
    return " ".join(text.split())
