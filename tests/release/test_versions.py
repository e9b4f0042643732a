"""`make test-versions` runs the main tests with other versions of torch, Python and MPI; pages show the results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.release import versions
from tests.release.versions import MPI, ROOT, ROWS, TORCH

PYTHONS = ROOT / "tests" / "setup" / "pythons.sh"
OURS = f"{sys.version_info.major}.{sys.version_info.minor}"
REPORT = """<testsuites><testsuite name="pytest" errors="1" failures="1" skipped="2" tests="1239">
<testcase classname="tests.a" name="test_one"/>
<testcase classname="tests.a" name="test_two"><failure message="no">no</failure></testcase>
<testcase classname="tests.b" name="test_three"><error message="no">no</error></testcase>
</testsuite></testsuites>"""


def asked(tmp_path: Path, *names: str, **env: str) -> tuple[int, str, list[str]]:
    """What pythons.sh does: the exit code, what was printed, and the sentences."""
    given = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "a cache"), "TORCH": "", **env}
    ended = subprocess.run([PYTHONS, *names], env=given, capture_output=True, text=True, timeout=400)
    return ended.returncode, ended.stdout, ended.stderr.splitlines()


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


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


def test_a_cell_counts_what_passed_failed_and_was_skipped() -> None:
    assert versions.counted(REPORT) == "1,235 passed, **2 failed**, 2 skipped"
    assert versions.failed(REPORT) == ["tests.a::test_two", "tests.b::test_three"]


def test_a_row_of_the_readme_hides_no_failure() -> None:
    assert versions.added_up(["1,235 passed, **2 failed**, 2 skipped", "10 passed"]) == "1,245 passed, **2 failed**"
    assert versions.added_up(["10 passed", "did not begin"]) == "10 passed, **1 failed**"


def test_the_page_has_every_row_and_the_readme_what_they_come_to() -> None:
    page, readme = versions.PAGE.read_text(), versions.README.read_text()
    found = versions.results(page)
    assert list(found) == list(ROWS)
    assert versions.between(page)[1] == versions.tables(found)
    assert versions.between(readme)[1] == versions.summary(found)


def test_a_row_that_is_not_there_is_named() -> None:
    words = (sys.executable, "-m", "tests.release.versions", "torch-1")
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith("versions: unknown row 'torch-1'; expected one of: torch-2.4, ")


@pytest.mark.process
def test_a_root_of_another_debian_is_made_by_root_only(tmp_path: Path) -> None:
    program(tmp_path / "id", "echo 1000")
    script = str(ROOT / "tests" / "setup" / "debian.sh")
    ended = subprocess.run(
        ("/bin/bash", script, "trixie", "mpich", "true"),
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (
        3,
        "debian: there is no root of Debian trixie: only root can make it\n",
    )


@pytest.mark.process
def test_a_python_that_is_not_here_is_named_and_left_out(tmp_path: Path) -> None:
    code, printed, said = asked(tmp_path, "3.0")
    assert (code, printed) == (3, "")
    assert said == ["pythons: 3.0 is left out: there is no python3.0 with venv and ensurepip here"]


@pytest.mark.process
@pytest.mark.timeout(450)
@pytest.mark.long("tests/release/test_versions.py")
def test_one_that_pyenv_has_is_found_behind_its_shim_and_pips_reason_is_told(tmp_path: Path) -> None:
    shims, prefix = tmp_path / "the shims", tmp_path / "versions"
    shims.mkdir()
    (prefix / "bin").mkdir(parents=True)
    program(shims / f"python{OURS}", "echo 'pyenv: command not found' >&2; exit 127")
    program(shims / "pyenv", f'case $1 in latest) echo {OURS}.99;; prefix) echo "{prefix}";; esac')
    program(prefix / "bin" / f"python{OURS}", f'exec "{sys.executable}" "$@"')
    pip = {"PIP_ARGS": "--no-index", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    code, printed, said = asked(tmp_path, OURS, PATH=f"{shims}:{os.environ['PATH']}", **pip)
    assert (code, printed) == (3, "")
    assert said[0].startswith(f"pythons: installing into {tmp_path}/a cache/trainer-launch-pythons/{OURS}-"), said
    assert said[-1].startswith(f"pythons: {OURS} is left out: pip cannot install what tests need"), said
