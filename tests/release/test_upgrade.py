"""What 0.1 could be told, this version can be told, too: its options and variables, as its own help listed them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.cli.launching import launch
from trainer_launch.commands import options
from trainer_launch.model import settings

ROOT = Path(__file__).parents[2]
# `COMMAND OPTION VALUE`, from `--help` of each command of 0.1.0.
OPTIONS = [
    (*line.split(" ", 2), "")[:3]
    for line in (Path(__file__).parent / "options-0.1.txt").read_text().splitlines()
    if line
]
SAMPLES = {"N": "2", "PID": "1", "PORT": "2222", "SECONDS": "7", "SECONDS|auto": "auto", "SIZE|auto|keep": "keep"}
VARIABLES = {
    settings.PREFIX + name.upper(): value
    for _, flag, value in OPTIONS
    if (name := flag.removeprefix("--").replace("-", "_")) in settings.Settings.model_fields | settings.RENAMED
}


def values(metavar: str) -> list[str]:
    """What 0.1 accepted in its place: each of the choices, or one value."""
    return metavar.split("|") if metavar.islower() else [SAMPLES.get(metavar, "x")]


@pytest.mark.parametrize("command", {command: None for command, *_ in OPTIONS})
def test_the_options_of_0_1_are_accepted_with_each_of_their_values(command: str) -> None:
    own = [(flag, values(metavar) if metavar else [""]) for name, flag, metavar in OPTIONS if name == command]
    for at in range(max(len(choices) for _, choices in own)):
        words = [word for flag, choices in own for word in (flag, choices[at % len(choices)]) if word]
        given, _ = options.typed("trainer-launch", [command, *words])
        assert settings.load(given).model_fields_set >= given.keys()


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_of_0_1_still_says_the_same(name: str) -> None:
    field = name.removeprefix(settings.PREFIX).lower()
    for value in values(VARIABLES[name] or "true|false"):
        found = settings.load({}, {name: value})
        assert found.model_fields_set == {settings.RENAMED.get(field, field)}


@pytest.mark.parametrize(("old", "new"), settings.RENAMED.items())
def test_a_name_of_0_1_works_with_a_warning_that_names_the_new_one(old: str, new: str) -> None:
    flag, variable = settings.flag_of(old), settings.PREFIX + old.upper()
    typed = launch("explain", "--json", flag, "/a directory", "--", "true")
    told = launch("explain", "--json", "--", "true", env={variable: "/a directory"})
    assert (typed.returncode, told.returncode) == (0, 0)
    assert f"{flag} is deprecated; use {settings.flag_of(new)}" in typed.stderr
    assert f"{variable} is deprecated; use {settings.PREFIX}{new.upper()}" in told.stderr
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in changes for name in (flag, variable, settings.flag_of(new)))


def test_where_the_old_and_the_new_name_are_set_the_new_one_counts() -> None:
    for (old, new), names in product(settings.RENAMED.items(), (("old", "new"), ("new", "old"))):
        env = {settings.PREFIX + {"old": old, "new": new}[name].upper(): name for name in names}
        assert getattr(settings.load({}, env), new) == "new"
