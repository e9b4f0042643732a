"""`version`: print the version, as `--version` does."""

from __future__ import annotations

import argparse
import sys

from trainer_launch import __version__
from trainer_launch.commands.options import Parsed

HELP = "print the version"
USAGE = ""
EXAMPLES = """examples:
  trainer-launch version
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Nothing that only `version` knows."""


def main(_parsed: Parsed) -> int:
    """The command."""
    sys.stdout.write(f"trainer-launch {__version__}\n")
    return 0
