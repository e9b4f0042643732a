"""Waiting in tests: for a condition, with a deadline; never for a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")
DEADLINE_S = 120.0  # long enough for a busy machine; a test that passes does not wait for it


def eventually(
    condition: Callable[[], T], what: str | Callable[[], str], within_s: float = DEADLINE_S, pace_s: float = 0.01
) -> T:
    """Return the condition's first true value.

    Args:
        condition: asked every `pace_s` seconds; again, too, if a process that it looks at has just ended.
        what: what is awaited, for the failure; a function is called at the deadline, to show how things are then.
        within_s: seconds until the deadline.
        pace_s: seconds between two looks.

    Raises:
        AssertionError: the deadline has passed.
    """
    until_s = time.monotonic() + within_s
    while True:
        with contextlib.suppress(psutil.NoSuchProcess):
            if value := condition():
                return value
        if time.monotonic() > until_s:
            raise AssertionError(f"not within {within_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(pace_s)
