"""Running Python code in the main thread with no frame below it: the interpreter calls a chain of C functions.

Whoever prints a stack, or looks for the main script at its bottom, would else find the fork server there. And what
a frame holds is not finalised when the interpreter ends. A new thread would have an empty stack, too, but a process
that Python 3.13 has forked from a thread crashes at its end.

The interpreter prints the value of `SystemExit` when the last frame has gone. It asks for its `str()`, which here
is `deque(map(call, steps))`: each step is called, and then what it has returned.
"""

from __future__ import annotations

import functools
import operator
import os
import traceback
from collections import deque
from collections.abc import Callable
from typing import NoReturn

Step = Callable[[], object]


def run(first: Callable[[], Callable[[], Step]]) -> NoReturn:
    """Leave all frames, then call `first`; then again and again what it has returned, and what that returns.

    `first` or one of the steps has to end the process.
    """
    chain: Callable[[], object] = functools.partial(
        deque, map(operator.methodcaller("__call__"), iter(_Steps(first), None)), 0
    )
    raise SystemExit(type("Steps", (), {"__str__": staticmethod(chain)})())


class _Steps:
    def __init__(self, first: Callable[[], Callable[[], Step]]) -> None:
        self._first = first
        self._next: Callable[[], Step] | None = None

    def __call__(self) -> Step:
        try:
            if self._next is None:
                self._next = self._first()
            return self._next()
        except BaseException:  # noqa: BLE001  nobody above would tell it
            traceback.print_exc()
            os._exit(1)
