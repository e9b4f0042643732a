"""What a worker of `trainer_launch.launch` runs."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any


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
    ) -> None:
        self._fn, self._args, self._kwargs = fn, args, kwargs
        self._first = first  # what a forked worker has to undo
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)  # torch names its workers by these
        self.__qualname__ = getattr(fn, "__qualname__", self.__name__)

    def __call__(self) -> bytes:
        """Run it."""
        if self._first is not None:
            self._first()
        result = self._fn(*self._args, **self._kwargs)
        try:
            return pickle.dumps(result)
        except Exception as problem:  # noqa: BLE001  whatever the user's classes raise
            kind = type(result).__name__
            raise ResultError(
                f"rank {os.environ.get('RANK')} returned a {kind} that cannot be pickled ({problem}); "
                f"return plain values, or save it to a file"
            ) from None
