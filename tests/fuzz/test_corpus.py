"""Every input that fuzzing has kept: each ends as its target allows, and at once.

An input that has found a defect stays in `corpus/TARGET.jsonl` as `found-…`. `make fuzz` looks for more.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.fuzz import corpus
from tests.fuzz.registry import Target, targets

TARGETS = targets()
MOST_S = 10.0  # for one input, on a busy machine; nearly all take a millisecond
MOST_BYTES = 1_000_000  # of the whole corpus


@pytest.mark.parametrize("one", TARGETS.values(), ids=lambda one: one.name)
def test_whatever_a_parser_is_given_it_returns_or_says_in_one_sentence_why_not(one: Target) -> None:
    inputs = corpus.read(one.name)
    assert inputs
    for name, data in inputs.items():
        began_s = time.monotonic()
        try:
            one.run(data)
        except Exception as problem:
            raise AssertionError(f"{one.name}, {name}: {data[:200]!r}") from problem
        took_s = time.monotonic() - began_s
        assert took_s < MOST_S, f"{one.name}, {name} took {took_s:.1f} s"


def test_the_corpus_belongs_to_targets_and_is_small() -> None:
    assert set(corpus.targets()) <= TARGETS.keys()
    assert sum(len(data) for name in TARGETS for data in corpus.read(name).values()) < MOST_BYTES


def test_bytes_that_are_no_text_are_kept_with_the_name_that_they_were_given(tmp_path: Path) -> None:
    inputs = {"found-1": b"\xff\0", corpus.digest(b"a\n"): b"a\n"}
    corpus.write("some", inputs, tmp_path)
    assert corpus.read("some", tmp_path) == inputs
