"""Commands about the program itself: `completion`, `help` and `version`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any

from trainer_launch import __version__
from trainer_launch.commands import options
from trainer_launch.commands.options import Parsed
from trainer_launch.contracts import CONTRACTS
from trainer_launch.model.errors import UsageError

_PROGRAM = "trainer-launch"
_LOADS = {  # what a shell's start-up file holds
    "bash": "source <(trainer-launch completion bash)",
    "zsh": "source <(trainer-launch completion zsh)",
    "fish": "trainer-launch completion fish | source",
}


class Completion:
    """`completion`: print what a shell needs, which then asks this program at each TAB."""

    HELP = "print a completion script for bash, zsh or fish"
    USAGE = "bash|zsh|fish"
    EXAMPLES = f"""examples:
  {_LOADS["bash"]}     # in ~/.bashrc
  {_LOADS["zsh"]}      # in ~/.zshrc, after compinit
  {_LOADS["fish"]}      # in ~/.config/fish/config.fish
  trainer-launch completion bash >/etc/bash_completion.d/trainer-launch
"""

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        """What only `completion` knows."""
        parser.add_argument("shell", nargs="?", choices=tuple(_LOADS), metavar="SHELL", help=argparse.SUPPRESS)

    @staticmethod
    def main(parsed: Parsed) -> int:
        """The command.

        Raises:
            UsageError: no shell was named, or argcomplete is missing.
        """
        shell = parsed.flags["shell"]
        if shell is None:
            own = os.path.basename(os.environ.get("SHELL", ""))
            hint = f"for {own}: {_LOADS[own]}" if own in _LOADS else "see trainer-launch completion --help"
            raise UsageError(f"missing shell; expected {', '.join(_LOADS)}; {hint}")
        try:
            import argcomplete
        except ImportError:
            raise UsageError("completion needs argcomplete: pip install 'trainer-launch[local]'") from None
        sys.stdout.write(argcomplete.shellcode([_PROGRAM], shell=shell) + "\n")
        return 0


class Help:
    """`help`: print the help of a command, or of all."""

    HELP = "print the help of a command"
    USAGE = "[COMMAND]"
    EXAMPLES = """examples:
  trainer-launch help run
"""

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        """What only `help` knows."""
        parser.add_argument(
            "topic", nargs="?", choices=tuple(options.COMMANDS), metavar="COMMAND", help=argparse.SUPPRESS
        )

    @staticmethod
    def main(parsed: Parsed) -> int:
        """The command."""
        sys.stdout.write(options.help_of(_PROGRAM, parsed.flags["topic"]))
        return 0


class Version:
    """`version`: print the version, as `--version` does."""

    HELP = "print the version"
    USAGE = ""
    EXAMPLES = """examples:
  trainer-launch version
"""

    @staticmethod
    def main(_parsed: Parsed) -> int:
        """The command."""
        sys.stdout.write(f"trainer-launch {__version__}\n")
        return 0


COMMANDS: Mapping[str, Any] = {"completion": Completion, "help": Help, "version": Version}


def complete(line: str) -> None:
    """Answer the shell, which asks how `line` may go on; does not return."""
    import argcomplete

    typed = line.split()[1:]
    name = options.COMMAND_ALIASES.get(typed[0], typed[0]) if typed else ""
    is_chosen = name in options.COMMANDS and line.rpartition(typed[0])[2]
    parser = options.build(_PROGRAM, (name,) if is_chosen else tuple(options.COMMANDS))
    commands = next(one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    if is_chosen:
        commands.choices[typed[0]] = commands.choices[name]
    for command in commands.choices.values():
        for action in command._actions:
            action.completer = _completer(action)
    argcomplete.autocomplete(parser)


def _completer(action: argparse.Action) -> Any:
    from argcomplete.completers import ChoicesCompleter, FilesCompleter

    told = action.metavar if isinstance(action.metavar, str) else ""
    if "--contract" in action.option_strings:
        return ChoicesCompleter([one.name for one in CONTRACTS])
    if action.choices is not None:
        return ChoicesCompleter(action.choices)
    if "|" in told and told.islower():  # as settings that have choices are shown
        return ChoicesCompleter(told.split("|"))
    if action.option_strings and not any(word in told for word in ("PATH", "FILE", "DIR")):
        return ChoicesCompleter(())
    return FilesCompleter()  # also the words of the command to run
