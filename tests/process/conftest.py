"""What tests of real processes share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.process.world import PID1, require_namespaces


@pytest.fixture(params=["child", "pid1"])
def wrap(request: pytest.FixtureRequest) -> Sequence[str]:
    """What to put before a launcher: nothing for an ordinary process, or what makes it PID 1 of a namespace."""
    if request.param == "pid1":
        require_namespaces()
        return PID1
    return ()
