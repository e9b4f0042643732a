"""The sdist and the wheel: what is in them, the same bytes each time, running where nothing else of ours is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.launching import clean_env
from tests.conftest import require
from trainer_launch import __version__

ROOT = Path(__file__).parents[2]
EPOCH = "1795305600"
NAME = f"trainer_launch-{__version__}"
TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "Makefile", "pyproject.toml")
FOLDERS = (".ci", "benchmarks", "docker", "docs", "tests", "trainer_launch")
LEFT_BEHIND = shutil.ignore_patterns("__pycache__", "*.pyc", "raw")
pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(600),
    pytest.mark.long(only="what is built installs and runs in a clean environment"),
]


def run(argv: Sequence[str | Path], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in clean_env(env).items() if name != "PYTHONPATH"}
    return subprocess.run(argv, cwd=cwd, env=kept, capture_output=True, text=True, timeout=500)


def built(folder: Path, source: Path) -> tuple[Path, Path]:
    """The sdist of a copy of a tree whose files are all new, and the wheel of that sdist."""
    tree = folder / "a tree"
    shutil.copytree(source, tree, ignore=LEFT_BEHIND, copy_function=shutil.copyfile)
    made = run((sys.executable, "-m", "build", "--no-isolation", "-o", folder, "."), tree, SOURCE_DATE_EPOCH=EPOCH)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder / f"{NAME}.tar.gz", folder / f"{NAME}-py3-none-any.whl"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This tree without what tools keep in it."""
    folder = tmp_path_factory.mktemp("source") / "tree"
    folder.mkdir()
    for name in (*TOP, "constraints.txt", ".dockerignore", ".gitignore", ".pre-commit-config.yaml"):
        shutil.copy(ROOT / name, folder)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=LEFT_BEHIND)
    return folder


@pytest.fixture(scope="module")
def dist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return built(tmp_path_factory.mktemp("dist"), source)


def test_a_release_is_the_same_each_time_and_has_checksums(source: Path, tmp_path: Path) -> None:
    """In a clone of its own: what is released is the last commit."""
    tree, folders = tmp_path / "a clone", (tmp_path / "one", tmp_path / "other")
    shutil.copytree(source, tree, ignore=LEFT_BEHIND)
    me = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for words in (("init", "-q"), ("add", "-A"), (*me, "commit", "-qm", "All")):
        assert run(("git", *words), tree).returncode == 0
    (tree / "trainer_launch" / "not_committed.py").write_text("")
    for folder in folders:
        made = run((sys.executable, "-m", "tests.release.release", folder), tree)
        assert made.returncode == 0, made.stdout + made.stderr
        assert made.stderr == "release: the changes that are not committed are not in it\n"
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == ["SHA256SUMS", *(f"{NAME}{end}" for end in ("-py3-none-any.whl", ".cdx.json", ".tar.gz"))]
    assert [(folders[0] / name).read_bytes() for name in names] == [
        (folders[1] / name).read_bytes() for name in names
    ]
    assert run(("sha256sum", "--check", "--quiet", "SHA256SUMS"), folders[0]).returncode == 0
    assert "trainer_launch/not_committed.py" not in zipfile.ZipFile(folders[0] / names[1]).namelist()
    components = json.loads((folders[0] / names[2]).read_text())["components"]
    pinned = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    told = {one["name"]: one["version"] for one in components}
    assert {name: told[name] for name in told if name in pinned} == {
        name: pinned[name] for name in told if name in pinned
    }
    required = {one["name"] for one in components if one["scope"] == "required"}
    assert {"msgspec", "psutil", "pydantic", "pydantic-settings"} <= required
    assert not required & {"matplotlib", "torch"}
    assert all(one["licenses"] for one in components)


def test_the_wheel_has_the_package_and_nothing_else(dist: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(dist[1]).namelist())
    ours = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "trainer_launch").rglob("*")
        if path.suffix in (".py", ".json", ".css", ".typed")
    }
    assert {name for name in names if not name.startswith(f"{NAME}.dist-info/")} == ours
    assert {"trainer_launch/py.typed", "trainer_launch/schemas/event.schema.json"} <= ours


def test_the_sdist_has_all_that_its_tests_need(dist: tuple[Path, Path], tmp_path: Path) -> None:
    with tarfile.open(dist[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    assert not any("__pycache__" in name for name in names)
    tracked = run(("git", "ls-files", "-z"), ROOT)
    if tracked.returncode == 0:
        kept = {name for name in tracked.stdout.split("\0") if (ROOT / name).is_file() and "/raw/" not in name}
        assert kept - names == set()
    some = ("tests/contracts/test_cases.py", "tests/architecture/test_pages.py", "tests/cli/test_explain.py")
    tested = run((sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *some), tmp_path / NAME)
    assert tested.returncode == 0, tested.stdout[-3000:]


def test_the_wheel_of_the_sdist_runs_in_a_clean_environment(dist: tuple[Path, Path], tmp_path: Path) -> None:
    home = tmp_path / "an environment"
    venv.create(home, with_pip=True, symlinks=True)
    python, program = home / "bin" / "python", home / "bin" / "trainer-launch"
    installed = run((python, "-m", "pip", "install", "-q", f"{dist[1]}[local]"), tmp_path)
    require(installed.returncode == 0, f"pip cannot install what the package needs: {installed.stderr[-300:]}")
    (tmp_path / "hello.py").write_text("print('hello')\n")

    def done(*words: str) -> str:
        ended = run((program, *words), tmp_path, PATH=os.defpath)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    assert done("--version") == f"trainer-launch {__version__}\n"
    said = done("local", "--nodes", "2", "--engine", "plain", "--", str(python), "hello.py")
    assert {"[0] hello", "[1] hello"} <= set(said.splitlines())
    assert json.loads(done("explain", "--json"))["contract"] == "unknown"
    assert json.loads(done("preflight", "--level", "container", "--json"))["exit_code"] == 0
    typed = (
        "import importlib.resources as r; print((r.files('trainer_launch') / 'schemas/pod.schema.json').is_file())"
    )
    assert run((python, "-c", typed), tmp_path).stdout == "True\n"
