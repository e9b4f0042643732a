"""What `run` does with the report that an init container's preflight has left: look again at what is its own.

An init container has a cgroup, limits, capabilities and perhaps a /dev/shm of its own, so it cannot vouch for ours.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

from trainer_launch import preflight
from trainer_launch.commands.preflight import STATE_FILE, subject_of
from trainer_launch.host.deadline_subprocess import Tried, try_out
from trainer_launch.host.files import LiveFiles
from trainer_launch.host.machine import probe
from trainer_launch.model.findings import Finding, Status, Value
from trainer_launch.model.settings import Settings
from trainer_launch.model.units import printable
from trainer_launch.planning.gather import Reading
from trainer_launch.preflight import report_json
from trainer_launch.preflight.check_context import with_container

LIMIT_S = 0.12  # for all of it: workers are waiting
_CHILD_S = 0.1
_KNOWN = (Status.PASS, Status.WARN, Status.FAIL)  # from good to bad
_log = logging.getLogger(__name__)


def compare(folder: str, reading: Reading, settings: Settings) -> None:
    """Say what differs here from what the preflight found; without its report, nothing is done."""
    path = os.path.join(folder, STATE_FILE)
    data = LiveFiles(report_json.MAX_BYTES + 1).read(path)
    if data is None:
        if os.path.exists(path):
            _log.warning("cannot read %s; run both containers as the same user", path)
        return
    try:
        before = {finding.check: finding for finding in report_json.parse(data)}
    except ValueError as problem:
        _log.warning("%s was not written by a preflight of this version: %s", path, problem)
        return
    fresh = replace(reading, host=probe(reading.pod.env))  # /dev/shm may have been enlarged
    subject = replace(with_container(subject_of(fresh, settings)), try_out=_in_a_hurry)
    report = preflight.run(subject, preflight.OF_A_CONTAINER, limit_s=LIMIT_S)
    for level, sentence in differences(before, report.findings):
        _log.log(level, "%s", sentence)


def differences(before: Mapping[str, Finding], now: tuple[Finding, ...]) -> Iterator[tuple[int, str]]:
    """A level and a sentence for each value that is another one here; what is unknown says nothing."""
    for finding in now:
        then = before.get(finding.check)
        if then is None or then.status not in _KNOWN or finding.status not in _KNOWN:
            continue
        is_worse = _KNOWN.index(finding.status) > _KNOWN.index(then.status)
        if is_worse or then.measured != finding.measured:
            yield (
                logging.WARNING if is_worse else logging.INFO,
                f"{finding.check}: preflight's container had {_shown(then.measured, finding.unit)}, this one has "
                f"{_shown(finding.measured, finding.unit)}"
                + (f": {finding.text}. What to do: {finding.action}" if is_worse else ""),
            )


def _in_a_hurry(what: str, argument: str, limit_s: float) -> Tried:
    return try_out(what, argument, min(limit_s, _CHILD_S))


def _shown(value: Value, unit: str) -> str:
    """The other container wrote it: nothing of it may break a line of the log."""
    if value is None:
        return "no limit"
    text = printable(str(value)[:40])
    return f"{text} {unit}".strip()
