"""`trainer_launch.launch`: hand a function to a launcher of its own, wait, return its results or raise its error.

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
from typing import Annotated, Any, Literal, NoReturn, TypeAlias

from msgspec import Meta, Struct, ValidationError, convert, field
from msgspec.structs import replace

from trainer_launch.host import files, runtime_directory
from trainer_launch.host.deadline_subprocess import begin_thread
from trainer_launch.host.slow_files import join
from trainer_launch.model import Failure, GivenUp, Verdict, codec, errors, exit_codes
from trainer_launch.model.errors import LaunchError, NodeError, UsageError
from trainer_launch.model.signal_policy import STOP_SIGNALS
from trainer_launch.pytorch import error_file

_LAUNCHER, _WORKER = f"{runtime_directory.FUNCTION}launcher.py", f"{runtime_directory.FUNCTION}worker.py"
_CALL, _RESULT = f"{runtime_directory.FUNCTION}call", f"{runtime_directory.FUNCTION}result."
_RESULT_S = 3600.0  # for a large one to be read from a file server
REPORT = f"{runtime_directory.FUNCTION}report.json"  # from the launcher
RECOVERABLE = "RecoverableError: "  # begins the message of an error that Flyte retries
_importing: list[bool] = []  # not empty while a worker imports the user's script
PATIENCE_S = 900.0  # that nodes wait for each other, as in Flyte, where nothing else is set
_WAITS = ("patience", "join_timeout", "timeout")  # the first that is there
_OURS = ("node_rank", *_WAITS)  # other keys are for torch's own backends
_Seconds: TypeAlias = Annotated[int, Meta(ge=0)]


class WorkerFailedError(RuntimeError):
    """A worker failed and no restart was left; the text ends with the traceback of the first that did."""

    def __init__(self, text: str, rank: int | None, exit_code: int | None, signal: int | None) -> None:
        super().__init__(text)
        self.rank = rank  # None: nobody saw which
        self.exit_code = exit_code
        self.signal = signal


class RunPolicy(Struct, frozen=True):
    """Kubeflow's run policy: inside the pod only `active_deadline_seconds` is kept, else is the controller's."""

    clean_pod_policy: Any = None
    ttl_seconds_after_finished: int | None = None
    active_deadline_seconds: float | None = None
    backoff_limit: int | None = None


class Elastic(Struct, frozen=True):
    """How many workers start, where and how. None takes the pod's own value; without a platform 1, 1 and 0.

    The fields have the names of Flyte 1's and Flyte 2's Elastic.
    """

    nnodes: int | str | None = None  # a number, or MIN:MAX
    nproc_per_node: int | str | None = None  # a number, or auto, gpu, cpu
    start_method: Literal["spawn", "fork", "forkserver"] = "spawn"
    monitor_interval: float = 5  # accepted; the end of a worker is seen at once
    max_restarts: int | None = None  # worker failures of the whole job
    rdzv_configs: Mapping[str, Any] = field(default_factory=dict)  # patience or join_timeout, node_rank
    increase_shared_mem: bool = True
    run_policy: RunPolicy | Any = None  # ours, Flyte's, or anything with its fields
    rdzv_backend: str = "c10d"  # the nodes meet at the launcher's coordinator in its place
    nccl_heartbeat_timeout_sec: _Seconds | None = None  # None leaves torch's default, here and below
    nccl_async_error_handling: bool = False
    nccl_collective_timeout_sec: _Seconds | None = None
    nccl_enable_monitoring: bool = False

    @classmethod
    def of(cls, given: object) -> Elastic:
        """An Elastic with the values of any object that has its fields, such as Flyte's, and nothing for others.

        The launcher checks what is an option of its own.

        Raises:
            UsageError: it does not have them, or a value does not fit.
        """
        if isinstance(given, type) or not (hasattr(given, "nnodes") and hasattr(given, "nproc_per_node")):
            raise UsageError(
                f"launch got {repr(given)[:60]} as its second argument; "
                f"expected trainer_launch.Elastic, or an object with the same fields"
            )
        values = {name: getattr(given, name) for name in cls.__struct_fields__ if hasattr(given, name)}
        try:
            elastic = convert(values, cls)
        except ValidationError as problem:
            raise UsageError(f"invalid value in Elastic: {problem}") from None
        numbers = {name: elastic.rdzv_configs.get(name, 0) for name in _OURS}
        numbers["active_deadline_seconds"] = elastic.deadline_s or 0
        for name, value in numbers.items():
            if not isinstance(value, int | float) or value < 0:
                raise UsageError(f"{name} of Elastic is {str(value)[:60]!r}; expected a number from 0")
        configs = {name: value for name, value in elastic.rdzv_configs.items() if name in _OURS}
        policy = elastic.run_policy and RunPolicy(active_deadline_seconds=elastic.deadline_s)
        return replace(elastic, rdzv_configs=configs, run_policy=policy)

    @property
    def deadline_s(self) -> float | None:
        """How long the job may take."""
        return getattr(self.run_policy, "active_deadline_seconds", None)

    @property
    def patience_s(self) -> float | None:
        """How long the nodes wait for each other: torch's `timeout` is that where nothing else is said."""
        waits = [self.rdzv_configs[name] for name in _WAITS if name in self.rdzv_configs]
        return float(waits[0]) if waits else None

    def variables(self) -> dict[str, str]:
        """Return the variables that the workers' NCCL reads."""
        values = {
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": self.nccl_heartbeat_timeout_sec,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1 if self.nccl_async_error_handling else None,
            "TORCH_NCCL_ENABLE_MONITORING": 1 if self.nccl_enable_monitoring else None,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    def options(self) -> dict[str, str]:
        """Return torchrun's options of the job, by name."""
        values = {
            "nnodes": self.nnodes,
            "nproc_per_node": self.nproc_per_node,
            "max_restarts": self.max_restarts,
            "node_rank": self.rdzv_configs.get("node_rank"),
        }
        return {name: str(value) for name, value in values.items() if value is not None}


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
        asked = _stopped_by(_start(fn, args, kwargs, elastic, folder))
        if asked is not None:
            _leave(asked)
        raise_failure(folder)
        return {rank: _load(rank, data) for rank, data in results(folder).items()}


def _start(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], elastic: Elastic, folder: str
) -> int:
    """Start the launcher, out of reach of a terminal's Ctrl-C, which this process forwards; its pid."""
    name, timeout_s = getattr(fn, "__qualname__", type(fn).__name__), elastic.nccl_collective_timeout_sec
    data = {"main": _preparation(name), "call": _pickled(fn, args, kwargs), "timeout_s": timeout_s}
    files.replace(f"{folder}/{_CALL}", pickle.dumps(data))
    program, launcher = f"{folder}/{_WORKER}", f"{folder}/{_LAUNCHER}"
    _write_program(program, "trainer_launch.pytorch.function_launch", folder)
    words = folder, program, os.getpid(), pickle.dumps(elastic)
    _write_program(launcher, "trainer_launch.commands.function_launcher", *words)
    argv, env = (sys.executable, launcher), {**elastic.variables(), **os.environ}
    null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    defaults = (signal.SIGPIPE, signal.SIGXFSZ)  # which Python ignores
    return os.posix_spawn(argv[0], argv, env, file_actions=(null,), setpgroup=0, setsigmask=(), setsigdef=defaults)


def _stopped_by(pid: int) -> int | None:
    """Wait for the launcher, and forward requests to stop; the first of these, as only a main thread can have any.

    An exception of somebody else's handler stops the launcher first.
    """
    asked: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def await_end() -> None:
        """Leave it unreaped: as long as a handler may run, its pid must not be another's."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def wait() -> None:
        """In a thread, so that this one runs handlers meanwhile."""
        thread = begin_thread("launcher", await_end)
        if thread is None:
            await_end()
        else:
            join(thread)

    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS if is_main}
    before = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, forward)
        wait()
    except BaseException:
        os.kill(pid, signal.SIGTERM)
        wait()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored here: the kernel has reaped it
            os.waitpid(pid, 0)
    return next(iter(asked), None)


def _leave(number: int) -> NoReturn:
    """Let the user's own handler have the signal now; without one, end as a process that was asked to."""
    if callable(signal.getsignal(number)) and threading.current_thread() is threading.main_thread():
        signal.raise_signal(number)
    raise SystemExit(exit_codes.of_signal(number))


class LauncherReport(Struct, frozen=True, kw_only=True):
    """How the launcher ended: it refused to begin, or the workers ended in one way or another."""

    refused: str | None = None  # the name of the error
    message: str = ""
    verdict: Verdict | None = None
    failure: Failure | None = None
    given_up: GivenUp | None = None


def raise_failure(folder: str) -> None:
    """Raise the error that the launcher reports, if it does."""
    data = files.read(f"{folder}/{REPORT}", codec.MAX_FILE_BYTES)
    if data is None:
        raise NodeError("the launcher of launch() was killed, and its workers with it")
    report = codec.decode(LauncherReport, data)
    if report.refused is not None:
        kind: type[LaunchError] = getattr(errors, report.refused, UsageError)
        raise (UsageError if kind is errors.NotRunnableError else kind)(report.message)
    if report.verdict is Verdict.STOPPED:
        raise NodeError("the launcher of launch() was asked to stop, but not through this process")
    if report.given_up is not None and report.given_up.rank is not None:
        _raise(report.given_up, report.failure)
    if report.verdict is Verdict.FAILED:
        failure, job = report.failure, report.given_up
        is_misused = failure is not None and failure.exit_code == exit_codes.MISCONFIGURED
        text = job.reason if job is not None else failure.message if failure is not None else "unknown"
        raise UsageError(text) if is_misused else NodeError(text)


def _raise(job: GivenUp, failure: Failure | None) -> NoReturn:
    """Raise the failure of the first worker, as the exception that Flyte retries where the worker raised that."""
    message = job.message.removeprefix(RECOVERABLE)
    text = f"{job.reason}: {message}" if message else job.reason
    if failure is not None and failure.rank in (None, job.rank) and failure.last_lines:
        text = "\n".join((text, "", *failure.last_lines))
    failed = WorkerFailedError(text, job.rank, job.exit_code, job.signal)
    if job.message.startswith(RECOVERABLE):
        with contextlib.suppress(ImportError):
            from flytekit.exceptions.user import FlyteRecoverableException  # type: ignore[import-not-found]

            raise FlyteRecoverableException(text) from failed
    raise failed


class ResultError(Exception):
    """A worker's result cannot be sent back."""


class RecoverableError(Exception):
    """A worker raised Flyte's FlyteRecoverableException; its name tells the launcher of every node."""


def _write_program(path: str, module: str, *arguments: str | int | bytes) -> None:
    """Write a program that calls `main` of a module of ours, which it looks for where this process does."""
    paths = [entry for entry in sys.path if isinstance(entry, str)]
    text = f"import sys\nsys.path += [path for path in {paths!a} if path not in sys.path]\n"
    files.replace(path, f"{text}from {module} import main\nmain{arguments!a}\n".encode())


def _preparation(name: str) -> dict[str, Any]:
    """Return multiprocessing's data for a new interpreter like this one: main module, arguments, paths."""
    was_chosen = multiprocessing.get_start_method(allow_none=True)
    data = spawn.get_preparation_data(name)
    if was_chosen is None:  # asking for it has chosen it
        multiprocessing.set_start_method(None, force=True)
        data.pop("start_method", None)
    return {**data, "authkey": bytes(data["authkey"])}


def results(folder: str) -> dict[int, bytes]:
    """The pickled results of this node's workers, by rank."""
    pickled = {}
    for path in Path(folder).glob(f"{_RESULT}*"):
        written = files.read(str(path), path.lstat().st_size, wait_s=_RESULT_S)
        rank, _, data = (written or b"").partition(b"\n")
        if rank.isdigit():
            pickled[int(rank)] = data
    return dict(sorted(pickled.items()))


def _load(rank: int, data: bytes) -> Any:
    """Return the result of a worker.

    Raises:
        WorkerFailedError: it cannot be unpickled in this process.
    """
    try:
        return pickle.loads(data)
    except Exception as problem:  # noqa: BLE001  whatever the user's classes raise
        text = f"the result of rank {rank} cannot be unpickled in this process ({problem}); return plain values"
        raise WorkerFailedError(text, rank, None, None) from None


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """The call as a new interpreter can read it: by reference, else by value, where cloudpickle is installed.

    Raises:
        UsageError: neither will do.
    """
    name = getattr(fn, "__qualname__", type(fn).__name__)
    main = sys.modules["__main__"]
    in_main = getattr(fn, "__module__", None) == "__main__"
    if in_main and not hasattr(main, "__file__") and getattr(main, "__spec__", None) is None:
        why = f"{name} is defined in an interactive session: a worker cannot import it"
    else:
        try:
            return pickle.dumps((fn, args, kwargs))
        except Exception as problem:  # noqa: BLE001  whatever the user's classes raise
            why = f"{name} and its arguments cannot be pickled for a worker ({problem})"
    advice = "define the function at the top of a module, and pass plain values"
    try:
        import cloudpickle
    except ImportError:
        raise UsageError(f"{why}; {advice}, or install cloudpickle") from None
    try:
        return cloudpickle.dumps((fn, args, kwargs))  # type: ignore[no-any-return]
    except Exception as unsent:  # noqa: BLE001  whatever the user's classes raise
        raise UsageError(f"{why}, nor by cloudpickle ({unsent}); {advice}") from None


def main(folder: str) -> None:
    """In a worker: call the function, and leave its result or its error for the caller of `launch`."""
    data = pickle.loads(Path(folder, _CALL).read_bytes())
    if data["timeout_s"] is not None:
        _set_collective_timeout(data["timeout_s"])
    try:
        _importing.append(True)
        spawn.prepare(data["main"])
        fn, args, kwargs = pickle.loads(data["call"])
        _importing.clear()
        _save(fn(*args, **kwargs), folder)
    except SystemExit as ended:
        if not ended.code:
            _save(None, folder)
        raise
    except Exception as problem:  # the function's own
        # Flyte is not imported for this: who raises its exception has imported it.
        if any(kind.__name__ == "FlyteRecoverableException" for kind in type(problem).__mro__):
            name = f"{type(problem).__name__}: {problem}"
            problem = RecoverableError(name).with_traceback(problem.__traceback__)
        problem.__traceback__ = error_file.without_frames_of(__file__, problem.__traceback__)
        error_file.leave_exception(problem)
        raise problem from None


def _save(result: Any, folder: str) -> None:
    """Save a result by local rank: after a restart the worker in the same place overwrites it."""
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
