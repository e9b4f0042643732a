"""A cluster for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers import podman


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[podman.Cluster]:
    """A network and room for pods; all of it goes away with the test."""
    tmp_path.chmod(0o755)
    with podman.cluster(f"{abs(hash(request.node.name)) % 10**6}", tmp_path) as made:
        yield made
