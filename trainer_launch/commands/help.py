"""`help`: print the help of a command, or of all."""

from __future__ import annotations

import argparse
import sys

from trainer_launch.commands import options
from trainer_launch.commands.options import Parsed

HELP = "print the help of a command"
USAGE = "[COMMAND]"
EXAMPLES = """examples:
  trainer-launch help run
"""
_PROGRAM = "trainer-launch"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What only `help` knows."""
    parser.add_argument(
        "topic", nargs="?", choices=tuple(options.COMMANDS), metavar="COMMAND", help=argparse.SUPPRESS
    )


def main(parsed: Parsed) -> int:
    """The command."""
    sys.stdout.write(options.help_of(_PROGRAM, parsed.flags["topic"]))
    return 0
