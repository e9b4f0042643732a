"""`completion`: print what a shell needs to complete our command lines; `shells` has the shells' own languages."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator

from trainer_launch.commands import options, shell_completions
from trainer_launch.commands.options import Parsed, build, is_wrapping
from trainer_launch.commands.shell_completions import Flag, Takes
from trainer_launch.contracts import CONTRACTS
from trainer_launch.model.errors import UsageError

HELP = "print a completion script for bash, zsh or fish"
USAGE = "bash|zsh|fish"
_LOADS = {  # what a shell's start-up file holds
    "bash": "source <(trainer-launch completion bash)",
    "zsh": "source <(trainer-launch completion zsh)",
    "fish": "trainer-launch completion fish | source",
}
EXAMPLES = f"""examples:
  {_LOADS["bash"]}     # in ~/.bashrc
  {_LOADS["zsh"]}      # in ~/.zshrc, after compinit
  {_LOADS["fish"]}      # in ~/.config/fish/config.fish
  trainer-launch completion bash >/etc/bash_completion.d/trainer-launch
"""
_PROGRAM = "trainer-launch"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What only `completion` knows."""
    parser.add_argument(
        "shell", nargs="?", choices=tuple(shell_completions.SHELLS), metavar="SHELL", help=argparse.SUPPRESS
    )


def main(parsed: Parsed) -> int:
    """The command.

    Raises:
        UsageError: no shell was named.
    """
    shell = parsed.flags["shell"]
    if shell is None:
        raise UsageError(_missing(os.environ.get("SHELL", "")))
    sys.stdout.write(shell_completions.SHELLS[shell](list(_commands())))
    return 0


def _missing(shell: str) -> str:
    """What to type, in the shell that a person has."""
    own = os.path.basename(shell)
    line = _LOADS.get(own)
    hint = f"for {own}: {line}" if line else "see trainer-launch completion --help"
    return f"missing shell; expected {', '.join(shell_completions.SHELLS)}; {hint}"


def _commands() -> Iterator[shell_completions.Command]:
    """Each command with its flags, as the parser itself has them."""
    parser = build(_PROGRAM, tuple(options.COMMANDS))
    subparsers = next(one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    for told in subparsers._choices_actions:
        actions = subparsers.choices[told.dest]._actions
        flags = tuple(_flag(action) for action in actions if action.option_strings)
        named = next((tuple(one.choices) for one in actions if one.choices and not one.option_strings), ())
        yield shell_completions.Command(
            name=told.dest,
            told=told.help or "",
            flags=flags,
            words=named,
            is_wrapping=is_wrapping(told.dest),
        )


def _flag(action: argparse.Action) -> Flag:
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    told = (action.help or "").replace("%%", "%").partition(" [TRAINER_LAUNCH_")[0]
    names = tuple(action.option_strings)
    if action.nargs == 0:
        return Flag(names=names, told=told, takes=Takes.NOTHING)
    if "--contract" in names:
        return Flag(names=names, told=told, takes=Takes.WORDS, words=tuple(one.NAME for one in CONTRACTS))
    if "|" in metavar and metavar.islower():  # as settings that have choices are shown
        return Flag(names=names, told=told, takes=Takes.WORDS, words=tuple(metavar.split("|")))
    takes = Takes.FILE if any(word in metavar for word in ("PATH", "FILE", "DIR")) else Takes.VALUE
    return Flag(names=names, told=told, takes=takes)
