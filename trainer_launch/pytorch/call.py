"""A function as a worker's program: how `trainer_launch.launch` hands it over, and how the results come back.

All of it is in a private directory of the calling process. No torch is imported here: the function decides.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import spawn
from pathlib import Path
from types import TracebackType
from typing import Any

from trainer_launch.host import atomic_file
from trainer_launch.model.errors import UsageError
from trainer_launch.pytorch.elastic import WorkerFailedError

RECOVERABLE = "RecoverableError: "  # begins the message of an error that Flyte retries
_CALL, _PROGRAM, _RESULT = "call", "worker.py", "result."
_importing: list[bool] = []  # not empty while a worker imports the user's script


class ResultError(Exception):
    """A worker's result cannot be sent back."""


class RecoverableError(Exception):
    """A worker raised Flyte's FlyteRecoverableException; its name tells the launcher of every node."""


# -- in the calling process -------------------------------------------------------------------


def write(folder: str, name: str, call: bytes, timeout_s: int | None) -> str:
    """Write the pickled (function, args, kwargs); the program that calls it in a new interpreter."""
    data = {"main": preparation(name), "call": call, "timeout_s": timeout_s}
    atomic_file.replace(f"{folder}/{_CALL}", pickle.dumps(data))
    program = f"{folder}/{_PROGRAM}"
    atomic_file.replace(program, program_text("trainer_launch.pytorch.call", folder).encode())
    return program


def program_text(module: str, folder: str) -> str:
    """A program that calls `main(folder)` of one of our modules, found where this process has found them."""
    paths = [path for path in sys.path if isinstance(path, str)]
    return (
        f"import sys\nsys.path += [path for path in {paths!a} if path not in sys.path]\n"
        f"from {module} import main\nmain({folder!a})\n"
    )


def preparation(name: str) -> dict[str, Any]:
    """What makes a new interpreter like this one, as multiprocessing has it: main module, arguments, paths."""
    was_chosen = multiprocessing.get_start_method(allow_none=True)
    data = spawn.get_preparation_data(name)
    if was_chosen is None:  # asking for it has chosen it
        multiprocessing.set_start_method(None, force=True)
        data.pop("start_method", None)
    return {**data, "authkey": bytes(data["authkey"])}


def is_importing() -> bool:
    """Whether this process is a worker that imports the user's script, and has not called its function yet."""
    return bool(_importing)


def results(folder: str) -> dict[int, bytes]:
    """The pickled results of this node's workers, by rank."""
    found = {}
    for path in Path(folder).glob(f"{_RESULT}*"):
        rank, _, data = path.read_bytes().partition(b"\n")
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


def pickled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], method: str) -> bytes:
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
        if _is_recoverable(problem):
            name = f"{type(problem).__name__}: {problem}"
            problem = RecoverableError(name).with_traceback(problem.__traceback__)
        problem.__traceback__ = _without_ours(problem.__traceback__)
        _write_error(problem)
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
    atomic_file.replace(f"{folder}/{_RESULT}{os.environ['LOCAL_RANK']}", f"{rank}\n".encode() + data)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """From the function's first frame on."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _write_error(problem: BaseException) -> None:
    """The file that torch's @record would write; where the function's own @record has written, nothing is lost."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    lines = "".join(traceback.format_exception(type(problem), problem, problem.__traceback__))
    extra = {"py_callstack": lines, "timestamp": str(int(time.time()))}
    message = {"message": f"{type(problem).__name__}: {problem}", "extraInfo": extra}
    try:
        atomic_file.replace(path, json.dumps({"message": message}).encode())
    except OSError as unwritten:
        print(f"cannot write {path}: {unwritten.strerror}", file=sys.stderr)  # noqa: T201


def _set_collective_timeout(seconds: int) -> None:
    """The default of init_process_group with NCCL; torch has a name for it in both modules."""
    for name in ("constants", "distributed_c10d"):
        module = importlib.import_module(f"torch.distributed.{name}")
        setattr(module, "default_pg_nccl_timeout", timedelta(seconds=seconds))  # noqa: B010


def _is_recoverable(problem: BaseException) -> bool:
    """Flyte is not imported for this: who raises its exception has imported it."""
    return any(kind.__name__ == "FlyteRecoverableException" for kind in type(problem).__mro__)
