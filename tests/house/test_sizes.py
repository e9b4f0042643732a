"""Small files, short functions, no catch-alls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.package import FILES, functions_of, name_of, tree_of

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 50
MAX_BROAD_EXCEPTS = 1  # the one in cli.main
BROAD = {"Exception", "BaseException"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_fits_in_mind(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_function_fits_on_a_screen(path: Path) -> None:
    lines = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions_of(path)}
    assert {name: count for name, count in lines.items() if count > MAX_FUNCTION_LINES} == {}


def test_there_is_one_catch_all() -> None:
    outside_children = [path for path in FILES if not name_of(path).startswith("child/")]
    found = [f"{name_of(path)}:{line}" for path in outside_children for line in broad_excepts(tree_of(path))]
    assert len(found) <= MAX_BROAD_EXCEPTS, found


def broad_excepts(tree: ast.AST) -> Iterator[int]:
    """The lines of `except:`, `except Exception`, `except (..., BaseException)` and `suppress(Exception)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = (
                [] if node.type is None else node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            )
            if not caught or BROAD & set(map(ast.unparse, caught)):
                yield node.lineno
        elif isinstance(node, ast.Call):
            is_suppress = ast.unparse(node.func) in {"suppress", "contextlib.suppress"}
            yield from [node.lineno] if is_suppress and BROAD & set(map(ast.unparse, node.args)) else []
