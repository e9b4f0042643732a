"""A name is suggested for a typo or a name cut short, and never for a mere resemblance."""

from __future__ import annotations

import pytest

from trainer_launch.commands.options import COMMANDS
from trainer_launch.contracts import CONTRACTS
from trainer_launch.model.settings import Settings, flag_of
from trainer_launch.model.suggestions import did_you_mean, nearest

FLAGS = [flag_of(name) for name in Settings.model_fields]


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("--nprocs", FLAGS, "--nproc-per-node"),
        ("--nproc_per_node", FLAGS, "--nproc-per-node"),
        ("--graze", FLAGS, "--grace"),
        ("--max-restart", FLAGS, "--max-restarts"),
        ("reh", COMMANDS, "rehearse"),
        ("prefligth", COMMANDS, "preflight"),
        ("trainer-v2-troch", [one.name for one in CONTRACTS], "trainer-v2-torch"),
        ("KIL", ["oom", "kill"], "kill"),
    ],
)
def test_a_near_miss_is_suggested(word: str, known: list[str], meant: str) -> None:
    assert nearest(word, known) == meant
    assert did_you_mean(word, known) == f"did you mean {meant}?"


@pytest.mark.parametrize(
    ("word", "known"),
    [
        ("absent", ["syntax", "train"]),
        ("--walk", FLAGS),
        ("", COMMANDS),
        ("accelerate", ["accelerate"]),
        ("train", ["trace", "brain3"]),
        ("no", ["node", "nodes"]),
        ("a" * 10_000_000, FLAGS),
    ],
)
def test_what_is_not_near_is_not_suggested(word: str, known: list[str]) -> None:
    assert nearest(word, known) is None
    assert did_you_mean(word, known) == ""
