"""What is said of input that does not fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainer_launch.model.errors import UsageError


def refusal(call: Callable[[], object]) -> str:
    """The sentence."""
    with pytest.raises(UsageError) as refused:
        call()
    return str(refused.value)
