"""Who follows a rehearsal: a person at a terminal, and those who read its report afterwards."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.controllers.pod_values import Pod
from trainer_launch.rehearsal.report import files, live_table
from trainer_launch.rehearsal.report.history import Chronicle, Happening
from trainer_launch.rehearsal.report.live_rows import Board
from trainer_launch.rehearsal.report.live_table import Live
from trainer_launch.rehearsal.script_checks import MAX_LOST_STEPS


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `local` about what is shown of it."""
    parser.add_argument(
        "--report",
        dest="story",
        action="append",
        metavar="FILE.html|.png",
        help="write a report: an HTML page, or a picture (needs matplotlib); may be repeated",
    )
    parser.add_argument(
        "--max-lost-steps",
        metavar="N",
        help=f"end with 1 if a fault costs more steps than N (default: {MAX_LOST_STEPS})",
    )


class Audience:
    """What they want, and how it gets to them."""

    def __init__(self, reports: Sequence[str], max_lost_steps: int, *, has_table: bool) -> None:
        self._reports, self._max_lost_steps, self._has_table = reports, max_lost_steps, has_table
        self._live: Live | None = None

    @classmethod
    def of(cls, flags: Mapping[str, Any], color: str) -> Audience:
        """As the command line has it.

        Raises:
            UsageError: a report that cannot be written, or no number of steps.
        """
        reports = tuple(flags["story"] or ())
        if reports and flags["render"]:
            raise UsageError("--report and --render exclude each other: --render runs nothing; remove one of them")
        files.check(reports)
        return cls(reports, _steps(flags["max_lost_steps"]), has_table=live_table.is_wanted(color, os.environ))

    @property
    def wants_to_know(self) -> bool:
        """Whether anybody is interested in steps and generations, which cost a little to find out."""
        return bool(self._reports) or self._has_table

    def begin(
        self, title: str, pods: Sequence[Pod], faults: Sequence[str], last_line: Callable[[Pod], str]
    ) -> None:
        """The rehearsal begins; what a pod wrote last is asked for in another thread."""
        if self._has_table:
            known = {pod.name: pod for pod in pods}
            board = Board.of(title, known, faults)
            self._live = Live(board, lambda name: last_line(known[name]) if name in known else "")
            self._live.begin()

    def observe(self, happening: Happening) -> None:
        """Something has happened."""
        if self._live is not None:
            self._live.observe(happening)

    def close(self) -> None:
        """Nothing more happens: the terminal is as it was."""
        if self._live is not None:
            self._live.close()
            self._live = None

    def conclude(self, chronicle: Chronicle, code: int) -> int:
        """Print which checks failed, write the reports; return the rehearsal's exit code."""
        return files.conclude(chronicle, code, self._reports, self._max_lost_steps)


NOBODY = Audience((), MAX_LOST_STEPS, has_table=False)


def _steps(text: str | None) -> int:
    if text is None:
        return MAX_LOST_STEPS
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise UsageError(f"invalid value {text[:40]!r} for --max-lost-steps: expected a whole number, 0 or more")
    return int(text)
