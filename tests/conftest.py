"""What all tests share."""

from __future__ import annotations

import os

import pytest


def require(condition: object, reason: str) -> None:
    """Skip a test that this machine cannot run; in CI, where nothing may be missing, fail it."""
    if not condition:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must be able to run this: {reason}")
        pytest.skip(reason)
