"""One version, wherever it stands; and what pages claim of tests is there."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import trainer_launch

ROOT = Path(__file__).parents[2]
KUSTOMIZATIONS = (
    "docker/kubernetes/kustomization.yaml",
    "docker/kubernetes/examples/mpi-operator/kustomization.yaml",
    "docker/kubernetes/examples/training-operator/kustomization.yaml",
)
CLAIMS = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`|`::(\w+)`", (ROOT / "SECURITY.md").read_text())


def test_the_version_is_a_release_with_its_changes_told() -> None:
    head = re.search(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert head is not None
    assert head[1] == trainer_launch.__version__


def test_the_image_has_the_same() -> None:
    found = re.search(r"^ARG VERSION=(\S+)$", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] == trainer_launch.__version__


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_manifests_name_its_images(name: str) -> None:
    tags = re.findall(r"newTag: (\S+)}", (ROOT / name).read_text())
    assert set(tags) == {trainer_launch.__version__}


def test_one_command_writes_the_next_version_everywhere(tmp_path: Path) -> None:
    files = ("Makefile", "CHANGELOG.md", "docker/Dockerfile", "trainer_launch/__init__.py", *KUSTOMIZATIONS)
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 7.8.9 (unreleased)\n\n- More\n")
    bump = ("make", "-s", "bump")
    assert subprocess.run((*bump, "VERSION=7.8"), cwd=tmp_path, capture_output=True).returncode == 2
    assert subprocess.run((*bump, "VERSION=7.8.8"), cwd=tmp_path, capture_output=True).returncode == 2
    assert subprocess.run((*bump, "VERSION=7.8.9"), cwd=tmp_path, capture_output=True).returncode == 0
    changed = [line for name in files[1:] for line in (tmp_path / name).read_text().splitlines() if "7.8.9" in line]
    assert changed[1:3] == ["ARG VERSION=7.8.9", '__version__ = "7.8.9"']
    assert len(changed[3:]) == 6  # images of the manifests
    assert re.fullmatch(r"## \[7\.8\.9\] - \d{4}-\d\d-\d\d", changed[0])
    texts = {path: path.read_text() for path in (ROOT / "trainer_launch").rglob("*.py")}
    assert [path.name for path, text in texts.items() if f'"{trainer_launch.__version__}"' in text] == [
        "__init__.py"
    ]


@pytest.mark.parametrize(("file", "name", "_"), [claim for claim in CLAIMS if claim[0]])
def test_what_is_said_to_be_held_by_a_test_is(file: str, name: str, _: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert any(one.startswith("test_") for one in names)
    assert not name or name in names
