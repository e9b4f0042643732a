"""Names are the glossary's, have their units, and are used once; messages and pages have none of 0.1's phrases."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import sizes
from tests.architecture.package import FILES, ROOT, name_of, text_of, tree_of

# In tests/limits.json: the words that the glossary replaces, each with the number of names that still have it: it
# only ever falls. And the modules with the same name, which mirror each other or which each package has.
REPLACED: dict[str, int] = sizes.LIMITS["names with a replaced word"]
MIRRORS: list[str] = sizes.LIMITS["modules with the same name"]
# Seconds end in _s and bytes in _bytes; the first names are torch's and Kubernetes's, and users write them.
NOT_OURS = {"monitor_interval", "active_deadline_seconds", "hang_timeout", "rejoin_timeout", "wait_timeout"} | {
    "straggler_interval",
    *("nccl_heartbeat_timeout_sec", "nccl_collective_timeout_sec"),  # Flyte's names, as the two before
}
NO_UNITS = re.compile(r"(seconds|secs?|_ms|millis|timeout|interval|duration|delay|_mb|_gb|_mib|_gib|_kb)$")
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

each_file = pytest.mark.parametrize("path", FILES, ids=name_of)


def words_of(name: str) -> str:
    """A name's words, small and with one _ between and around: `LastWords` is `_last_words_`."""
    return "_" + "_".join(re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)).lower() + "_"


def names_in(path: Path) -> set[str]:
    """What a file defines: itself, its classes, functions, arguments, variables, and what it calls its imports."""
    names = {path.stem}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias) and node.asname:
            names.add(node.asname)
    return names


@cache
def all_names() -> list[tuple[str, str]]:
    """Each name, as words, with its place."""
    return [(words_of(name), f"{name_of(path)}: {name}") for path in FILES for name in sorted(names_in(path))]


@pytest.mark.parametrize("word", REPLACED)
def test_a_word_that_the_glossary_replaces_does_not_come_back(word: str) -> None:
    found = [place for words, place in all_names() if f"_{word}_" in words]
    assert len(found) <= REPLACED[word], f"use the glossary's word instead: {found}"


def test_no_two_modules_have_the_same_name_but_those_that_mirror_each_other() -> None:
    assert sorted(sizes.names_used_twice().keys() - set(MIRRORS)) == []


@each_file
def test_fields_have_their_units_in_their_names(path: Path) -> None:
    fields = {
        node.target.id
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert {name for name in fields if NO_UNITS.search(name)} <= NOT_OURS


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
                yield f"{name_of(path)}:{node.lineno}", " ".join(text_of(node).split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_has_none_of_these_phrases(page) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert [found[0] for found in PHRASES.finditer(text)] == []


def test_no_message_has_one_of_these_phrases() -> None:
    assert {place: text for place, text in printed() if PHRASES.search(text)} == {}


@each_file
def test_no_docstring_or_comment_has_one_of_these_phrases(path: Path) -> None:
    text = " ".join(path.read_text(encoding="utf-8").replace("#", " ").split())
    assert [found[0] for found in PHRASES.finditer(text)] == []


def test_no_name_of_a_test_has_one_of_these_phrases() -> None:
    names = (
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^ *def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert [name for name in names if PHRASES.search(name.replace("_", " "))] == []
