"""Who follows a rehearsal: a person at a terminal, and those who read its report afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer_launch.commands import live, picturing
from trainer_launch.commands.live import LastLine, Live
from trainer_launch.errors import UsageError
from trainer_launch.rehearsal.board import Board
from trainer_launch.rehearsal.chronicle import Chronicle, Happening
from trainer_launch.rehearsal.promises import MAX_LOST_STEPS


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
        picturing.check(reports)
        return cls(reports, _steps(flags["max_lost_steps"]), has_table=live.is_wanted(color, os.environ))

    @property
    def wants_to_know(self) -> bool:
        """Whether anybody is interested in steps and generations, which cost a little to find out."""
        return bool(self._reports) or self._has_table

    def begin(self, title: str, pods: Iterable[str], faults: Iterable[str], last_line: LastLine) -> None:
        """The rehearsal begins."""
        if self._has_table:
            self._live = Live(Board.of(title, pods, faults), last_line)
            self._live.begin()

    def observe(self, happening: Happening) -> None:
        """Something has happened."""
        if self._live is not None:
            self._live.observe(happening)

    def end(self) -> None:
        """Nothing more happens: the terminal is as it was."""
        if self._live is not None:
            self._live.close()
            self._live = None

    def conclude(self, chronicle: Chronicle, code: int) -> int:
        """Say which promises were broken, write the reports; return the rehearsal's exit code."""
        return picturing.conclude(chronicle, code, self._reports, self._max_lost_steps)


def _steps(text: str | None) -> int:
    if text is None:
        return MAX_LOST_STEPS
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise UsageError(f"--max-lost-steps is {text[:40]!r}; expected a whole number, 0 or more")
    return int(text)
