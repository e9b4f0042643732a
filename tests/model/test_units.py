"""Numbers with their nouns, as people write them."""

from __future__ import annotations

from trainer_launch.model.units import all_of, counted


def test_a_noun_agrees_with_its_number() -> None:
    assert [counted(number, "restart") for number in (0, 1, 2)] == ["0 restarts", "1 restart", "2 restarts"]
    assert [counted(number, "process") for number in (1, 3)] == ["1 process", "3 processes"]


def test_all_of_one_is_the_only_one() -> None:
    assert [all_of(number, "host") for number in (1, 3)] == ["the only host", "all 3 hosts"]
