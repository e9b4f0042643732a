"""Which steps come after a kill, whatever the ranks do with their numbers; what is no recovery has no figures."""

from __future__ import annotations

import pytest

from benchmarks import keeping_state
from benchmarks.keeping_state import Line, lines_after

BEFORE = [Line(9.9, rank, 14, 100 + rank, "0") for rank in range(3)]


@pytest.mark.parametrize(
    ("lines", "after"),
    [
        ([Line(10.001, 1, 14, 101, "0"), Line(10.2, 1, 15, 101, "0")], [15]),
        ([Line(10.001, 1, 14, 101, "0"), Line(12.0, 1, 11, 101, "1"), Line(12.0, 2, 11, 201, "1")], [11, 11]),
    ],
    ids=["a rank that writes late", "steps are done again by the next meeting"],
)
def test_the_steps_after_a_kill(lines: list[Line], after: list[int]) -> None:
    assert [line.step for line in lines_after([*BEFORE, *lines], 10.0, 15, 2)] == after


def test_ranks_that_do_not_come_back_have_no_peak_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping_state, "BACK_S", 0.0)
    assert keeping_state._peak_mb(lambda: False) == "never: not all ranks trained again within 0 s"
