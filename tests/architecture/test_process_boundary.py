"""What our own processes leave for each other is in one table, and the table is as the code is."""

from __future__ import annotations

import re

import pytest

from tests.architecture.package import FILES, name_of
from trainer_launch.host import runtime_directory
from trainer_launch.model.settings import INTERNAL, PREFIX

HOME = "host/runtime_directory.py"
TEXTS = {name_of(path): path.read_text(encoding="utf-8") for path in FILES}
CONSTANTS = {value: name for name, value in vars(runtime_directory).items() if isinstance(value, str)}
HELPERS = {
    runtime_directory.PROGRESS: ("runtime_directory.progress_file",),
    runtime_directory.ERRORS: ("runtime_directory.errors_in",),
}
ROWS = {**runtime_directory.VARIABLES, **runtime_directory.FILES}


def test_the_private_variables_are_those_of_the_table() -> None:
    assert {PREFIX + name for name in INTERNAL} == set(runtime_directory.VARIABLES)


@pytest.mark.parametrize("name", runtime_directory.VARIABLES)
def test_a_private_variable_is_spelled_once(name: str) -> None:
    assert [file for file, text in TEXTS.items() if re.search(rf"\b{name}\b", text)] == [HOME]


@pytest.mark.parametrize("name", ROWS)
def test_what_the_table_has_is_used(name: str) -> None:
    uses = (f"runtime_directory.{CONSTANTS[name]}", *HELPERS.get(name, ()))
    assert [file for file, text in TEXTS.items() if file != HOME and any(use in text for use in uses)]


def test_every_file_of_the_runtime_directory_has_its_name_from_the_table() -> None:
    """A path below a run's folder begins with one of these names."""
    below = [
        f"{file}: {found[0]}"
        for file, text in TEXTS.items()
        for found in re.finditer(r'f"\{[\w.]*(?:run_dir|scratch)\}/([^"]+)"', text)
        if not re.match(r"\{runtime_directory\.[A-Z]+\}", found[1]) and file != HOME
    ]
    assert below == []


def test_there_are_few() -> None:
    assert len(runtime_directory.VARIABLES) <= 6
    assert len(runtime_directory.FILES) <= 6
