"""What 0.2 accepted is still accepted, or ends with exit code 2 and a sentence that names what to use instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.launching import launch
from trainer_launch.commands import options
from trainer_launch.model import removed, settings
from trainer_launch.model.errors import UsageError
from trainer_launch.planning import mpi_options, torchrun_options

# `COMMAND OPTION VALUE`, from `--help` of each command of 0.2.0.
OPTIONS = [
    (*line.split(" ", 2), "")[:3]
    for line in (Path(__file__).parent / "options-0.2.txt").read_text().splitlines()
    if line
]
SAMPLES = {
    "N": "2",
    "PID": "1",
    "PORT": "2222",
    "SECONDS": "7",
    "SECONDS|auto": "auto",
    "SECONDS|auto|off": "off",
    "SIZE|auto|keep": "keep",
    "FILE.html|.png": "x.html",
    "LINES": "9",
}
# Values of options that stayed are in the table, too, as in `--report FILE.png`.
GONE = {flag for flag in removed.SUCCESSORS if " " not in flag}


def values(metavar: str, flag: str = "") -> list[str]:
    """What 0.2 accepted in its place: each of the choices that are still there, or one value."""
    choices = metavar.split("|") if metavar.islower() else [SAMPLES.get(metavar, "x")]
    return [choice for choice in choices if f"{flag} {choice}" not in removed.SUCCESSORS]


def name_of(flag: str) -> str:
    return flag.replace("--no-", "--", 1)


@pytest.mark.parametrize("command", {command: None for command, *_ in OPTIONS})
def test_the_options_of_0_2_that_stayed_are_accepted_with_each_of_their_values(command: str) -> None:
    own = [
        (flag, values(metavar, flag) if metavar else [""])
        for name, flag, metavar in OPTIONS
        if name == command and name_of(flag) not in GONE
    ]
    for at in range(max(len(choices) for _, choices in own)):
        words = [word for flag, choices in own for word in (flag, choices[at % len(choices)]) if word]
        _, given, _, _ = options.typed("trainer-launch", [command, *words])
        assert settings.load(given).model_fields_set >= given.keys()


@pytest.mark.parametrize(
    ("command", "flag", "metavar"), [row for row in OPTIONS if name_of(row[1]) in GONE and row[1] != "--chaos"]
)
def test_each_option_that_was_removed_names_its_successor(command: str, flag: str, metavar: str) -> None:
    for word in values(metavar) if metavar else [""]:
        with pytest.raises(UsageError) as problem:
            options.typed("trainer-launch", [command, flag, *([word] if word else [])])
        assert str(problem.value) == f"{flag} was removed in 0.3; {removed.SUCCESSORS[name_of(flag)]}"


@pytest.mark.parametrize("flag", [flag for flag in removed.SUCCESSORS if " " not in flag and flag != "--chaos"])
def test_so_does_its_variable(flag: str) -> None:
    variable = settings.variable_of(flag.removeprefix("--").replace("-", "_"))
    for value in ("1", "x"):
        with pytest.raises(UsageError, match=f"^{variable} was removed in 0.3; "):
            settings.load({}, {variable: value})
    assert settings.load({}, {variable: ""}).model_fields_set == frozenset(), "an empty variable is as good as none"


@pytest.mark.parametrize("where", ["--start-method", "TRAINER_LAUNCH_START_METHOD"])
def test_a_choice_that_was_removed_names_its_successor_too(where: str) -> None:
    method = {"start_method": "forkserver"} if where.startswith("--") else {}
    env = {} if method else {where: "forkserver"}
    with pytest.raises(UsageError, match=f"^{where} forkserver was removed in 0.3; use --start-method auto"):
        settings.load(method, env)


def test_a_removed_option_and_a_removed_variable_end_with_2_and_one_line() -> None:
    typed = launch("run", "--stop-order", "group", "--", "true")
    told = launch("run", "--", "true", env={"TRAINER_LAUNCH_EXEC": "1"})
    for done, what in ((typed, "--stop-order"), (told, "TRAINER_LAUNCH_EXEC")):
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"trainer-launch: error: {what} was removed in 0.3; ")


def test_each_successor_exists() -> None:
    parsers = [options.parser_of("trainer-launch", name) for name in options.COMMANDS]
    ours = {word for parser in parsers for word in parser._option_string_actions}
    theirs = {option.flag for option in torchrun_options.OPTIONS.values()}
    theirs |= {f"--{name}" for name in mpi_options.OF_HOROVODRUN}
    for advice in removed.SUCCESSORS.values():
        assert set(re.findall(r"--[a-z][a-z-]*", advice)) <= ours | theirs, advice
