"""A limit of lines per second: so many are shown, and the rest are counted."""

from __future__ import annotations

from trainer_launch.supervisor.rate_limit import Flood


class Clock:
    """Time as the test has it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def told(flood: Flood, now_s: float | None) -> bytes:
    return b"".join(text for _, text in flood.told(now_s))


def test_a_limit_lets_so_many_lines_a_second_through_and_counts_the_rest() -> None:
    clock = Clock()
    flood = Flood(lines_per_s=3, clock=clock)
    shown_by = flood.filter(1, b"[0] ")
    assert shown_by is not None
    assert shown_by(b"1\n2\n") == b"1\n2\n"
    assert shown_by(b"3\n4\n5\n") == b"3\n"
    assert flood.due_s == 101.0
    clock.now_s = 101.5
    assert shown_by(b"6\n") == b"... 2 lines dropped (--output-limit 3)\n6\n"
    assert shown_by(b"7\n8\n9\n") == b"7\n8\n"
    assert told(flood, 102.4) == b""
    assert told(flood, 102.5) == b"[0] ... 1 line dropped (--output-limit 3)\n"
    assert flood.due_s is None


def test_what_has_dropped_no_line_is_not_looked_at_again_however_many_workers_there_have_been() -> None:
    clock = Clock()
    flood = Flood(lines_per_s=1, clock=clock)
    filters = [shown_by for _ in range(100) if (shown_by := flood.filter(1, b"[0] "))]
    assert [shown_by(b"%d\n" % n) for n, shown_by in enumerate(filters)] == [b"%d\n" % n for n in range(100)]
    assert flood._dropping == {}
    assert filters[3](b"again\n") == b""
    assert len(flood._dropping) == 1
    assert told(flood, 101.0) == b"[0] ... 1 line dropped (--output-limit 1)\n"
    assert flood._dropping == {}


def test_without_a_limit_no_line_is_looked_at() -> None:
    assert Flood(clock=Clock()).filter(1, b"[0] ") is None
