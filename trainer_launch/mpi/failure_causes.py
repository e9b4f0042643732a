"""Ends of mpirun in words: who failed, and how; who is missing. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from trainer_launch.membership.retry_policy import FailureRecord, is_of_code
from trainer_launch.model import Member, exit_codes
from trainer_launch.model.units import counted
from trainer_launch.mpi.state import Exited
from trainer_launch.supervisor.error_lines import error_name, headline

_SHOWN = 8  # hosts that one sentence names
_TAG = re.compile(r"\s*(?:\[[^\]\s]{1,80}\](?:<std(?:err|out)>)?:? *)?")  # before a line, by mpirun or torch


def sentence(last: Exited) -> str:
    """How it ended, for the log."""
    said = last.said
    who = "mpirun" if said.rank is None else f"rank {said.rank}"
    where = f" on {said.host}" if said.host else ""
    if said.signal is not None:
        return f"{who} was ended by {_name(said.signal)}{where}"
    return f"{who} ended with exit code {_code(last)}{where}"


def located(last: Exited, hosts: Sequence[Member]) -> Exited:
    """With the host of the first failed rank, where mpirun does not tell it: ranks fill the slots in order."""
    rank = last.said.rank
    if rank is None or last.said.host is not None:
        return last
    for member in hosts:
        if member.slots is None:
            return last
        if rank < member.slots:
            return replace(last, said=replace(last.said, host=member.host))
        rank -= member.slots
    return last


def failure(last: Exited, why_not_again: str | None) -> dict[str, object]:
    """What PID 1 is told."""
    said = last.said
    return {
        "rank": said.rank,
        "exit_code": _code(last),
        "signal": said.signal,
        "hostname": said.host,
        "lines": list(last.lines),
        "why_not_again": why_not_again,
    }


def code_of(last: Exited) -> int:
    """The exit code that says it: the first failed rank's own."""
    return exit_codes.of_signal(last.said.signal) if last.said.signal is not None else _code(last)


def record(last: Exited, attempt: int) -> FailureRecord:
    """This end for the retry policy; an error of the code counts before what it has done to other ranks."""
    lines = [_TAG.sub("", line, count=1) for line in last.lines]
    of_code = (line for line in reversed(lines) if is_of_code(error_name(line), line))
    message = next(of_code, None) or headline(lines, only_named=True)
    said = last.said
    return FailureRecord(
        attempt=attempt,
        rank=said.rank,
        exit_code=_code(last),
        signal=said.signal,
        error=error_name(message),
        message=message.strip(),
    )


def missing(wanted: Sequence[Member], ready: Collection[str], stuck: Mapping[str, str], lost: str | None) -> str:
    """Who is not there when the time is up, and where each is stuck."""
    absent = [member.host for member in wanted if member.host not in ready]
    shown = "; ".join(f"{host}: {stuck.get(host, 'not looked for yet')}" for host in absent[:_SHOWN])
    more = f"; and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
    what = f"{lost} did not come back: " if lost in absent else ""
    return f"{what}{len(wanted) - len(absent)} of {counted(len(wanted), 'host')} ready; missing: {shown}{more}"


def _code(last: Exited) -> int:
    return last.code if last.said.exit_code is None else last.said.exit_code


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
