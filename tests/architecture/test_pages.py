"""The pages that people read: short, whole, and true to what they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.package import ROOT
from trainer_launch.commands import options

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docker").glob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


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


def test_the_first_page_stays_a_first_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_readmes_first_screen_names_the_two_commands_that_a_fresh_machine_needs() -> None:
    screen = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:24]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = [word for line in screen for word in re.findall(r"^\$ make ([a-z-]+)", line)]
    assert named == ["demo", "test"]
    assert set(named) <= set(targets)


def test_ci_begins_with_the_readmes_own_make_test() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.findall(r"^(?:exec )?make ([a-z-]+)", script, re.MULTILINE)[0] == "test"


def test_the_path_of_a_workers_death_names_modules_that_exist_and_counts_them() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    path = page.partition("## The path of a worker's death\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+/\w+\.py)`", path))
    assert [name for name in named if not (ROOT / "trainer_launch" / name).is_file()] == []
    assert re.findall(r"These are (\d+) modules", path) == [str(len(named))]


def test_every_page_is_in_the_index() -> None:
    index = links_of((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages - set(index) == set()


def test_every_command_is_in_the_readmes_table() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `trainer-launch ([a-z]+)", readme, re.MULTILINE)) == set(options.COMMANDS)


def test_the_text_for_pypi_links_to_no_file() -> None:
    text = (
        (ROOT / "pyproject.toml")
        .read_text(encoding="utf-8")
        .partition("[project.readme]")[2]
        .partition('"""\n\n')[0]
    )
    assert "trainer-launch run" in text
    assert [link for link in links_of(text) if not link.startswith("https://")] == []
