"""What Python runs before a program, in forked workers: as in a new interpreter, and once in each of them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import require
from tests.pytorch.forks import Forks, fresh

pytestmark = [pytest.mark.torch, pytest.mark.process]

CUSTOMIZE = """
import atexit, os, sys
os.environ['CUSTOMIZED'] = str(os.getpid())
if 'RANK' in os.environ:
    print('site', sys.argv[1:], 'torch' in sys.modules, 'json' in sys.modules)
    atexit.register(print, 'end')
"""
PROGRAM = """
import os, sys
print(os.environ['CUSTOMIZED'] == str(os.getpid()), sorted(sys.modules), sys.path)
print(sys.flags, sys.prefix, hash('a') if 'PYTHONHASHSEED' in os.environ else None)
"""


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[Forks]:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(CUSTOMIZE)
    (tmp_path / "train.py").write_text(PROGRAM)
    made = Forks(tmp_path, env=environment(tmp_path))
    assert made.reason is None
    yield made
    made.close()


def environment(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{folder}/site:{os.getcwd()}", "PYTHONHASHSEED": "7"}


def test_sitecustomize_runs_in_each_worker(forks: Forks, tmp_path: Path) -> None:
    script = str(tmp_path / "train.py")
    other = fresh(tmp_path, tmp_path, script, environment=environment(tmp_path))
    assert other.out.startswith("site")
    for _ in range(2):
        forked = forks.run(tmp_path, script)
        assert (forked.code, forked.out) == (0, other.out), forked.err


# Each way for a package to run in every interpreter; all tell in which process, and what there is already.
HOOK = "import os, sys; 'RANK' in os.environ and print({place!r}, os.getpid(), 'torch' in sys.modules)"
TELLS = "import os, sys\nprint('train', os.getpid())\nimport torch\nprint(hash('a'), sys.path)\n"
PLACES = ("site-packages", "the user's site-packages", "usercustomize")


def environment_of_its_own(folder: Path) -> str:
    """A virtual environment that has a site-packages and a user's site of its own, and finds torch; its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", folder], check=True)
    below = Path("lib", f"python{sysconfig.get_python_version()}", "site-packages")
    site, user = folder / below, folder / "user" / below
    user.mkdir(parents=True)
    (site / "torch-of-the-tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name, place in zip((site / "hook.pth", user / "hook.pth", user / "usercustomize.py"), PLACES, strict=True):
        name.write_text(HOOK.format(place=place))
    return str(folder / "bin/python")


@pytest.mark.long("tests/pytorch/test_site_hooks.py")
def test_usercustomize_and_pth_files_run_in_each_worker_as_in_a_new_interpreter(tmp_path: Path) -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    (tmp_path / "train.py").write_text(TELLS)
    python = environment_of_its_own(tmp_path / "venv")
    given = {"PYTHONUSERBASE": str(tmp_path / "venv/user"), "PYTHONHASHSEED": "7", "PYTHONPATH": os.getcwd()}
    other = fresh(tmp_path, tmp_path, "train.py", environment=given, python=python)
    assert {f"{place} PID False" for place in PLACES} <= {*without_pid(other.out).splitlines()}
    forks = Forks(tmp_path, env=given, python=python)
    try:
        for _ in range(2):
            forked = forks.run(tmp_path, "train.py")
            assert forked.code == other.code == 0, forked.err + other.err
            assert without_pid(forked.out) == without_pid(other.out)
    finally:
        forks.close()


def without_pid(text: str) -> str:
    """What a program says that tells its pid in the line "train PID"."""
    (pid,) = (line.split()[1] for line in text.splitlines() if line.startswith("train "))
    return text.replace(f" {pid}", " PID")


@pytest.mark.long("tests/pytorch/test_site_hooks.py")
def test_coverage_counts_the_lines_of_each_worker(tmp_path: Path) -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    require(importlib.util.find_spec("coverage") is not None, "coverage is not installed")
    (tmp_path / "train.py").write_text("import os\nif os.environ['RANK'] == '1':\n    print('one')\nimport torch\n")
    (tmp_path / "coveragerc").write_text("[run]\nparallel = true\ninclude = train.py\n")
    given = {"COVERAGE_PROCESS_START": str(tmp_path / "coveragerc"), "PYTHONPATH": os.getcwd()}
    forks = Forks(tmp_path, env=given)
    try:
        for rank, lines in (("0", [1, 2, 4]), ("1", [1, 2, 3, 4])):
            own = given | {"RANK": rank, "COVERAGE_FILE": str(tmp_path / f"forked-{rank}")}
            forked = forks.run(tmp_path, "train.py", environment=own)
            own["COVERAGE_FILE"] = str(tmp_path / f"fresh-{rank}")
            other = fresh(tmp_path, tmp_path, "train.py", environment=own)
            assert forked.code == other.code == 0, forked.err + other.err
            assert counted(tmp_path, f"forked-{rank}") == counted(tmp_path, f"fresh-{rank}") == lines
    finally:
        forks.close()


def counted(folder: Path, name: str) -> list[int]:
    """The lines of train.py that one process has counted."""
    (path,) = folder.glob(f"{name}.*")
    data = importlib.import_module("coverage").CoverageData(str(path))
    data.read()
    return sorted(data.lines(str(folder / "train.py")) or ())


def test_workers_of_a_server_share_a_hash_seed(tmp_path: Path) -> None:
    """As the documentation says; PYTHONHASHSEED chooses it."""
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    (tmp_path / "train.py").write_text("print(hash('a'))")
    forks = Forks(tmp_path)
    said = {forks.run(tmp_path, "train.py").out for _ in range(2)}
    forks.close()
    assert len(said) == 1
