"""The launcher's own words: one set-up, one format, on stderr."""

from __future__ import annotations

import logging
import sys

NAME = "trainer_launch"


def set_up(level: str, node: str | None = None) -> None:
    """Send our messages to stderr, each line marked as the launcher's; `node` tells whose in a rehearsal."""
    handler = logging.StreamHandler(sys.stderr)
    mark = "trainer-launch" if node is None else f"trainer-launch {node}"
    handler.setFormatter(logging.Formatter(f"[{mark}] %(message)s"))
    logger = logging.getLogger(NAME)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def warn(sentence: str) -> None:
    """Say one sentence that someone should act on."""
    logging.getLogger(NAME).warning("%s", sentence)
