"""What a worker of `trainer_launch.launch` runs."""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any


class RecoverableError(Exception):
    """A worker raised Flyte's FlyteRecoverableException; its name tells the agent of every node."""

    MARK = "RecoverableError: "  # how torch writes it


class ByValue:
    """A function and its arguments, pickled by cloudpickle: what an import in the worker would not find."""

    def __init__(self, name: str, data: bytes) -> None:
        self.__name__ = self.__qualname__ = name
        self._data = data

    def __call__(self) -> Any:
        """Unpickle and run it."""
        fn, args, kwargs = pickle.loads(self._data)
        return fn(*args, **kwargs)


class ResultError(Exception):
    """A worker's result cannot be sent back."""


class Call:
    """A function with its arguments; what it returns comes back as bytes, so that torch has nothing to pickle.

    torch would wait for ever for some results that cannot be read again, and shares tensors with dead processes.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        first: Callable[[], None] | None,
        collective_timeout_s: int | None,
    ) -> None:
        self._fn, self._args, self._kwargs = fn, args, kwargs
        self._first = first  # what a forked worker has to undo
        self._collective_timeout_s = collective_timeout_s
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)  # torch names its workers by these
        self.__qualname__ = getattr(fn, "__qualname__", self.__name__)

    def __call__(self) -> bytes:
        """Run it."""
        if self._first is not None:
            self._first()
        if self._collective_timeout_s is not None:
            _set_collective_timeout(self._collective_timeout_s)
        try:
            result = self._fn(*self._args, **self._kwargs)
        except Exception as problem:
            if _is_recoverable(problem):
                raise RecoverableError(f"{type(problem).__name__}: {problem}") from problem
            raise
        try:
            return pickle.dumps(result)
        except Exception as problem:  # noqa: BLE001  whatever the user's classes raise
            kind = type(result).__name__
            raise ResultError(
                f"rank {os.environ.get('RANK')} returned a {kind} that cannot be pickled ({problem}); "
                f"return plain values, or save it to a file"
            ) from None


def _set_collective_timeout(seconds: int) -> None:
    """The default of init_process_group with NCCL; torch has a name for it in both modules."""
    for name in ("constants", "distributed_c10d"):
        module = importlib.import_module(f"torch.distributed.{name}")
        setattr(module, "default_pg_nccl_timeout", timedelta(seconds=seconds))  # noqa: B010


def _is_recoverable(problem: BaseException) -> bool:
    """Flyte is not imported for this: who raises its exception has imported it."""
    return any(kind.__name__ == "FlyteRecoverableException" for kind in type(problem).__mro__)
