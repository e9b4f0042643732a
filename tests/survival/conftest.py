"""What all survival tests need."""

from __future__ import annotations

import pytest

from tests.survival.jobs import need_hosts


@pytest.fixture
def names() -> None:
    """Hosts with names of their own."""
    need_hosts()
