"""Every input that fuzzing has kept, and what it begins with: each ends as its target allows, and at once.

An input that has found a defect stays as `corpus/TARGET/found-…`. `make fuzz` looks for more.
"""

from __future__ import annotations

import time

import pytest

from tests.fuzz import seeds
from tests.fuzz.registry import CORPUS, Target, targets

TARGETS = targets()
MOST_S = 10.0  # for one input, on a busy machine; nearly all take a millisecond
MOST_BYTES = 1_000_000  # of the whole corpus


@pytest.mark.parametrize("one", TARGETS.values(), ids=lambda one: one.name)
def test_whatever_a_parser_is_given_it_returns_or_says_in_one_sentence_why_not(one: Target) -> None:
    files = sorted((CORPUS / one.name).glob("*"))
    inputs = {f"seed {number}": seed for number, seed in enumerate(seeds.of(one.name))}
    inputs |= {str(file.relative_to(CORPUS)): file.read_bytes() for file in files}
    assert inputs, "neither a seed nor a corpus"
    for name, data in inputs.items():
        began_s = time.monotonic()
        try:
            one.run(data)
        except Exception as problem:
            raise AssertionError(f"{name}: {data[:200]!r}") from problem
        took_s = time.monotonic() - began_s
        assert took_s < MOST_S, f"{name} took {took_s:.1f} s"


def test_the_corpus_belongs_to_targets_and_is_small() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} <= TARGETS.keys()
    assert sum(file.stat().st_size for file in CORPUS.glob("*/*")) < MOST_BYTES
