"""Pages and messages use the terms of the field: these phrases, which 0.1 had, do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture import messages
from tests.architecture.package import FILES, ROOT, name_of, tree_of

PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/*.md",
        "docker/**/*.md",
        "docker/**/*.yaml",
        "benchmarks/*.md",
        ".ci/*",
        "Makefile",
    )
    for path in ROOT.glob(pattern)
    if path.is_file()
)
PHRASES = re.compile(
    r"""
    last\ words | roll\ call | clean\ slate | run\ folder | guilty | broken\ promise
    | promises?\ (was|were)?\ ?broken
    | slip\ of\ the\ pen | goes?\ wrong\ on\ purpose | things?\ go\ wrong | no\ pod\ that\ is\ well | all\ is\ well
    | leave\ the\ option\ away | in\ vain | which\ command\? | (is|has)\ no\ (command|option|setting)\b
    | not\ now\ or\ not\ here | cannot\ work: | at\ fault\ framed | to\ start\ it\ again\ cannot | own\ lines\ tell
    | start(s|ed)?\ all\ again\ in\ place | says?\ at\ the\ end\ how
    | injects?\ variables\ and\ files\ into\ a\ pod\ and
    | has\ to\ know\ of\ the | no\ platform\ says | also\ those\ that\ lose | what\ that\ costs,\ here
    | every\ setting\ is\ a\ variable | stands\ after | the\ launcher's\ own\ win | for\ everybody
    | take\ the\ other\ one | only\ calls\ the\ roll | whoever\ is\ at\ fault | sign\ of\ life
    """,
    re.IGNORECASE | re.VERBOSE,
)


def printed() -> Iterator[tuple[str, str]]:
    """Every text in the package's code that is no docstring, with its place."""
    for path in FILES:
        tree = tree_of(path)
        documented = (
            node.body[0].value
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        )
        docstrings = {id(node) for node in documented}
        for node in ast.walk(tree):
            if not isinstance(node, ast.JoinedStr | ast.Constant) or id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr) or isinstance(node.value, str):
                yield f"{name_of(path)}:{node.lineno}", " ".join(messages.text_of(node).split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_has_none_of_these_phrases(page) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert [found[0] for found in PHRASES.finditer(text)] == []


def test_no_message_has_one_of_these_phrases() -> None:
    assert {place: text for place, text in printed() if PHRASES.search(text)} == {}
