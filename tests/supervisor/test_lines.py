"""Bytes in, whole prefixed lines out."""

from __future__ import annotations

import pytest

from trainer_launch.supervisor.output import CUT, LINE_BYTES, PipeText, Stream


def pair():
    stream = Stream()
    return PipeText(b"[a] ", stream), PipeText(b"[b] ", stream)


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ([b"x\n"], b"[a] x\n"),
        ([b"x\ny\n"], b"[a] x\n[a] y\n"),
        ([b"\n\n"], b"[a] \n[a] \n"),
        ([b"x", b"y\nz", b"\n"], b"[a] xy\n[a] z\n"),
        ([b"x\r\ny\r\n"], b"[a] x\n[a] y\n"),
        ([b"1%\r2%\r"], b"[a] 1%\r[a] 2%\r"),
        ([b"x\r", b"\ny\n"], b"[a] x\r\n[a] y\n"),
        ([b"x\ry", b"\n"], b"[a] x\r[a] y\n"),
        ([b"\x00\xff\xfe\n"], b"[a] \x00\xff\xfe\n"),
        ([b"no end"], b""),
    ],
)
def test_each_line_of_a_source_gets_its_prefix(chunks, text):
    a, _ = pair()
    assert b"".join(a.feed(chunk) for chunk in chunks) == text


def test_a_partial_line_is_held_until_a_pause_then_goes_on_without_a_second_prefix():
    a, _ = pair()
    assert a.feed(b"name? ") == b""
    assert a.paused_in_line
    assert a.flush() == b"[a] name? "
    assert a.feed(b"bob\nnext\n") == b"bob\n[a] next\n"


def test_two_sources_never_share_a_line():
    a, b = pair()
    a.feed(b"half")
    assert a.flush() == b"[a] half"
    b.feed(b"prompt")
    assert not b.paused_in_line  # not while the other's line is open
    assert b.feed(b"\n") == b"\n[b] prompt\n"
    assert a.feed(b"rest\n") == b"[a] rest\n"
    assert a.feed(b"10%\r") + b.feed(b"x\n") + a.feed(b"\n20%\r") == b"[a] 10%\r\n[b] x\n[a] 20%\r"


def test_the_end_completes_a_line():
    a, _ = pair()
    a.feed(b"last")
    assert a.flush(end=True) == b"[a] last\n"
    assert a.flush(end=True) == b""


@pytest.mark.parametrize("chunk", [1000, 32768, 10**7])
def test_long_lines_are_cut_and_nothing_is_lost(chunk):
    a, _ = pair()
    line = b"x" * 1_000_000 + b"\nshort\n"
    out = b"".join(a.feed(line[i : i + chunk]) for i in range(0, len(line), chunk)) + a.flush(end=True)
    assert out.replace(CUT, b"").replace(b"[a] ", b"") == line
    assert max(map(len, out.split(b"\n"))) <= LINE_BYTES + len(b"[a] ") + len(CUT)
    assert out.count(CUT) == 1_000_000 // LINE_BYTES


def test_the_last_lines_leave_out_old_states_of_a_progress_bar():
    a, _ = pair()
    a.feed(b"one\n\n 1%\r 2%\r 3%\ntwo\n")
    assert a.last_lines(3) == ("one", " 3%", "two")
    a.feed(b"y" * 20_000 + b"\n" + b"z\n" * 30)
    assert a.last_lines(2) == ("z", "z")


def test_whole_lines_without_a_prefix():
    bare = PipeText(b"", Stream())
    assert bare.feed(b"x\ny") + bare.feed(b"\n") == b"x\ny\n"
