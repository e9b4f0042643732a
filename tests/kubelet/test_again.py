"""A test begins anew where the kubelet forgot how a pod ended, and only there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from tests.kubelet.cluster import Cluster
from tests.kubelet.jobs import KubeletForgotError, again_if_the_kubelet_forgets


class Namespaces:
    """What a cluster is asked for here."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.gone: list[str] = []

    @contextlib.contextmanager
    def namespace(self, name: str) -> Iterator[str]:
        self.made.append(name)
        try:
            yield name
        finally:
            self.gone.append(name)


def attempts(folder: Path, failures: list[Exception]) -> list[str]:
    """The namespaces of a test whose first runs fail so."""
    ran: list[str] = []

    @again_if_the_kubelet_forgets
    def test(_cluster: Cluster, namespace: str, tmp_path: Path) -> None:
        assert list(tmp_path.iterdir()) == []
        ran.append(namespace)
        if failures:
            raise failures.pop(0)

    namespaces = Namespaces()
    try:
        test(cast(Cluster, namespaces), "it", folder)
    finally:
        assert namespaces.made == namespaces.gone == ran
    return ran


def test_a_test_that_passes_runs_once(tmp_path: Path) -> None:
    assert attempts(tmp_path, []) == ["it-1"]


def test_a_forgotten_end_begins_it_anew_in_a_namespace_of_its_own_and_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="begun again: not located"):
        assert attempts(tmp_path, [KubeletForgotError("not located\nmore")]) == ["it-1", "it-2"]


def test_an_end_that_is_always_forgotten_fails_it(tmp_path: Path) -> None:
    failures: list[Exception] = [KubeletForgotError("not located") for _ in range(3)]
    with pytest.warns(UserWarning, match="begun again"), pytest.raises(KubeletForgotError):
        attempts(tmp_path, failures)
    assert failures == []


def test_any_other_failure_is_one(tmp_path: Path) -> None:
    failures: list[Exception] = [AssertionError("exit code 1"), AssertionError("exit code 2")]
    with pytest.raises(AssertionError, match="exit code 1"):
        attempts(tmp_path, failures)
    assert len(failures) == 1
