"""A reader of our output that hangs is waited for once, and heard again when it reads again."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator

import pytest

from trainer_launch.host.logs import PATIENCE_S
from trainer_launch.supervisor.output import PipeText, Stream, _Sink


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
