"""The command line: parse, dispatch, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "trainer-launch"
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
_FEW = 64  # descriptors
_IN_PODS = ("run", "preflight", "sshd")  # an error of theirs is in the termination message


def main() -> None:
    """Run the command line and end the process with the pod's exit code."""
    # Before all imports: the kernel drops what PID 1 has no handler for, but keeps what is blocked until then.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    from trainer_launch.supervisor import inherited

    inherited.end_on_stop()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    inherited.open_streams()
    if sys.warnoptions or sys.flags.dev_mode:  # the user's, for the workers, which inherit the variables
        import warnings

        warnings.resetwarnings()
        warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["run"]:
        import gc

        gc.disable()  # until all is loaded: a tenth of the time of that
    code = run_command(sys.argv[1:])
    # The interpreter's own end would take away the handlers, wait for threads, and read PYTHONINSPECT.
    os._exit(code)


def run_command(argv: Sequence[str]) -> int:
    """Run one command line; errors become one line on stderr, and in a pod the termination message."""
    from trainer_launch.commands import options
    from trainer_launch.model import errors
    from trainer_launch.model.settings import PREFIX, Settings, in_words_of_variables

    place = os.environ.get(f"{PREFIX}TERMINATION_LOG") or Settings.model_fields["termination_log"].default
    parsed = None
    try:
        try:
            parsed = options.parse(PROGRAM, argv)
            place = parsed.settings.termination_log
            if parsed.argv:
                os.getcwd()  # where it will run
            code = options.run(parsed)
        except SystemExit as end:  # of argparse, which has shown its help
            code = int(end.code or 0)
        sys.stdout.flush()
    except (errors.LaunchError, OSError, RuntimeError, MemoryError, ImportError) as cause:
        if isinstance(cause, BrokenPipeError) and not (argv and argv[0] in _IN_PODS):
            return 141  # as who dies of SIGPIPE: the reader, such as `head`, has enough
        problem = errors.explained(cause)
        if problem is None:
            raise
        import contextlib
        import errno

        from trainer_launch.host import logs
        from trainer_launch.model.exit_codes import PREFLIGHT_RETRYABLE
        from trainer_launch.supervisor import inherited, outcome

        if parsed is not None:
            problem.args = (in_words_of_variables(str(problem), parsed.settings, parsed.given),)
        if argv[:1] == ["preflight"] and isinstance(problem, errors.NodeError):
            problem.exit_code = PREFLIGHT_RETRYABLE
        if getattr(cause, "errno", None) == errno.EMFILE:
            os.closerange(3, _FEW)  # or the message could not be written, either
        if argv[:1] and argv[0] in _IN_PODS and not inherited.is_leaving():
            outcome.refuse(problem, place)
            inherited.leave()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            logs.to_stderr(f"{PROGRAM}: error: {problem}\n".encode(errors="backslashreplace"))
        return problem.exit_code
    return code
