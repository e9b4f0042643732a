"""The command line: parse, dispatch, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainer_launch.errors import LaunchError
from trainer_launch.exits import MISCONFIGURED
from trainer_launch.supervisor import early

PROGRAM = "trainer-launch"


def main() -> None:
    """The program's entry; ends the process with the pod's exit code."""
    early.end_on_stop()  # PID 1 gets no signal that it has no handler for: before all else
    sys.exit(run_command(sys.argv[1:]))


def run_command(argv: Sequence[str]) -> int:
    """Run one command line; errors become one line on stderr."""
    from trainer_launch.commands import options  # settings are loaded once the handlers stand

    try:
        parsed = options.parse(PROGRAM, argv)
        return parsed.command(parsed)
    except LaunchError as problem:
        print(f"{PROGRAM}: error: {problem}", file=sys.stderr)  # noqa: T201  the one line for people
        return problem.exit_code
    except BrokenPipeError:
        return MISCONFIGURED  # whoever read our output has gone
