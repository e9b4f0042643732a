"""Small files, short functions, no catch-alls; and the figures of `make size` stay within their limits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import sizes
from tests.architecture.package import FILES, functions_of, name_of, tree_of

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 50
ONE_CATCH_ALL = "preflight/check.py"  # a check that is wrong must not stop the job
# They run users' code, or what nobody above would tell.
IN_CHILDREN = (
    "preflight/children/",
    "pytorch/fork_server_process.py",
    "pytorch/forked_process.py",
    "pytorch/flight_recorder.py",
    "pytorch/function_launch.py",
    "pytorch/caller_fork.py",
)
BROAD = {"Exception", "BaseException"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_fits_in_mind(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_function_fits_on_a_screen(path: Path) -> None:
    lines = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions_of(path)}
    assert {name: count for name, count in lines.items() if count > MAX_FUNCTION_LINES} == {}


def test_there_is_one_catch_all() -> None:
    outside_children = [path for path in FILES if not name_of(path).startswith(IN_CHILDREN)]
    assert [name_of(path) for path in outside_children for _ in broad_excepts(tree_of(path))] == [ONE_CATCH_ALL]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_what_a_linter_is_told_to_pass_over_has_its_reason(path: Path) -> None:
    """A broad `except`, and an open file that nobody closes here; what a line prints or ignores shows by itself."""
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if re.search(r"# noqa: (BLE001|SIM115)(,\s*\w+)*\s*$", line)] == []


@pytest.mark.parametrize("name", sizes.LIMITS["figures"])
def test_a_figure_stays_within_two_percent_of_its_limit(name: str) -> None:
    now, limit = sizes.figures()[name], sizes.LIMITS["figures"][name]["limit"]
    assert now <= limit * sizes.MARGIN, f"{name}: make it smaller, or raise it in tests/limits.json and say why"


def test_every_figure_has_its_limit_and_its_target() -> None:
    assert {name: set(one) for name, one in sizes.LIMITS["figures"].items()} == {
        name: {"limit", "target"} for name in sizes.figures()
    }


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
