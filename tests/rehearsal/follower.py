"""`local` with somebody who writes the history down: argv[1] is where, the rest its own words."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from msgspec import to_builtins

from trainer_launch import cli
from trainer_launch.rehearsal.report.history import History
from trainer_launch.rehearsal.report.reporting import Reporting


class Follower(Reporting):
    @property
    def needs_steps(self) -> bool:
        return True

    def conclude(self, history: History, code: int) -> int:
        Path(place).write_text(json.dumps(to_builtins(history)))
        return code


def told(path: Path) -> list[tuple[str, str | None, int | None]]:
    """What was written down: what, pod, and attempt, step or code."""
    rows = json.loads(path.read_text())["entries"]
    return [
        (
            row["what"],
            row["pod"],
            next((row[key] for key in ("attempt", "step", "code") if row[key] is not None), None),
        )
        for row in rows
    ]


if __name__ == "__main__":
    place = sys.argv.pop(1)
    Reporting.of = classmethod(lambda cls, flags, color: Follower((), 100, has_table=False))  # type: ignore[method-assign,assignment]
    cli.main()
