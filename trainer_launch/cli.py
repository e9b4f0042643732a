"""The command line: parse, dispatch, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import warnings
from collections.abc import Sequence

from trainer_launch.model.errors import LaunchError
from trainer_launch.model.exit_codes import FAILED
from trainer_launch.supervisor import inherited

PROGRAM = "trainer-launch"


def main() -> None:
    """Run the command line and end the process with the pod's exit code."""
    inherited.end_on_stop()  # PID 1 gets no signal that it has no handler for: before all else
    inherited.open_streams()
    if sys.warnoptions or sys.flags.dev_mode:  # the user's, for the workers, which inherit the variables
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["run"]:
        gc.disable()  # until all is loaded: a tenth of the time of that
    try:
        code = run_command(sys.argv[1:])
    except SystemExit as end:  # of argparse, which has shown its help
        code = int(end.code or 0)
    inherited.keep_exit_code()
    gc.freeze()  # the interpreter would look for garbage among all objects once more
    if sys.flags.inspect:  # Python would print the SystemExit, and end with 1
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def run_command(argv: Sequence[str]) -> int:
    """Run one command line; errors become one line on stderr."""
    from trainer_launch.commands import options  # settings load after the handlers are installed

    try:
        parsed = options.parse(PROGRAM, argv)
        return parsed.command(parsed)
    except LaunchError as problem:
        print(f"{PROGRAM}: error: {problem}", file=sys.stderr)  # noqa: T201  the one line for people
        return problem.exit_code
    except OSError as problem:  # the reader of our output is gone, or its disk is full
        with contextlib.suppress(OSError):
            os.write(2, f"{PROGRAM}: error: {problem}\n".encode(errors="replace"))
        os._exit(FAILED)  # and not by way of Python's own flush, which would fail again
