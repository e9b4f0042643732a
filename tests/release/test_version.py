"""One version, wherever it stands; and what pages claim of tests is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import trainer_launch

ROOT = Path(__file__).parents[2]
CLAIMS = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`|`::(\w+)`", (ROOT / "SECURITY.md").read_text())


def test_the_version_is_a_release_with_its_changes_told() -> None:
    head = re.search(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert head is not None
    assert head[1] == trainer_launch.__version__


def test_the_image_has_the_same() -> None:
    found = re.search(r"^ARG VERSION=(\S+)$", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] == trainer_launch.__version__


@pytest.mark.parametrize(("file", "name", "_"), [claim for claim in CLAIMS if claim[0]])
def test_what_is_said_to_be_held_by_a_test_is(file: str, name: str, _: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert any(one.startswith("test_") for one in names)
    assert not name or name in names
