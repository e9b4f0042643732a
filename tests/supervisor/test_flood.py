"""A flood of lines: equal lines of many ranks are shown once with their number, and a limit counts the rest."""

from __future__ import annotations

import pytest

from trainer_launch.supervisor.rate_limit import BULK_BYTES, Flood, Source, Stream, is_summary


class Clock:
    """Time as the test has it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def told(flood: Flood, now_s: float | None) -> bytes:
    return b"".join(text for _, text in flood.told(now_s))


def test_the_same_line_of_eight_ranks_is_shown_once_and_then_with_its_number() -> None:
    clock = Clock()
    flood = Flood(clock=clock)
    filters = [flood.filter("agent", 1, rank, f"[0:{rank}] ".encode()) for rank in range(8)]
    shown = [shown_by(b"loading\n" + f"rank {rank}\n".encode()) for rank, shown_by in enumerate(filters)]
    assert shown == [b"loading\nrank 0\n", *[f"rank {rank}\n".encode() for rank in range(1, 8)]]
    assert flood.due_s == 101.0
    assert told(flood, 100.9) == b""
    assert told(flood, 101.0) == "[0:0] loading (\u00d7 8 ranks)\n".encode()
    assert flood.due_s is None


def test_a_line_that_a_rank_repeats_and_one_of_later_are_shown() -> None:
    clock = Clock()
    flood = Flood(clock=clock)
    one, two, _ = [flood.filter("agent", 1, rank, b"[x] ") for rank in range(3)]
    assert one(b"a\n") == b"a\n"
    assert one(b"a\n") == b"a\n"
    clock.now_s += 1
    assert two(b"a\n") == b"a\n"
    assert told(flood, None) == b"", "each was shown"


@pytest.mark.parametrize(("count", "prefix"), [(2, b"[x] "), (8, b"")])
def test_nothing_is_folded_of_two_ranks_nor_without_a_prefix_nor_across_streams(count: int, prefix: bytes) -> None:
    flood = Flood(clock=Clock())
    filters = [flood.filter("agent", 1, rank, prefix) for rank in range(count)]
    filters += [flood.filter("agent", 2, 0, prefix)]
    assert [shown_by(b"a\n\n") for shown_by in filters] == [b"a\n\n"] * len(filters)
    assert flood.told(None) == []


def test_bulk_output_is_not_folded() -> None:
    flood = Flood(clock=Clock())
    filters = [flood.filter("agent", 1, rank, b"[x] ") for rank in range(3)]
    bulk = b"x\n" * (BULK_BYTES // 2 + 1)
    assert [shown_by(bulk) for shown_by in filters] == [bulk] * 3
    assert flood.told(None) == []


def test_the_rest_of_a_line_whose_beginning_was_shown_is_not_folded() -> None:
    flood, stream = Flood(clock=Clock()), Stream()
    sources = [Source(b"[%d] " % rank, stream) for rank in range(3)]
    for rank, source in enumerate(sources):
        source.line_filter = flood.filter("agent", 1, rank, b"[%d] " % rank)
    assert sources[0].feed(b"done\n") == b"[0] done\n"
    assert sources[1].feed(b"saving ... ") + sources[1].flush() == b"[1] saving ... "
    assert sources[1].feed(b"done\ndone\n") == b"done\n"
    assert told(flood, None) == "[0] done (\u00d7 2 ranks)\n".encode()


@pytest.mark.parametrize(
    ("line", "expected"),
    [("[0:0] step 40 (\u00d7 8 ranks)", True), ("step 40 (\u00d7 8 ranks) done", False), ("step 40", False)],
)
def test_a_summary_is_told_by_its_end(line: str, expected: bool) -> None:
    assert is_summary(line) is expected


def test_a_limit_lets_so_many_lines_a_second_through_and_counts_the_rest() -> None:
    clock = Clock()
    flood = Flood(lines_per_s=3, clock=clock)
    shown_by = flood.filter("program", 1, None, b"[0] ")
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
    filters = [flood.filter("", 1, rank, b"[0] ") for rank in range(100)]
    assert [shown_by(b"%d\n" % n) for n, shown_by in enumerate(filters)] == [b"%d\n" % n for n in range(100)]
    assert flood._dropping == {}
    assert filters[3](b"again\n") == b""
    assert len(flood._dropping) == 1
    assert told(flood, 101.0) == b"[0] ... 1 line dropped (--output-limit 1)\n"
    assert flood._dropping == {}
