"""The pages that people read: links lead somewhere, and what they name is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.package import ROOT, told_path
from trainer_launch.commands import options
from trainer_launch.model import Verdict, exit_codes
from trainer_launch.preflight import registry
from trainer_launch.preflight.check import Where
from trainer_launch.rehearsal.script_checks import ScriptCheck
from trainer_launch.supervisor import error_lines, failure

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docker").glob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
PREFLIGHT = (ROOT / "docs" / "preflight.md").read_text(encoding="utf-8")
QUOTED = re.compile(r"`([^`\n]+)`")
NAMES = {"| reason |": 1, "| failed check |": 1}
CHECKS = {"| check |": 1, "| checks |": 1}
RULES = [*failure.CAUSES, *error_lines.SYMPTOMS]


def links_of(text: str) -> list[str]:
    """Where a page's links lead, those of its examples left out."""
    return LINK.findall(FENCED.sub("", text))


def anchors_of(path: Path) -> set[str]:
    """The places within a page that a link may name, as GitHub makes them of its headings."""
    heads = re.findall(r"^#+ (.+)$", FENCED.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_link_leads_to_a_file_of_this_repository(page: Path) -> None:
    for link in links_of(page.read_text(encoding="utf-8")):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path) if path else page
        assert there.exists(), link
        assert not anchor or anchor in anchors_of(there), link


def rows_of(page: str, head: str) -> dict[str, dict[str, str]]:
    """A table of a page: each row by its first cell, its other cells by their heads."""
    table = (ROOT / page).read_text(encoding="utf-8").partition(f"\n{head}")[2].partition("\n\n")[0]
    first, _, *rows = (
        [cell.strip() for cell in row.strip("|").split("|")] for row in f"{head}{table}".splitlines()
    )
    return {name: dict(zip(first[1:], cells, strict=True)) for name, *cells in rows}


def test_the_readmes_figures_are_those_of_the_benchmarks() -> None:
    """Each begins with the median of the row and column, or with `never`."""
    results = rows_of("benchmarks/RESULTS.md", "|fault|trainer-launch|")
    for fault, figures in rows_of("README.md", "| fault | trainer-launch |").items():
        for who, figure in figures.items():
            measured = results[fault][who.replace("torchrun, tuned", "torchrun, expert")]
            assert figure.split()[0] == measured.split()[0].strip("*"), f"{fault}, {who}"


TOLD_PATHS = ("A worker's death", "A node's loss", "A command line's way to a plan")


@pytest.mark.parametrize("title", TOLD_PATHS)
def test_the_modules_on_a_told_path_exist(title: str) -> None:
    assert told_path(title)
    assert [name for name in told_path(title) if not (ROOT / "trainer_launch" / name).is_file()] == []


def test_every_page_is_in_the_index() -> None:
    index = links_of((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages - set(index) == set()


def test_every_command_is_in_the_readmes_table() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `trainer-launch ([a-z-]+)", readme, re.MULTILINE)) == {
        *options.COMMANDS,
        "help",
        "version",
    }


def test_the_text_for_pypi_links_to_no_file() -> None:
    text = (
        (ROOT / "pyproject.toml")
        .read_text(encoding="utf-8")
        .partition("[project.readme]")[2]
        .partition('"""\n\n')[0]
    )
    assert "trainer-launch run" in text
    assert [link for link in links_of(text) if not link.startswith("https://")] == []


def column(heads: dict[str, int], page: str = TROUBLESHOOTING) -> list[str]:
    """What stands in code in that column of the page's tables that begin so."""
    found: list[str] = []
    for table in re.findall(r"(?:^\|.*\n)+", FENCED.sub("", page), re.MULTILINE):
        at = next((at for head, at in heads.items() if table.startswith(head)), None)
        if at is not None:
            found += [word for row in table.splitlines()[2:] for word in QUOTED.findall(row.split("|")[at])]
    return found


def test_the_tables_are_found() -> None:
    assert len(column(NAMES)) + len(column(CHECKS, PREFLIGHT)) > 60


def test_every_reason_has_its_entry_and_no_other() -> None:
    reasons = {rule.reason for rule in RULES} | {verdict.value for verdict in Verdict} | {"NotStarted"}
    assert set(column({"| reason |": 1})) == reasons


@pytest.mark.parametrize("what", sorted({rule.what for rule in RULES} - {""}))
def test_every_rule_of_failure_has_its_entry(what: str) -> None:
    assert what in column({"| it says |": 1})


def test_every_check_has_its_entry_and_no_other() -> None:
    checks = registry.ids(*Where)
    assert sorted(column(CHECKS, PREFLIGHT)) == sorted(set(checks))


def test_every_failed_check_of_a_rehearsal_has_its_entry_and_no_other() -> None:
    assert column({"| failed check |": 1}) == [check.value for check in ScriptCheck]


def test_every_exit_code_of_our_own_has_its_entry() -> None:
    table = TROUBLESHOOTING.partition("| code |")[2].partition("\n\n")[0]
    shown = {int(code) for row in table.splitlines()[2:] for code in re.findall(r"\b\d+\b", row.split("|")[1])}
    ours = {value for name, value in vars(exit_codes).items() if name.isupper() and not name.startswith("_")}
    assert ours - shown == set()
