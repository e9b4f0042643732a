"""Flags of all commands, made from the settings, so that each is declared once and has its variable.

Everything after the first `--` is the command to run; without `--` it begins at the first word that is no option.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_launch import __version__, log, settings
from trainer_launch.commands.fields import ALIASES, COMMANDS, GROUPS, METAVARS
from trainer_launch.errors import UsageError
from trainer_launch.settings import PREFIX, Settings

_WIDTH = 78  # of what argparse does not wrap itself
_EXAMPLES = f"""examples:
  trainer-launch local --nodes 2 -- train.py     # on a laptop: rehearse the job
  trainer-launch local -f job.yaml               # or its manifest
  trainer-launch explain -- train.py             # in a pod: what would run
  trainer-launch run -- train.py --lr 1e-3       # and run it
  trainer-launch COMMAND --help                  # options and examples of each

Every setting is also a variable, which its help names:
{PREFIX}GRACE=60 is --grace 60. Flags win.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A command line, understood."""

    command: Callable[[Parsed], int]
    settings: Settings
    argv: tuple[str, ...]  # the command to run
    flags: Mapping[str, Any]  # what only one command knows, such as --json
    given: Mapping[str, Any]  # the settings that were typed


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors as ours."""

    def error(self, message: str) -> typing.NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def refuse_unknown(self, word: str) -> typing.NoReturn:
        """Say so of an option that this command does not have."""
        flag = word.partition("=")[0]
        known = [name for name in self._option_string_actions if name.startswith("--")]
        longer = [name for name in known if name.startswith(flag)]
        near = longer if len(longer) == 1 else difflib.get_close_matches(flag, known, n=1)
        raise UsageError(f"{self.prog} has no option {flag}; {_meant(near)}see {self.prog} --help")


def parse(program: str, argv: Sequence[str]) -> Parsed:
    """Understand a command line, with TRAINER_LAUNCH_* behind it.

    Raises:
        UsageError: a flag or variable does not fit.
    """
    try:
        return _parse(program, argv)
    except UsageError as problem:
        if argv[:1] in (["run"], ["preflight"], ["sshd"]):
            from trainer_launch.commands import running

            default = Settings.model_fields["termination_log"].default
            running.refuse(problem, os.environ.get(f"{PREFIX}TERMINATION_LOG") or default)
        raise


def _parse(program: str, argv: Sequence[str]) -> Parsed:
    command, given, words, flags = _typed(program, argv)
    loaded = settings.load(given)
    log.set_up(loaded.log_level, os.environ.get("TRAINER_LAUNCH_NODE_LABEL"))
    for sentence in settings.unknown_variables(os.environ):
        log.warn(sentence)
    return Parsed(command=command, settings=loaded, argv=words, flags=flags, given=given)


def typed(program: str, argv: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings that another container's command line of ours gives, and the command that it runs.

    Raises:
        UsageError: it is none.
    """
    _, given, words, _ = _typed(program, argv)
    return given, words


def _typed(
    program: str, argv: Sequence[str]
) -> tuple[Callable[[Parsed], int], dict[str, Any], tuple[str, ...], dict[str, Any]]:
    own, rest = _split(list(argv))
    called = tuple(name for name in COMMANDS if own[:1] == [name])
    if not called and not (own and own[0].startswith("-")):
        raise UsageError(_no_command(program, own))
    parser = build(program, called or tuple(COMMANDS))
    found, unknown = parser.parse_known_args(own)
    flags = vars(found)
    if unknown:
        flags.pop("parser", parser).refuse_unknown(unknown[0])
    del flags["parser"]
    command: Callable[[Parsed], int] = flags.pop("command")
    words: list[str] = flags.pop("words")
    if rest is not None and words:
        raise UsageError(f"{words[0]!r} stands before --; put options of {program} there, and the command after it")
    given = {name: flags.pop(name) for name in list(flags) if name in Settings.model_fields}
    given = {name: value for name, value in given.items() if value is not None}
    return command, given, tuple(words if rest is None else rest), flags


def build(program: str, names: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of these commands."""
    parser = _Parser(
        prog=program,
        description="Own a training pod: read what the platform injected, run it as PID 1,\nsay how it ended.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{program} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    for name in names:
        module = importlib.import_module(f"trainer_launch.commands.{name}")
        sub = commands.add_parser(
            name,
            help=module.HELP,
            description=textwrap.fill(module.HELP[0].upper() + module.HELP[1:] + ".", _WIDTH),
            epilog=module.EXAMPLES,
            usage=f"{program} {name} {getattr(module, 'USAGE', '[options] -- COMMAND [ARG ...]')}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_flags(sub)
        for title, fields in GROUPS.items():
            own = [field for field in fields if field in COMMANDS[name]]
            group = sub.add_argument_group(title) if own else sub
            for field in own:
                _add(group, field, Settings.model_fields[field])
        sub.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        sub.set_defaults(command=module.main, parser=sub)
    return parser


def _no_command(program: str, words: Sequence[str]) -> str:
    """What is wrong with a command line that begins with none of ours."""
    if not words:
        return f"which command? one of {', '.join(COMMANDS)}; see {program} --help"
    near = difflib.get_close_matches(words[0], COMMANDS, n=1)
    advice = _meant(near) or f"to run a program: {program} run -- {words[0]} …; "
    return f"{words[0]!r} is no command of {program}; {advice}see {program} --help"


def _meant(near: Sequence[str]) -> str:
    return f"is {near[0]} meant? Or " if near else ""


def _split(argv: list[str]) -> tuple[list[str], list[str] | None]:
    """Our own words, and those after the first `--`."""
    if "--" not in argv:
        return argv, None
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _add(parser: argparse._ActionsContainer, name: str, field: Any) -> None:
    """One setting as a flag; its value stays text, and the settings check it."""
    default = "" if field.default is None else f" (default {_shown(field.default)})"
    words: dict[str, Any] = {
        "default": None,
        "help": f"{field.description}{default} [{PREFIX}{name.upper()}]".replace("%", "%%"),
    }
    names = (settings.flag_of(name), *ALIASES.get(name, ()))
    if field.annotation is bool:
        parser.add_argument(*names, action=argparse.BooleanOptionalAction, **words)
        return
    choices = typing.get_args(field.annotation) if typing.get_origin(field.annotation) is typing.Literal else ()
    parser.add_argument(*names, metavar="|".join(choices) or METAVARS[name], **words)


def _shown(default: object) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default).lower()
