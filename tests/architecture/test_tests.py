"""`make test` leaves out what takes long; `make spec` prints all tests as sentences."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.architecture.package import ROOT

MARK = "pytest.mark.long"
FILES = sorted((ROOT / "tests").rglob("test_*.py"))


def test_the_specification_is_printed_by_folder() -> None:
    argv = (sys.executable, str(ROOT / "tests" / "spec.py"), "architecture")
    printed = subprocess.run(argv, text=True, capture_output=True, timeout=30, check=True).stdout
    assert printed.startswith("\n# architecture\n")
    assert "  - the specification is printed by folder\n" in printed


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def marks() -> Iterator[tuple[str, ast.Call]]:
    for path in FILES:
        if MARK in text_of(path):
            for node in ast.walk(ast.parse(text_of(path))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == MARK:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


@cache
def is_long(path: Path) -> bool:
    """Whether all tests of a file are long."""
    assignments = [node for node in ast.parse(text_of(path)).body if isinstance(node, ast.Assign)]
    marked = [node for node in assignments if ast.unparse(node.targets[0]) == "pytestmark"]
    return any(MARK in ast.unparse(node) for node in marked)


def test_a_long_test_names_a_quick_one_of_its_kind_or_says_what_only_it_shows() -> None:
    for where, mark in marks():
        words = [ast.literal_eval(value) for value in mark.args]
        only = {word.arg: ast.literal_eval(word.value) for word in mark.keywords}
        assert len(words) + len(only) == 1, f"{where}: name a quick test, or say only=..."
        if only:
            assert only["only"].strip(), where
        else:
            assert (ROOT / words[0]).is_file(), f"{where}: there is no {words[0]}"
            assert not is_long(ROOT / words[0]), f"{where}: {words[0]} is long itself"


def test_every_mark_is_a_call() -> None:
    for path in FILES:
        if path != Path(__file__):
            assert text_of(path).count(MARK) == text_of(path).count(f"{MARK}("), path
