"""One cluster for all tests, and a namespace for each."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.kubelet import cluster as clusters
from tests.kubelet.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with clusters.running() as made:
        yield made


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace with about the name of the test."""
    name = re.sub("[^a-z0-9]+", "-", request.node.name.removeprefix("test_"))[:40].strip("-")
    with cluster.namespace(name) as made:
        yield made
