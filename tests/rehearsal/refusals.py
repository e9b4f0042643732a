"""What is said of input that does not fit."""

from __future__ import annotations

from collections.abc import Callable

from trainer_launch.model.errors import UsageError


def refusal(call: Callable[[], object]) -> str:
    """The sentence; empty when nothing is refused."""
    try:
        call()
    except UsageError as refused:
        return str(refused)
    return ""
