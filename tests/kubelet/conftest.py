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
    """A namespace for the objects of a test; they go away with it."""
    name = re.sub("[^a-z0-9]+", "-", request.node.name.removeprefix("test_"))[:40].strip("-")
    cluster.kubectl("create", "namespace", name)
    cluster.eventually(
        lambda: cluster.kubectl("get", "serviceaccount", "default", "-n", name, check=False).returncode == 0,
        "the default service account",
    )
    try:
        yield name
    finally:
        cluster.kubectl("delete", "jobs", "--all", "-n", name, "--cascade=orphan")
        cluster.kubectl("delete", "pods", "--all", "-n", name, "--grace-period=0", "--force", "--wait=false")
        cluster.kubectl("delete", "namespace", name, "--wait=true", within_s=clusters.DEADLINE_S)
        cluster.kubectl("delete", "persistentvolume", name, "--ignore-not-found", "--wait=false")
