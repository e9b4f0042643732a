"""`make test-versions` runs the main tests with other versions of torch, Python and MPI; a page shows them."""

from __future__ import annotations

import re

from tests.release import versions
from tests.release.versions import MPI, ROOT, ROWS, TORCH


def test_every_python_that_is_supported_has_a_row_and_so_has_the_oldest_torch_and_that_of_development() -> None:
    supported = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert {row.python for row in ROWS.values()} == set(supported)
    [ours] = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    [oldest] = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    torches = [row.torch for row in ROWS.values()]
    assert ours in torches
    assert torches[0].startswith(f"{oldest}.")


def test_the_tests_that_a_row_runs_are_there() -> None:
    words = [word for suites in (TORCH, MPI) for suite in suites.values() for word in suite if "tests/" in word]
    assert [word for word in words if not (ROOT / word).exists()] == []


def test_the_page_has_every_row() -> None:
    page = versions.PAGE.read_text()
    found = versions.results(page)
    assert list(found) == list(ROWS)
    assert versions.between(page)[1] == versions.tables(found)
