"""`trainer_launch.launch` in the user's process: hand the function to a launcher of its own, wait, return or raise.

The launcher is a child, which starts and reaps the workers: this process keeps its threads, children and handlers.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import spawn
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from msgspec import Struct

from trainer_launch.host import files, runtime_directory
from trainer_launch.model import Failure, GivenUp, Verdict, codec, errors, exit_codes
from trainer_launch.model.errors import LaunchError, NodeError, UsageError
from trainer_launch.model.signal_policy import STOP_SIGNALS
from trainer_launch.pytorch import error_file
from trainer_launch.pytorch.elastic import Elastic, WorkerFailedError

_LAUNCHER, _WORKER = f"{runtime_directory.FUNCTION}launcher.py", f"{runtime_directory.FUNCTION}worker.py"
_CALL, _RESULT = f"{runtime_directory.FUNCTION}call", f"{runtime_directory.FUNCTION}result."
_RESULT_S = 3600.0  # for a large one to be read from a file server
REPORT = f"{runtime_directory.FUNCTION}report.json"  # from the launcher


def launch(fn: Callable[..., Any], elastic: Elastic | Any = None, /, *args: Any, **kwargs: Any) -> dict[int, Any]:
    """Run `fn(*args, **kwargs)` in every worker of this node; what each returned, by its rank in the job.

    In a job of several nodes every node calls this, and each gets the results of its own ranks. `elastic` is ours,
    Flyte's, or any object with the same fields. Without it, its fields may be given by name: nproc_per_node=2.

    Raises:
        WorkerFailedError: a worker failed and no restart was left.
        FlyteRecoverableException: the same, and the worker raised one, or one of its kind.
        LaunchError: the job could not start or meet; see trainer_launch.model.errors.
        SystemExit: SIGTERM came; the workers had their grace.
    """
    if not callable(fn):
        raise UsageError(f"launch got {repr(fn)[:60]}; expected a function")
    if elastic is None:
        fields = {name: kwargs.pop(name) for name in kwargs.keys() & {*Elastic.__struct_fields__}}
        elastic = Elastic(**fields)
    elastic = Elastic.of(elastic)
    if _importing:
        raise UsageError(
            "launch was called while a worker imported this script; put it under if __name__ == '__main__':"
        )
    with tempfile.TemporaryDirectory(prefix=runtime_directory.START, ignore_cleanup_errors=True) as folder:
        stops = _Stops(_start(fn, args, kwargs, elastic, folder))
        stops.wait()
        if stops.asked is not None:
            _leave(stops.asked)
        _judge(reported(folder))
        return {rank: load(rank, data) for rank, data in results(folder).items()}


class FunctionLaunchSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the launcher is told."""

    program: str  # of the workers
    parent: int  # the calling process
    options: Mapping[str, str]  # what was said about the job, by torchrun's option names
    patience_s: float | None
    start_method: str
    increase_shared_mem: bool
    deadline_s: float | None

    @classmethod
    def of(cls, elastic: Elastic, program: str) -> FunctionLaunchSpec:
        """What is said by its caller, which this process is."""
        same = ("patience_s", "start_method", "increase_shared_mem", "deadline_s")
        values = {name: getattr(elastic, name) for name in same}
        return cls(program=program, parent=os.getpid(), options=elastic.options(), **values)


# -- the launcher -----------------------------------------------------------------------------


def _start(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], elastic: Elastic, folder: str
) -> int:
    """Start the launcher, out of reach of a terminal's Ctrl-C, which this process forwards; its pid."""
    name, timeout_s = getattr(fn, "__qualname__", type(fn).__name__), elastic.nccl_collective_timeout_sec
    is_forked = elastic.start_method == "fork"
    # The workers of a fork need no program; the plan does.
    pickled = b"" if is_forked else call_pickled(fn, args, kwargs, elastic.start_method)
    program = write(folder, name, pickled, timeout_s)
    launcher, spec = f"{folder}/{_LAUNCHER}", codec.encode(FunctionLaunchSpec.of(elastic, program)).decode()
    files.replace(launcher, program_text("trainer_launch.commands.function_launcher", folder, spec).encode())
    argv, env = (sys.executable, launcher), {**elastic.variables(), **os.environ}
    if is_forked:
        from trainer_launch.pytorch import caller_fork

        return caller_fork.start_launcher(argv, env, lambda: run(lambda: fn(*args, **kwargs), folder, timeout_s))
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


class Report(Struct, frozen=True, kw_only=True):
    """How the launcher ended: it refused to begin, or the workers ended in one way or another."""

    refused: str | None = None  # the name of the error
    message: str = ""
    verdict: Verdict | None = None
    failure: Failure | None = None
    given_up: GivenUp | None = None


def reported(folder: str) -> Report:
    """What the launcher has left.

    Raises:
        NodeError: nothing.
    """
    report = files.read(f"{folder}/{REPORT}", codec.MAX_FILE_BYTES)
    if report is None:
        raise NodeError("the launcher of launch() was killed, and its workers with it")
    return codec.decode(Report, report)


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
    said = job.message.removeprefix(RECOVERABLE)
    text = f"{job.reason}: {said}" if said else job.reason
    if failure is not None and failure.rank in (None, job.rank) and failure.last_lines:
        text = "\n".join((text, "", *failure.last_lines))
    failed = WorkerFailedError(text, job.rank, job.exit_code, job.signal)
    if job.message.startswith(RECOVERABLE):
        with contextlib.suppress(ImportError):
            from flytekit.exceptions.user import FlyteRecoverableException  # type: ignore[import-not-found]

            raise FlyteRecoverableException(text) from failed
    raise failed


# -- the function as a worker's program --------------------------------------------------------


RECOVERABLE = "RecoverableError: "  # begins the message of an error that Flyte retries
_importing: list[bool] = []  # not empty while a worker imports the user's script


class ResultError(Exception):
    """A worker's result cannot be sent back."""


class RecoverableError(Exception):
    """A worker raised Flyte's FlyteRecoverableException; its name tells the launcher of every node."""


# -- in the calling process -------------------------------------------------------------------


def write(folder: str, name: str, call: bytes, timeout_s: int | None) -> str:
    """Write the pickled (function, args, kwargs); the program that calls it in a new interpreter."""
    data = {"main": preparation(name), "call": call, "timeout_s": timeout_s}
    files.replace(f"{folder}/{_CALL}", pickle.dumps(data))
    program = f"{folder}/{_WORKER}"
    files.replace(program, program_text("trainer_launch.pytorch.function_launch", folder).encode())
    return program


def program_text(module: str, *arguments: str) -> str:
    """A program that calls `main` of one of our modules, found where this process has found them."""
    paths = [path for path in sys.path if isinstance(path, str)]
    return (
        f"import sys\nsys.path += [path for path in {paths!a} if path not in sys.path]\n"
        f"from {module} import main\nmain{arguments!a}\n"
    )


def preparation(name: str) -> dict[str, Any]:
    """What makes a new interpreter like this one, as multiprocessing has it: main module, arguments, paths."""
    was_chosen = multiprocessing.get_start_method(allow_none=True)
    data = spawn.get_preparation_data(name)
    if was_chosen is None:  # asking for it has chosen it
        multiprocessing.set_start_method(None, force=True)
        data.pop("start_method", None)
    return {**data, "authkey": bytes(data["authkey"])}


def results(folder: str) -> dict[int, bytes]:
    """The pickled results of this node's workers, by rank."""
    found = {}
    for path in Path(folder).glob(f"{_RESULT}*"):
        written = files.read(str(path), path.lstat().st_size, wait_s=_RESULT_S)
        rank, _, data = (written or b"").partition(b"\n")
        if rank.isdigit():
            found[int(rank)] = data
    return dict(sorted(found.items()))


def load(rank: int, data: bytes) -> Any:
    """What a worker returned.

    Raises:
        WorkerFailedError: it makes no sense here.
    """
    try:
        return pickle.loads(data)
    except Exception as problem:  # noqa: BLE001  whatever the user's classes raise
        text = f"the result of rank {rank} cannot be unpickled in this process ({problem}); return plain values"
        raise WorkerFailedError(text, rank, None, None) from None


def call_pickled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], method: str) -> bytes:
    """The call as a new interpreter can read it: by reference, else by value, where cloudpickle is installed.

    Raises:
        UsageError: neither will do.
    """
    name = getattr(fn, "__qualname__", type(fn).__name__)
    main = sys.modules["__main__"]
    in_main = getattr(fn, "__module__", None) == "__main__"
    if in_main and not hasattr(main, "__file__") and getattr(main, "__spec__", None) is None:
        why = f"{name} is defined in an interactive session: a worker started by {method} cannot import it"
    else:
        try:
            return pickle.dumps((fn, args, kwargs))
        except Exception as problem:  # noqa: BLE001  whatever the user's classes raise
            why = f"{name} and its arguments cannot be pickled for a worker started by {method} ({problem})"
    advice = "define the function at the top of a module, or set start_method='fork'"
    try:
        import cloudpickle
    except ImportError:
        raise UsageError(f"{why}; {advice}, or install cloudpickle") from None
    try:
        return cloudpickle.dumps((fn, args, kwargs))  # type: ignore[no-any-return]
    except Exception as unsent:  # noqa: BLE001  whatever the user's classes raise
        raise UsageError(f"{why}, nor by cloudpickle ({unsent}); {advice}") from None


# -- in a worker ------------------------------------------------------------------------------


def main(folder: str) -> None:
    """Call the function in a new interpreter."""
    data = pickle.loads(Path(folder, _CALL).read_bytes())

    def load_and_call() -> Any:
        _importing.append(True)
        spawn.prepare(data["main"])
        fn, args, kwargs = pickle.loads(data["call"])
        _importing.clear()
        return fn(*args, **kwargs)

    run(load_and_call, folder, data["timeout_s"])


def run(call: Callable[[], Any], folder: str, timeout_s: int | None) -> None:
    """Call a function, and leave what it returns or raises for those who wait for it."""
    if timeout_s is not None:
        _set_collective_timeout(timeout_s)
    try:
        _save(call(), folder)
    except SystemExit as ended:
        if not ended.code:
            _save(None, folder)
        raise
    except Exception as problem:
        # Flyte is not imported for this: who raises its exception has imported it.
        if any(kind.__name__ == "FlyteRecoverableException" for kind in type(problem).__mro__):
            name = f"{type(problem).__name__}: {problem}"
            problem = RecoverableError(name).with_traceback(problem.__traceback__)
        problem.__traceback__ = error_file.without_frames_of(__file__, problem.__traceback__)
        error_file.leave_exception(problem)
        raise problem from None


def _save(result: Any, folder: str) -> None:
    """By local rank: after a restart the worker in the same place replaces it, whatever its rank in the job."""
    rank = os.environ["RANK"]
    try:
        data = pickle.dumps(result)
    except Exception as problem:  # noqa: BLE001  whatever the user's classes raise
        raise ResultError(
            f"rank {rank} returned a {type(result).__name__} that cannot be pickled ({problem}); "
            f"return plain values, or save it to a file"
        ) from None
    files.replace(f"{folder}/{_RESULT}{os.environ['LOCAL_RANK']}", f"{rank}\n".encode() + data)


def _set_collective_timeout(seconds: int) -> None:
    """The default of init_process_group with NCCL; torch has a name for it in both modules."""
    for name in ("constants", "distributed_c10d"):
        module = importlib.import_module(f"torch.distributed.{name}")
        setattr(module, "default_pg_nccl_timeout", timedelta(seconds=seconds))  # noqa: B010
