"""Slips of the pen in a Python program, told by an exception's own words. Pure.

A name, a module's attribute or a parameter that does not exist comes again at every start. Other AttributeErrors
and TypeErrors tell of values, which a storage that is away for a moment may leave out: `'NoneType' object has no`.
"""

from __future__ import annotations

import re

PATTERN = (
    r"(?:NameError: name '[^']*' is not defined\b"
    r"|AttributeError: (?:partially initialized )?module '[^']*' has no attribute '"
    r"|TypeError: [\w.<>]+\(\) (?:missing \d+ required (?:positional|keyword-only) argument"
    r"|got an unexpected keyword argument '|takes (?:from )?\d+ [\w ]{0,30}positional arguments? but ))"
)
_PATTERN = re.compile(PATTERN)


def is_slip(message: str) -> bool:
    """Whether an exception's type and text tell a slip."""
    return _PATTERN.match(message) is not None
