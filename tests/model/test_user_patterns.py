"""Regular expressions of users: what would hold a rehearsal up for ever is refused, what people write is taken."""

from __future__ import annotations

import time

import pytest

from trainer_launch.model.errors import UsageError
from trainer_launch.model.value_parsers import MAX_LINE, compiled_pattern
from trainer_launch.rehearsal.faults import grammar

ENDLESS = ("(a+)+$", "([a-z]+ ?)*:", "(a|aa)+b", "(a?){30}b", "((a*)b)*c", "(?=(a+)+)x", "(?i)(x+y)*z", "(a+){5}")
PLAIN = (
    "loss nan",
    r"loss [0-9]+\.[0-9]+ acc .*",
    r"[0-9]+(\.[0-9]+){3}",
    "(?:[0-9]{2}:){2}[0-9]{2}",
    "(error|warning): .*",
    "(ab)+",
    "[ab]+c*",
    "(?i)epoch 3",
    "é+",
)


@pytest.mark.parametrize("pattern", ENDLESS)
def test_a_pattern_that_might_take_for_ever_is_refused_in_one_sentence(pattern: str) -> None:
    assert compiled_pattern(pattern) is None
    with pytest.raises(UsageError, match=r"expected .* line:REGEX, .* without nested repeats"):
        grammar.parse(f"kill pod 'at=line:{pattern}'")


@pytest.mark.parametrize("pattern", PLAIN)
def test_what_people_look_for_is_taken(pattern: str) -> None:
    assert compiled_pattern(pattern) is not None
    assert grammar.parse(f"kill pod 'at=line:{pattern}'").when.line == pattern


@pytest.mark.parametrize("pattern", ["(", "a{99999999999}", "(" * 5000, "[", "\\", "(?P<x", "*"])
def test_what_is_no_pattern_is_none(pattern: str) -> None:
    assert compiled_pattern(pattern) is None


def test_two_open_repeats_are_looked_for_in_a_long_line_within_seconds() -> None:
    made = compiled_pattern(".*a.*b")
    assert made is not None
    began_s = time.monotonic()
    assert made.search(("a" * 10_000)[:MAX_LINE]) is None
    assert time.monotonic() - began_s < 10
