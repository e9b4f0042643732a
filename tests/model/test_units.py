"""Numbers with their nouns, as people write them."""

from __future__ import annotations

import pytest

from trainer_launch.model.units import counted, in_units, numbers_in, spans


def test_a_noun_agrees_with_its_number() -> None:
    assert [counted(number, "restart") for number in (0, 1, 2)] == ["0 restarts", "1 restart", "2 restarts"]
    assert [counted(number, "process") for number in (1, 3)] == ["1 process", "3 processes"]


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (4096, "4 KiB"), (1_288_490_189, "1.2 GiB"), (1 << 44, "1.64e+04 GiB")]
)
def test_sizes_have_three_digits_and_a_unit_that_fits(size: int, text: str) -> None:
    assert in_units(size) == text


IRREGULAR = [n for n in range(4096) if n * n * n % 7 % 2]


@pytest.mark.parametrize(
    "numbers",
    [[], [3], [0, 1, 2, 5], [1, 3, 5], [*range(4096)], IRREGULAR, [0, 5, 7, 9, 11, 13, 14, 20, 21, 26, 27]],
)
def test_spans_are_read_as_they_are_written(numbers: list[int]) -> None:
    assert numbers_in(spans(numbers)) == numbers


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([0, 2, 4], "0,2,4"),
        ([*range(0, 4096, 2)], "0-4094:2"),
        ([*range(3, 4096, 8)], "3-4091:8"),
        ([*range(5, 16384, 2048)], "5-14341:2048"),
        ([first + n for first in range(0, 16384, 64) for n in range(8)], "0-16327:8/64"),
        ([0, *range(5, 15, 2), 100], "0,5-13:2,100"),
    ],
    ids=["few", "every second", "every eighth", "one of each stage", "blocks", "with others"],
)
def test_regular_groups_are_short_at_any_size(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text
    assert numbers_in(text) == numbers


@pytest.mark.parametrize("text", ["x", "1-", "-2", "1,,2", "1-x", "²", "1:2", "1-9:", "1-9:0", "1-9:/2", "1-9:2/0"])
def test_what_is_no_text_of_spans_has_no_numbers(text: str) -> None:
    assert numbers_in(text) == []


def test_a_text_of_many_wide_ranges_has_no_more_numbers_than_there_may_be_ranks():
    assert len(numbers_in(",".join(["0-1048575"] * 200))) == 1 << 20
    assert len(numbers_in(",".join(["0-1048575:2/3"] * 100))) == 2 << 16
