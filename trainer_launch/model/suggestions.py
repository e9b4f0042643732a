"""Typos: the known name that was probably meant (or cut short), and which of Python's exceptions tell one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

_MAX_CHARS = 80  # of what is compared
_CHARS_PER_TYPO = 4
_MAX_TYPOS = 3
_LEAST_START = 3  # letters that begin one name only


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The one name that `word` misspells, or the only one that it begins."""
    names = [name for name in dict.fromkeys(known) if name != word]
    typed = _plain(word)
    typos = {name: _typos(typed, _plain(name)) for name in names}
    close = [name for name in names if typos[name] <= _allowed(typed, _plain(name))]
    if close:
        return min(close, key=lambda name: typos[name])
    for start in (typed, typed[:-1]):  # --nproc, --nprocs
        longer = [name for name in names if len(start) >= _LEAST_START and _plain(name).startswith(start)]
        if len(longer) == 1:
            return longer[0]
    return None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The question for it, or nothing."""
    name = nearest(word, known)
    return "" if name is None else f"did you mean {name}?"


def _plain(name: str) -> str:
    return name[:_MAX_CHARS].lower().lstrip("-")


def _allowed(word: str, name: str) -> int:
    return min(_MAX_TYPOS, max(1, min(len(word), len(name)) // _CHARS_PER_TYPO)) if len(word) > 1 else 0


def _typos(word: str, name: str) -> int:
    """Letters added, left out, replaced or swapped with their neighbour (Damerau-Levenshtein distance)."""
    before: list[int] = []
    last = list(range(len(name) + 1))
    for at, letter in enumerate(word, 1):
        row = [at]
        for place, other in enumerate(name, 1):
            cost = min(last[place] + 1, row[-1] + 1, last[place - 1] + (letter != other))
            if at > 1 and place > 1 and letter == name[place - 2] and word[at - 2] == other:
                cost = min(cost, before[place - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]


# -- typos in a program, told by a Python exception's own words ---------------------------------

# A name, a module's attribute or a parameter that does not exist comes again at every start. Other AttributeErrors
# and TypeErrors tell of values, which a storage that is away for a while may leave out: 'NoneType' object has no.
TYPO_IN_PROGRAM = (
    r"(?:NameError: name '[^']*' is not defined\b"
    r"|AttributeError: (?:partially initialized )?module '[^']*' has no attribute '"
    r"|TypeError: [\w.<>]+\(\) (?:missing \d+ required (?:positional|keyword-only) argument"
    r"|got an unexpected keyword argument '|takes (?:from )?\d+ [\w ]{0,30}positional arguments? but ))"
)
_TYPO_IN_PROGRAM = re.compile(TYPO_IN_PROGRAM)


def is_typo_in_program(message: str) -> bool:
    """Whether an exception's type and text tell a typo."""
    return _TYPO_IN_PROGRAM.match(message) is not None
