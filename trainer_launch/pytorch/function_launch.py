"""`trainer_launch.launch` in the user's process: hand the function to a launcher of its own, wait, return or raise.

The launcher is a child, which starts and reaps the workers: this process keeps its threads, children and handlers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from trainer_launch.host import atomic_file, runtime_directory
from trainer_launch.model import Failure, GivenUp, Verdict, errors, exit_codes
from trainer_launch.model.errors import LaunchError, NodeError, UsageError
from trainer_launch.model.signal_policy import STOP_SIGNALS
from trainer_launch.pytorch import call
from trainer_launch.pytorch.elastic import Elastic, WorkerFailedError

ORDER, REPORT = "order.json", "report.json"  # to the launcher, and back
_LAUNCHER = "launcher.py"


def run(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], elastic: Elastic
) -> dict[int, Any]:
    """Run the function in all workers of this node to its end; their results by rank."""
    if call.is_importing():
        raise UsageError(
            "launch was called while a worker imported this script; put it under if __name__ == '__main__':"
        )
    with tempfile.TemporaryDirectory(prefix=runtime_directory.START, ignore_cleanup_errors=True) as folder:
        stops = _Stops(_start(fn, args, kwargs, elastic, folder))
        stops.wait()
        if stops.asked is not None:
            _leave(stops.asked)
        _judge(_report(folder))
        return {rank: call.load(rank, data) for rank, data in call.results(folder).items()}


def order(elastic: Elastic, program: str) -> dict[str, Any]:
    """What the launcher is told."""
    return {
        "program": program,
        "parent": os.getpid(),
        "options": elastic.options(),
        "patience_s": elastic.patience_s,
        "start_method": elastic.start_method,
        "increase_shared_mem": elastic.increase_shared_mem,
        "deadline_s": elastic.deadline_s,
    }


# -- the launcher -----------------------------------------------------------------------------


def _start(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], elastic: Elastic, folder: str
) -> int:
    """Start the launcher, out of reach of a terminal's Ctrl-C, which this process forwards; its pid."""
    name, timeout_s = getattr(fn, "__qualname__", type(fn).__name__), elastic.nccl_collective_timeout_sec
    is_forked = elastic.start_method == "fork"
    # The workers of a fork need no program; the plan does.
    pickled = b"" if is_forked else call.pickled(fn, args, kwargs, elastic.start_method)
    program = call.write(folder, name, pickled, timeout_s)
    runtime_directory.replace(f"{folder}/{ORDER}", order(elastic, program))
    launcher = f"{folder}/{_LAUNCHER}"
    atomic_file.replace(launcher, call.program_text("trainer_launch.commands.function_launcher", folder).encode())
    argv, env = (sys.executable, launcher), {**elastic.variables(), **os.environ}
    if is_forked:
        from trainer_launch.pytorch import caller_fork

        return caller_fork.start_launcher(
            argv, env, lambda: call.run(lambda: fn(*args, **kwargs), folder, timeout_s)
        )
    null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    defaults = (signal.SIGPIPE, signal.SIGXFSZ)  # which Python ignores
    return os.posix_spawn(argv[0], argv, env, file_actions=(null,), setpgroup=0, setsigmask=(), setsigdef=defaults)


class _Stops:
    """Forwards requests to stop while the launcher runs; only a main thread can have handlers."""

    def __init__(self, pid: int) -> None:
        self.asked: int | None = None  # the first signal
        self._pid = pid
        self._before: dict[int, Any] = {}

    def wait(self) -> None:
        """Wait for the launcher; an exception of somebody else's handler stops it first."""
        is_over = False
        try:
            self._take()
            self._until_over()
            is_over = True
        finally:
            if not is_over:
                os.kill(self._pid, signal.SIGTERM)
                self._until_over()
            for number, handler in self._before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored here: the kernel has reaped it
                os.waitpid(self._pid, 0)

    def _take(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.getsignal(number)
                signal.signal(number, self._on_stop)

    def _until_over(self) -> None:
        """Leave it unreaped: as long as a handler may run, its pid must not be another's."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        self.asked = self.asked or number
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)


def _leave(number: int) -> NoReturn:
    """Let the user's own handler have the signal now; without one, end as a process that was asked to."""
    if callable(signal.getsignal(number)) and threading.current_thread() is threading.main_thread():
        signal.raise_signal(number)
    raise SystemExit(exit_codes.of_signal(number))


# -- what it has to say -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How the launcher ended: it refused to begin, or the workers ended in one way or another."""

    refused: str | None = None  # the name of the error
    message: str = ""
    verdict: Verdict | None = None
    failure: Failure | None = None
    given_up: GivenUp | None = None

    @classmethod
    def parse(cls, text: str) -> Report:
        """Read what `function_launcher` has written."""
        values = json.loads(text)
        verdict, failure, job = (values.pop(name, None) for name in ("verdict", "failure", "given_up"))
        return cls(
            verdict=verdict and Verdict(verdict),
            failure=failure and Failure(**failure),
            given_up=job and GivenUp(**job),
            **values,
        )


def _report(folder: str) -> Report:
    try:
        with open(f"{folder}/{REPORT}", encoding="utf-8") as file:
            return Report.parse(file.read())
    except FileNotFoundError:
        raise NodeError("the launcher of launch() was killed, and its workers with it") from None


def _judge(report: Report) -> None:
    """Raise what the report says, unless all went well."""
    if report.refused is not None:
        raise _error(report.refused, report.message)
    if report.verdict is Verdict.STOPPED:
        raise NodeError("the launcher of launch() was asked to stop, but not through this process")
    if report.given_up is not None and report.given_up.rank is not None:
        _raise(report.given_up, report.failure)
    if report.verdict is Verdict.FAILED:
        failure, job = report.failure, report.given_up
        is_misused = failure is not None and failure.exit_code == exit_codes.MISCONFIGURED
        text = job.reason if job is not None else failure.message if failure is not None else "unknown"
        raise UsageError(text) if is_misused else NodeError(text)


def _error(name: str, message: str) -> LaunchError:
    kind = getattr(errors, name, UsageError)
    return UsageError(message) if kind is errors.NotRunnableError else kind(message)


def _raise(job: GivenUp, failure: Failure | None) -> NoReturn:
    """Say whose worker failed first, and how; as the exception that Flyte retries, where it is one."""
    said = job.message.removeprefix(call.RECOVERABLE)
    text = f"{job.reason}: {said}" if said else job.reason
    if failure is not None and failure.rank == job.rank and failure.last_lines:
        text = "\n".join((text, "", *failure.last_lines))
    failed = WorkerFailedError(text, job.rank, job.exit_code, job.signal)
    if job.message.startswith(call.RECOVERABLE):
        with contextlib.suppress(ImportError):
            from flytekit.exceptions.user import FlyteRecoverableException  # type: ignore[import-not-found]

            raise FlyteRecoverableException(text) from failed
    raise failed
