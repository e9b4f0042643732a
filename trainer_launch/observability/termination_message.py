"""What the commands that run something in a pod share: colors and the termination message."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

from msgspec.structs import replace

from trainer_launch.host import runtime_directory
from trainer_launch.host.files import LiveFiles
from trainer_launch.host.slow_files import within
from trainer_launch.model import Outcome, Verdict
from trainer_launch.model.errors import LaunchError
from trainer_launch.model.settings import Settings
from trainer_launch.observability import goodput
from trainer_launch.observability.observer import Observer
from trainer_launch.planning.task import Task
from trainer_launch.supervisor import inherited, outcome

_log = logging.getLogger(__name__)


def use_color() -> bool:
    """Whether prefixes are colored: on a terminal, unless NO_COLOR is set (no-color.org)."""
    if runtime_directory.IN_COLOR in os.environ:
        return True
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def conclude(ended: Outcome, task: Task, settings: Settings, observer: Observer) -> Outcome:
    """Report how the run ended to the log, the termination message and the observer."""
    ended = outcome.placed(ended, task.topology.node_rank, task.host.hostname)
    sentence = ""
    if observer.goodput is not None:
        spent = observer.goodput.totals(has_succeeded=ended.verdict is Verdict.SUCCEEDED)
        ended = replace(ended, spent_s={kind.value: one_s for kind, one_s in spent.items()})
        sentence = f"Goodput: {goodput.sentence(spent)}"
        _log.info("goodput: %s", goodput.sentence(spent))
    _log.info("%s", outcome.summary(ended))
    if ended.failure and ended.failure.hint:
        _log.info("what to do: %s", ended.failure.hint)
    if not _is_told_below(observer, settings.termination_log):
        write_termination_message(outcome.termination_message(ended, sentence), settings.termination_log)
    inherited.leave()
    observer.finished(ended)
    return ended


def _is_told_below(observer: Observer, path: str) -> bool:
    """Whether a launcher that a shim started below this one has told its end: it knows the ranks."""
    begin = b"reason="
    if observer.view.engine != "plain" or LiveFiles(len(begin)).read(path) != begin:
        return False
    with contextlib.suppress(OSError):
        return within(path, 0.0, lambda: os.stat(path).st_mtime) >= observer.view.started_s
    return False


def refuse(problem: LaunchError, path: str) -> None:
    """Write the reason why nothing was started to the termination message."""
    write_termination_message(outcome.refusal(str(problem), problem.exit_code, os.uname().nodename), path)


def write_termination_message(text: str, path: str) -> None:
    """Write the pod's termination message; the default file exists only in Kubernetes."""
    default = Settings.model_fields["termination_log"].default
    if path == default and not within(path, False, Path(path).exists):
        return  # not in a Kubernetes container
    if not within(path, False, _write, text, path, path != default):
        _log.warning("cannot write the termination message: the file server of %s does not answer", path)


def _write(text: str, path: str, create: bool) -> bool:
    outcome.write_termination_message(text, path, create=create)
    return True
