"""`make test-versions` runs the main tests with other versions of torch, Python and MPI; a page shows them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.release import versions
from tests.release.versions import MPI, ROOT, ROWS, TORCH

PYTHONS = ROOT / "tests" / "setup" / "pythons.sh"


def asked(tmp_path: Path, *names: str, **env: str) -> tuple[int, str, list[str]]:
    """What pythons.sh does: the exit code, what was printed, and the sentences."""
    given = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "a cache"), "TORCH": "", **env}
    ended = subprocess.run([PYTHONS, *names], env=given, capture_output=True, text=True, timeout=400)
    return ended.returncode, ended.stdout, ended.stderr.splitlines()


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


@pytest.mark.process
def test_a_python_that_is_not_here_is_named_and_left_out(tmp_path: Path) -> None:
    code, printed, said = asked(tmp_path, "3.0")
    assert (code, printed) == (3, "")
    assert said == ["pythons: 3.0 is left out: there is no python3.0 with venv and ensurepip here"]
