"""`make test` leaves out what takes long: for each such test it is said which quick one shows the same kind."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.package import ROOT

MARK = "pytest.mark.long"
FILES = sorted((ROOT / "tests").rglob("test_*.py"))


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def marks() -> Iterator[tuple[str, ast.Call]]:
    for path in FILES:
        if MARK in text_of(path):
            for node in ast.walk(ast.parse(text_of(path))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == MARK:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


@pytest.mark.parametrize(("where", "mark"), [pytest.param(*one, id=one[0]) for one in marks()])
def test_a_long_test_names_a_quick_one_of_its_kind_or_says_what_only_it_shows(where: str, mark: ast.Call) -> None:
    said = [ast.literal_eval(value) for value in mark.args]
    only = {word.arg: ast.literal_eval(word.value) for word in mark.keywords}
    assert len(said) + len(only) == 1, f"{where}: name a quick test, or say only=..."
    if only:
        assert set(only) == {"only"}
        assert only["only"].strip()
        return
    path = ROOT / said[0]
    assert path.is_file(), f"{where}: there is no {said[0]}"
    whole = [
        node
        for node in ast.parse(text_of(path)).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    assert not any(MARK in ast.unparse(node) for node in whole), f"{where}: {said[0]} is long itself"


def test_every_mark_is_a_call() -> None:
    for path in FILES:
        if path != Path(__file__):
            assert text_of(path).count(MARK) == text_of(path).count(f"{MARK}("), path
