"""Outside of a platform the log says so, and not that its contract is unknown."""

from __future__ import annotations

import pytest

from tests.cli.launching import launch


@pytest.mark.process
def test_a_run_without_a_platform_says_that_it_runs_as_a_single_node() -> None:
    done = launch("run", "--", "true")
    assert "no platform found; running as a single node: engine=plain" in done.stderr
    assert "contract=" not in done.stderr
    assert "coordinator=" not in done.stderr
