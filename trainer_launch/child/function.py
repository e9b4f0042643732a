"""A function as the workers of a torch job, the agent in the user's own process: nothing of it stays there."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainer_launch import run_folder
from trainer_launch.child import logs, membership, places
from trainer_launch.child.asked import Asked
from trainer_launch.child.call import ByValue, Call, RecoverableError
from trainer_launch.child.deaths import Deaths
from trainer_launch.child.rendezvous import GaveUpError, NotNeededError
from trainer_launch.child.stop import park
from trainer_launch.coordinator.hosting import serve
from trainer_launch.elastic import WorkerFailedError
from trainer_launch.errors import NodeError, UsageError
from trainer_launch.grammar import parse_conf
from trainer_launch.host.secret import read_secret
from trainer_launch.model import Hosting, NodeRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Launching:
    """Everything about a launch but the function."""

    options: Mapping[str, str]  # how the nodes meet, by torchrun's names
    nodes: NodeRange
    workers: int  # on this node
    start_method: str
    monitor_interval_s: float
    grace_s: float
    env: Mapping[str, str]  # what the workers' environment has beyond ours
    hosting: Hosting | None  # the coordinator, on the node that hosts it
    secret_file: str | None
    deadline_s: float | None
    collective_timeout_s: int | None  # NCCL's


def run(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], how: Launching) -> dict[int, Any]:
    """Run the function in all workers of this node to its end; their results by rank."""
    problem = _obstacle(fn, (args, kwargs), how.start_method)
    if problem is not None:
        fn, args, kwargs = _by_value(fn, args, kwargs, problem), (), {}
    asked = Asked()
    try:
        with (
            _environment(how),
            asked,
            _hosted(how),
            tempfile.TemporaryDirectory(prefix=run_folder.START) as folder,
        ):
            first = asked.forget if how.start_method == "fork" else None
            call = Call(fn, args, kwargs, first, how.collective_timeout_s)
            found = _results(call, _config(how, folder), asked)
    except SignalException as stopped:
        asked.leave(int(stopped.sigval))
    except NotNeededError:
        return {}
    except GaveUpError as ended:
        _fail(ended)
    except ChildFailedError as failed:
        rank, first = failed.get_first_failure()
        _raise(WorkerFailedError(failed.format_msg(), rank, first.exitcode, None), str(first.message))
    return {rank: _load(rank, data) for rank, data in sorted(found.items())}


def _results(call: Call, config: LaunchConfig, asked: Asked) -> dict[int, bytes]:
    with (
        contextlib.closing(Deaths(asked.deaths)) as deaths,
        membership.member(config, asked, deaths.watch) as node,
    ):
        errors = config.logs_specs.root_log_dir
        calls = (lambda _: places.forget_attempts(errors), node.prepare)
        config.logs_specs = logs.BeforeEachStart(calls, config.logs_specs)
        while True:
            try:
                found: dict[int, bytes] = elastic_launch(config, call)()
            except DistError:
                if node.is_over():
                    continue  # a node was lost while the agents exchanged their ranks
                raise
            if node.finish():
                return found
            # Another node's workers failed after ours had ended: then all go on from the checkpoint.


def _config(how: Launching, folder: str) -> LaunchConfig:
    config = LaunchConfig(
        min_nodes=how.nodes.min,
        max_nodes=how.nodes.max,
        nproc_per_node=how.workers,
        run_id=how.options["rdzv_id"],
        rdzv_backend=how.options["rdzv_backend"],
        rdzv_endpoint=how.options["rdzv_endpoint"],
        rdzv_configs=dict(parse_conf(how.options["rdzv_conf"]) or {}),
        max_restarts=int(how.options["max_restarts"]),
        monitor_interval=how.monitor_interval_s,
        start_method=how.start_method,
        logs_specs=DefaultLogsSpecs(log_dir=run_folder.errors_in(folder)),
        local_addr="127.0.0.1" if how.nodes.max == 1 else None,
    )
    park(config)
    if hasattr(config, "shutdown_timeout"):
        config.shutdown_timeout = int(how.grace_s)
    return config


@contextlib.contextmanager
def _hosted(how: Launching) -> Iterator[None]:
    """Host the coordinator, where this is the node to do so; the job's deadline is its business."""
    if how.hosting is None:
        yield
        return
    secret = None if how.secret_file is None else read_secret(how.secret_file)
    with serve(how.hosting, secret) as server:
        if how.deadline_s is None or server is None:
            yield
            return
        reason = f"the job took longer than active_deadline_seconds, {how.deadline_s:g} s"
        timer = threading.Timer(how.deadline_s, server.stop, [reason])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


@contextlib.contextmanager
def _environment(how: Launching) -> Iterator[None]:
    """What workers inherit from this process, and what torch leaves in it; afterwards all is as it was."""
    before = {name: os.environ.get(name) for name in (*how.env, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
    os.environ.update(how.env)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _obstacle(fn: Callable[..., Any], arguments: object, start_method: str) -> str | None:
    """Why a new interpreter could not load the function: it would die without a reason.

    Raises:
        UsageError: a worker that imported the script has called `launch`.
    """
    if start_method == "fork":
        return None
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", type(fn).__name__)
    if module == "__mp_main__" and multiprocessing.parent_process() is not None:
        raise UsageError(
            "launch was called while a worker imported this script; put it under if __name__ == '__main__':"
        )
    main = sys.modules["__main__"]
    if module == "__main__" and not hasattr(main, "__file__") and getattr(main, "__spec__", None) is None:
        return f"{name} is defined in an interactive session: a worker started by {start_method} cannot import it"
    problem = _unpicklable(fn) or _unpicklable(arguments)
    if problem is None:
        return None
    return f"{name} and its arguments cannot be pickled for a worker started by {start_method} ({problem})"


def _by_value(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], problem: str
) -> Callable[[], Any]:
    """The function with its arguments as cloudpickle sends it, where that is installed.

    Raises:
        UsageError: it is not, or cannot send them either.
    """
    advice = "define the function at the top of a module, set start_method='fork', or install cloudpickle"
    try:
        import cloudpickle
    except ImportError:
        raise UsageError(f"{problem}; {advice}") from None
    try:
        return ByValue(getattr(fn, "__qualname__", type(fn).__name__), cloudpickle.dumps((fn, args, kwargs)))
    except Exception as unsent:  # noqa: BLE001  whatever the user's classes raise
        advice = "define the function at the top of a module, or set start_method='fork'"
        raise UsageError(f"{problem}, nor by cloudpickle ({unsent}); {advice}") from None


def _unpicklable(value: object) -> Exception | None:
    try:
        pickle.dumps(value)
    except RuntimeError:
        return None  # multiprocessing's own queues and locks travel with a starting worker, and only so
    except Exception as problem:  # noqa: BLE001  whatever the user's classes raise
        return problem
    return None


def _load(rank: int, data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception as problem:  # noqa: BLE001  whatever the user's classes raise
        text = f"the result of rank {rank} cannot be unpickled in this process ({problem}); return plain values"
        raise WorkerFailedError(text, rank, None, None) from None


def _fail(ended: GaveUpError) -> NoReturn:
    """Say whose worker failed first, and how."""
    job, own = ended.given_up, ended.own
    if own is None and job.rank is None:
        raise NodeError(str(ended)) from None
    message = (own.message if own is not None else job.message) or ""
    said = message.removeprefix(RecoverableError.MARK)
    text = f"{ended}: {said}" if said else str(ended)
    if own is not None and own.lines:
        text = "\n".join((text, "", *own.lines))
    _raise(WorkerFailedError(text, job.rank, job.exit_code, job.signal), message)


def _raise(failed: WorkerFailedError, message: str) -> NoReturn:
    """Raise it; where the worker's message says so, as the exception that makes Flyte retry the task."""
    if message.startswith(RecoverableError.MARK):
        with contextlib.suppress(ImportError):
            from flytekit.exceptions.user import FlyteRecoverableException  # type: ignore[import-not-found]

            raise FlyteRecoverableException(str(failed)) from failed
    raise failed from None
