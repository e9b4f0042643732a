"""The workers' output: whole prefixed lines, limits, readers that hang, defects of ours."""

from __future__ import annotations

import itertools
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import eventually
from trainer_launch.host.logs import PATIENCE_S
from trainer_launch.model import Destination
from trainer_launch.supervisor.output import CUT, LINE_BYTES, LineLimit, Output, PipeText, Stream, _Sink


def test_a_log_file_that_cannot_be_opened_leaves_no_descriptor(tmp_path: Path) -> None:
    output = Output()
    before = descriptors()
    with pytest.raises(FileNotFoundError):
        output.open("a", "a", {1: Destination(file=str(tmp_path / "out")), 2: Destination(file="/nowhere/x")})
    eventually(lambda: descriptors() <= before, f"the same descriptors as before: {before}")
    output.close(5.0)


def test_nobody_knows_which_lines_of_a_shared_pipe_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_launch.supervisor.output._same_file", lambda: True)
    output = Output(watched=True)
    ends = output.open("a", None)
    os.write(ends[2], b"step 4\ndata server is busy\n")
    for fd in {*ends.values()}:
        os.close(fd)
    assert output.close(30.0)
    assert output.last_errors("a") == ()
    assert output.last_lines("a") == ("step 4", "data server is busy")


def test_a_last_line_of_stdout_is_none_of_stderr() -> None:
    output = Output()
    ends = output.open("a", "a")
    for stream, text in ((2, b"warning\n"), (1, b"all is well\n")):
        os.write(ends[stream], text)
        os.close(ends[stream])
    assert output.close(30.0)
    assert output.last_errors("a") == ("warning",)


def test_the_last_words_of_a_process_that_has_ended_are_waited_for_where_their_reader_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer_launch.supervisor.output._CATCH_UP_S", 30.0)
    is_late, goes_on = threading.Event(), threading.Event()

    def is_busy(*_: object) -> None:
        is_late.set()
        assert goes_on.wait(30.0)

    output = Output(listener=is_busy)
    ends = output.open("a", "a")
    os.write(ends[2], b"step 4\n")
    assert is_late.wait(30.0)
    os.write(ends[2], b"ValueError: no luck\n")
    for fd in {*ends.values()}:
        os.close(fd)
    threading.Timer(0.02, goes_on.set).start()
    output.catch_up("a")
    assert output.last_lines("a") == ("step 4", "ValueError: no luck")
    assert output.close(30.0)


def test_words_that_never_come_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    is_late, goes_on = threading.Event(), threading.Event()
    slept: list[float] = []

    def is_busy(*_: object) -> None:
        is_late.set()
        assert goes_on.wait(30.0)

    output = Output(listener=is_busy)
    for name in "abc":
        ends = output.open(name, name)
        os.write(ends[2], b"step 4\n")
        for fd in {*ends.values()}:
            os.close(fd)
    assert is_late.wait(30.0)
    clock = itertools.count()
    monkeypatch.setattr("trainer_launch.supervisor.output.time.monotonic", lambda: next(clock) / 1000)
    monkeypatch.setattr("trainer_launch.supervisor.output.time.sleep", slept.append)
    output.catch_up("a")
    once = len(slept)
    for name in "abc":
        output.catch_up(name)
    assert 0 < once == len(slept)
    monkeypatch.undo()
    goes_on.set()
    assert output.close(30.0)


def descriptors() -> set[str]:
    """Those that are open now."""
    return set(os.listdir("/proc/self/fd"))


def defective(*_: object) -> bytes:
    """What a defect of ours does."""
    raise RuntimeError("a defect")


@pytest.mark.parametrize("where", ["sieve", "listener"])
def test_a_defect_of_the_launcher_loses_no_output_and_blocks_no_worker(
    where: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    output = Output(**{where: defective})  # type: ignore[arg-type]
    ends = output.open("a", "a")
    megabytes = 4 * b"x" * 1024 * 1024  # more than a pipe holds
    for fd in {*ends.values()}:
        os.write(fd, b"first\n")
        written = 0
        while written < len(megabytes):
            written += os.write(fd, megabytes[written:])
        os.write(fd, b"\nlast\n")
        os.close(fd)
    assert output.close(30.0)
    shown = capfd.readouterr()
    assert "last" in shown.err + shown.out
    assert (shown.err + shown.out).count("x") >= len(megabytes)
    assert "internal error" in caplog.text
    assert "RuntimeError: a defect" in caplog.text


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
    assert a.feed(b"10%\r") + b.feed(b"x\n") + a.feed(b"20%\r") == b"[a] 10%\r\n[b] x\n[a] 20%\r"


def test_the_end_completes_a_line():
    a, _ = pair()
    a.feed(b"last")
    assert a.flush(end=True) == b"[a] last\n"
    assert a.flush(end=True) == b""


@pytest.mark.parametrize("chunk", [1000, 32768])
def test_long_lines_are_cut_and_nothing_is_lost(chunk):
    a, _ = pair()
    line = b"x" * 1_000_000 + b"\nshort\n"
    out = b"".join(a.feed(line[i : i + chunk]) for i in range(0, len(line), chunk)) + a.flush(end=True)
    assert out.replace(CUT, b"").replace(b"[a] ", b"") == line
    assert max(map(len, out.split(b"\n"))) <= LINE_BYTES + chunk + len(b"[a] ") + len(CUT)


def test_the_errors_of_torchruns_workers_are_kept_with_its_report():
    output = Output()
    ends = output.open("a", "a")
    report = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n" + "  rank      : 0\n" * 90
    os.write(ends[2], b"ValueError: no luck\n" + b"    work.wait()\n" * 90 + report.encode())
    for fd in {*ends.values()}:
        os.close(fd)
    assert output.close(30.0)
    assert output.last_lines("a")[0] == "ValueError: no luck"


def test_the_last_lines_leave_out_old_states_of_a_progress_bar():
    a, _ = pair()
    a.feed(b"one\n\n 1%\r 2%\r 3%\ntwo\n")
    assert a.last_lines(3) == ("one", " 3%", "two")
    a.feed(b"y" * 20_000 + b"\n" + b"z\n" * 30)
    assert a.last_lines(2) == ("z", "z")


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
    clock.now_s = 101.5
    assert source.feed(b"6\n") == b"[0] ... 2 lines dropped (--output-limit 3)\n[0] 6\n"


def test_at_the_end_of_a_pipe_what_was_dropped_is_told_behind_its_last_line() -> None:
    source = PipeText(b"", Stream())
    source.limit = LineLimit(1, Clock())
    assert source.feed(b"1\n2\nno end") == b"1\n"
    assert source.flush(end=True) == b"no end\n... 1 line dropped (--output-limit 1)\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe that is full: its ends."""
    ends = os.pipe()
    os.set_blocking(ends[1], False)
    while select.select([], [ends[1]], [], 0)[1]:
        os.write(ends[1], b"y" * 4096)
    os.set_blocking(ends[1], True)
    yield ends
    for fd in ends:
        os.close(fd)


def test_of_all_lines_of_an_end_only_the_first_waits(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []

    def no_time_passes(_r: list[int], w: list[int], _x: list[int], timeout_s: float | None = None) -> object:
        waits.append(timeout_s)
        return select_now([], w, [], 0)

    select_now = select.select
    monkeypatch.setattr("trainer_launch.supervisor.output.select.select", no_time_passes)
    sink = _Sink(pipe[1], stream := Stream(), threading.Lock())
    text = PipeText(b"", stream)
    for _ in range(3):
        sink.put(lambda: text.feed(b"a line\n"), PATIENCE_S)
    assert waits == [PATIENCE_S, 0.0, 0.0]
    os.read(pipe[0], 1 << 20)
    for _ in range(2):
        sink.put(lambda: text.feed(b"it reads again\n"), PATIENCE_S)
    assert waits[3:] == [0.0, PATIENCE_S]
    assert os.read(pipe[0], 1 << 20) == 2 * b"it reads again\n"
