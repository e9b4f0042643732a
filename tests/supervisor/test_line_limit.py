"""A limit of lines per second: so many are shown, and the rest are counted."""

from __future__ import annotations

from trainer_launch.supervisor.output import LineLimit, PipeText, Stream


class Clock:
    """Time as the test has it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_limit_lets_so_many_lines_a_second_through_and_counts_the_rest() -> None:
    clock = Clock()
    source = PipeText(b"[0] ", Stream())
    source.limit = LineLimit(3, clock)
    assert source.feed(b"1\n2\n") == b"[0] 1\n[0] 2\n"
    assert source.feed(b"3\n4\n5\n") == b"[0] 3\n"
    assert source.due_s == 101.0
    clock.now_s = 101.5
    assert source.feed(b"6\n") == b"[0] ... 2 lines dropped (--output-limit 3)\n[0] 6\n"
    assert source.feed(b"7\n8\n9\n") == b"[0] 7\n[0] 8\n"
    clock.now_s = 102.4
    assert source.dropped() == b""
    clock.now_s = 102.5
    assert source.dropped() == b"[0] ... 1 line dropped (--output-limit 3)\n"
    assert source.due_s is None


def test_at_the_end_of_a_pipe_what_was_dropped_is_told_behind_its_last_line() -> None:
    source = PipeText(b"", Stream())
    source.limit = LineLimit(1, Clock())
    assert source.feed(b"1\n2\nno end") == b"1\n"
    assert source.flush(end=True) == b"no end\n... 1 line dropped (--output-limit 1)\n"
