"""Typos: the known name that was probably meant (or cut short), and which of Python's exceptions tell one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

_MAX_CHARS = 80  # of what is compared
_SURELY = 0.75  # of difflib's ratio: graze and grace have 0.8, train and brain3 0.73
_LEAST_START = 3  # letters that begin one name only


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The one name that `word` misspells, or the only one that it begins."""
    names = [name for name in dict.fromkeys(candidates) if name != word]
    import difflib  # only who has mistyped needs it

    typed, plain = _plain(word), {_plain(name): name for name in reversed(names)}
    for near in difflib.get_close_matches(typed, plain, n=1, cutoff=_SURELY):
        return plain[near]
    for start in (typed, typed[:-1]):  # --nproc, --nprocs
        longer = [name for name in names if len(start) >= _LEAST_START and _plain(name).startswith(start)]
        if len(longer) == 1:
            return longer[0]
    return None


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """The question for it, or nothing."""
    name = nearest(word, candidates)
    return "" if name is None else f"did you mean {name}?"


def _plain(name: str) -> str:
    return name[:_MAX_CHARS].lower().lstrip("-")


# A name, a module's attribute or a parameter that does not exist comes again at every start. Other AttributeErrors
# and TypeErrors tell of values, which a storage that is away for a while may leave out: 'NoneType' object has no.
# Nor is it the program's code where `eval` or `exec` of data raises it: <string> is named then.
TYPO_IN_PROGRAM = (
    r"(?![^\n]*\(<[^()<>\n]*>, line \d+\))(?:NameError: name '[^']*' is not defined\b"
    r"|AttributeError: (?:partially initialized )?module '[^']*' has no attribute '"
    r"|TypeError: [\w.<>]+\(\) (?:missing \d+ required (?:positional|keyword-only) argument"
    r"|got an unexpected keyword argument '|takes (?:from )?\d+ [\w ]{0,30}positional arguments? but ))"
)
_TYPO_IN_PROGRAM = re.compile(TYPO_IN_PROGRAM)
# `ast.literal_eval`, `eval` and their like raise it of data, too, and name <unknown>, <string> or the data's file.
UNPARSABLE_CODE = r"(?:SyntaxError|IndentationError|TabError): .*\((?:[^()<>]+\.pyw?|[\w-]+), line \d+\)"
_UNPARSABLE_CODE = re.compile(UNPARSABLE_CODE)
# `python -m` prints it: no exception's name stands before it.
MISSING_PROGRAM = (
    r"\S{0,200}py[\w.]{0,20}: (?:Error while finding module specification for "
    r"|No module named \S+(?:; .{1,200} cannot be directly executed)?$)"
)
_MISSING_PROGRAM = re.compile(MISSING_PROGRAM)


def is_typo_in_program(message: str) -> bool:
    """Whether an exception's type and text tell a typo."""
    return _TYPO_IN_PROGRAM.match(message) is not None


def is_unparsable_code(message: str) -> bool:
    """Whether an exception's type and text tell that Python cannot parse a file of the program."""
    return _UNPARSABLE_CODE.match(message) is not None


def is_missing_program(message: str) -> bool:
    """Whether Python's last words tell that the module that it was to run is not there."""
    return _MISSING_PROGRAM.match(message) is not None
