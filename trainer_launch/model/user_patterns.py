"""Regular expressions that users write, made ready, or refused where looking for one might never end. Pure.

Python tries all ways in which a pattern may fit, and holds everything else up meanwhile, signals too. A repeat in a
repeat, such as `(a+)+`, has so many ways that a line of 40 characters is enough.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

EXPECTED = "a regular expression without repeats or choices in a repeat, as in (a+)+"
MAX_LINE = 500  # characters of a line to look in: .*a.*b takes the third power of them
_FEW = 4  # times that a part may come again, whatever is in it: [0-9]+(\.[0-9]+){3}
_parser: Any = importlib.import_module("sre_parse" if sys.version_info < (3, 11) else "re._parser")


def compiled(pattern: str) -> re.Pattern[str] | None:
    """It made ready; None when it is none, or might take for ever."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what a later Python may read differently
            made = re.compile(pattern)
            return None if _runs_away(_parser.parse(pattern)) else made
    except (re.error, OverflowError, RecursionError, ValueError):
        return None


def _runs_away(tree: Any, *, in_repeat: bool = False) -> bool:
    """Whether a part that may come often has parts that fit in more than one way."""
    for kind, value in tree:
        is_repeat = str(kind).endswith("REPEAT")
        if in_repeat and (str(kind) == "BRANCH" or (is_repeat and value[0] != value[1])):
            return True
        within = in_repeat or (is_repeat and value[1] > _FEW)
        if any(_runs_away(part, in_repeat=within) for part in _parts(value)):
            return True
    return False


def _parts(value: Any) -> Iterator[Any]:
    """The expressions in a node of Python's own parser."""
    if isinstance(value, _parser.SubPattern):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _parts(one)
