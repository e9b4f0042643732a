"""What all tests share."""

from __future__ import annotations

import os
import signal

import hypothesis
import pytest

from tests.timeouts import pytest_timeout_set_timer  # noqa: F401  a hook

# Under nohup SIGHUP is ignored, and whatever is started inherits that; tests look at what children inherit.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# On a busy machine any example may take a moment; every test has a timeout.
hypothesis.settings.register_profile("trainer-launch", deadline=None)
hypothesis.settings.load_profile("trainer-launch")


def require(condition: object, reason: str) -> None:
    """Skip a test that this machine cannot run; in CI, where nothing may be missing, fail it."""
    if not condition:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must be able to run this: {reason}")
        pytest.skip(reason)
