"""A minute of what `make soak` does for two hours: random faults on 6 pods."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import require
from tests.pods import missing
from tests.soak import report
from tests.soak.soak import soak

pytestmark = [
    pytest.mark.torch,
    pytest.mark.process,
    pytest.mark.timeout(400),
    pytest.mark.long(only="that faults by chance, one after another, leave nothing behind"),
]
MINUTES = 1.2
SEED = 11


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: below pytest's own the pods' TMPDIR would be too long for the fork-server's socket."""
    with tempfile.TemporaryDirectory(prefix="soak-") as path:
        yield Path(path)


def test_a_minute_of_random_faults_breaks_no_invariant(folder: Path) -> None:
    require(missing() is None, str(missing()))
    violations = soak(folder, MINUTES, SEED, episodes=2)
    lines = report.read(folder)
    assert violations == 0, report.summary(lines)
    counts = report.counts(lines)
    assert counts["episode ends"] == 2, "both jobs have completed"
    assert counts["recovered"] == counts["trouble"] >= 2
    assert "has ended" in report.summary(lines)
