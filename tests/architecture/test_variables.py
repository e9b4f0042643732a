"""Every option and every TRAINER_LAUNCH_* variable is declared once, used, and documented."""

from __future__ import annotations

import argparse
import re

from tests.architecture.package import FILES, ROOT, name_of
from trainer_launch.commands import options
from trainer_launch.commands.options import COMMANDS
from trainer_launch.model.settings import INTERNAL, PREFIX, Settings, flag_of

NAMED = {
    name
    for path in FILES
    if name_of(path) != "settings.py"
    for name in re.findall(PREFIX + r"([A-Z_]+)", path.read_text(encoding="utf-8"))
}


def test_every_variable_is_a_setting_or_internal() -> None:
    assert INTERNAL | {name.upper() for name in Settings.model_fields} >= NAMED


def test_whatever_a_pods_own_command_line_says_a_variable_can_say() -> None:
    parser = options.build("trainer-launch", ("run", "sshd"))
    known = {flag_of(name) for name in Settings.model_fields} | {"--help"}
    assert {words for words in flags(parser) if not known & set(words)} == set()


def test_every_internal_variable_is_used() -> None:
    assert NAMED >= INTERNAL


def test_every_option_of_every_command_is_in_the_pages() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docker").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    told = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text)) | {
        settings_flag(name) for name in re.findall(PREFIX + r"([A-Z_]+)", text)
    }
    parser = options.build("trainer-launch", tuple(COMMANDS))
    assert {words for words in flags(parser) if not told & set(words)} == set()


def flags(parser: argparse.ArgumentParser) -> set[tuple[str, ...]]:
    """The ways in which each option can be written, of all the parser's commands."""
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    actions = [action for command in commands.choices.values() for action in command._actions]
    return {tuple(action.option_strings) for action in actions if action.option_strings}


def settings_flag(variable: str) -> str:
    """The flag of a variable, without our prefix."""
    return "--" + variable.lower().replace("_", "-")
