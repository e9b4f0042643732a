"""What all survival tests need."""

from __future__ import annotations

import importlib.util

import pytest

from tests.conftest import require
from tests.survival.jobs import need_hosts


@pytest.fixture(scope="module", autouse=True)
def need_torch() -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")


@pytest.fixture
def names() -> None:
    """Hosts with names of their own."""
    need_hosts()
