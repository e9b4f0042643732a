"""The event log: its vocabulary, lines that every reader takes, in order, whole, and felt by nobody."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_launch.host import runtime_directory
from trainer_launch.model import Failure, Outcome, Verdict, codec
from trainer_launch.observability import event_log
from trainer_launch.observability.event_log import EventLog, File
from trainer_launch.observability.progress import Progress
from trainer_launch.supervisor import outcome


def test_the_last_line_has_the_outcome() -> None:
    failure = Failure(reason="WorkerFailed", message="rank 3 died", exit_code=9, rank=3, node_rank=1, host="pod-1")
    line = event_log.events_line(
        0.0, 1, event_log.of_outcome(Outcome(verdict=Verdict.FAILED, failure=failure, took_s=1.5))
    )
    values = json.loads(line)
    assert values["time"] == "1970-01-01T00:00:00.000Z"
    for name, value in {"event": "finished", "node": 1, "exit_code": 9, "rank": 3, "failed_node": 1}.items():
        assert values[name] == value


@pytest.mark.parametrize("again", [True, False])
def test_whether_to_try_again_is_told_as_in_the_termination_message(again: bool) -> None:
    for code in (1, 138):
        failure = Failure(reason="x", message="x", exit_code=code, again=again)
        ended = Outcome(verdict=Verdict.FAILED, failure=failure, took_s=1.5)
        assert dict(event_log.of_outcome(ended)[1])["retryable"] is again
        assert f"retryable={again}".lower() in outcome.summary(ended)


@pytest.mark.parametrize("secret", ["hf_abcdefghijklmnopqrst", "https://me:hunter2@host/x", "--token=abcdef"])
def test_no_line_has_what_looks_like_a_secret(secret: str) -> None:
    shown = event_log.events_line(
        0.0, 0, ("started", {"command": ("train", secret), "text": f"ran {secret}"})
    ).decode()
    assert secret not in shown
    assert "[redacted]" in shown


VALUES = st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.lists(st.text()).map(tuple))
METRICS = st.dictionaries(st.text(min_size=1, max_size=64), st.floats(), max_size=256)


@given(st.dictionaries(st.text(max_size=20), VALUES, max_size=8), METRICS)
def test_a_line_is_one_line_of_strict_json_and_fits_a_pipes_atomic_write(values, metrics) -> None:
    line = event_log.events_line(1.5, None, ("progress", {**values, "metrics": metrics}))
    assert len(line) <= 4096
    assert line.count(b"\n") == 1
    json.loads(line, parse_constant=pytest.fail)


def test_the_longest_texts_are_cut_and_say_so() -> None:
    texts = dict.fromkeys("abcdef", "😀" * 5000)
    line = event_log.events_line(0.0, 0, ("finished", texts))
    assert len(line) <= 4096
    assert json.loads(line)["is_cut"] is True


def test_the_agents_news_are_taken_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / runtime_directory.NEWS
    tail = event_log.Tail(str(tmp_path))
    assert tail.read() == []
    formed = {"time_s": 5.0, "event": "generation_formed", "generation": 2, "nodes": 3, "restarts": 1}
    whole = json.dumps(formed).encode() + b"\n"
    path.write_bytes(whole + b"garbage\n" + whole[:10])
    assert [one.event[0] for one in tail.read()] == ["generation_formed"]
    with path.open("ab") as file:
        file.write(whole[10:] + b'{"time_s": 6, "event": "workers_started", "workers": 4, "first_rank": 0}\n')
    assert [one.time_s for one in tail.read()] == [5.0, 6.0]
    assert tail.read() == []
    assert event_log.standing(str(tmp_path)) == event_log.Standing(generation=2, nodes=3, restarts=1, workers=4)
    assert event_log.standing("/nonexistent") == event_log.Standing()


def report_of(folder: Path, local_rank: int, rank: int | None, step: int) -> None:
    """A worker's report, made at a time that its step tells."""
    told = Progress(
        rank=rank, local_rank=local_rank, pid=1, at_s=float(step), time_s=5.0, step=step, progress=None, eta_s=None,
        metrics={},
    )  # fmt: skip
    Path(runtime_directory.progress_file(str(folder), local_rank)).write_bytes(codec.encode(told, 10_000))


def started(folder: Path, first_rank: int, workers: int) -> None:
    runtime_directory.tell(str(folder), "workers_started", first_rank=first_rank, workers=workers)


def shown(folder: Path) -> list[tuple[int | None, int | None]]:
    """Rank and step of each report."""
    return [(report.rank, report.step) for report in event_log.reports(str(folder))]


def test_reports_of_ranks_that_the_node_no_longer_has_are_gone(tmp_path: Path) -> None:
    report_of(tmp_path, 0, 2, 100)
    report_of(tmp_path, 1, 3, 100)
    assert shown(tmp_path) == [(2, 100), (3, 100)], "no worker group tells its ranks: all count"
    started(tmp_path, 2, 2)
    assert shown(tmp_path) == [(2, 100), (3, 100)]
    started(tmp_path, 1, 2)
    assert shown(tmp_path) == [(2, 100)], "what rank 2 did last is still so, though another process begins it"
    report_of(tmp_path, 1, 2, 101)
    assert shown(tmp_path) == [(2, 101)], "one series for each rank"
    started(tmp_path, 4, 1)
    assert shown(tmp_path) == [], "rank 0 is elsewhere now, and these do not report"


def test_a_program_without_a_rank_is_the_nodes_own(tmp_path: Path) -> None:
    started(tmp_path, 4, 1)
    report_of(tmp_path, 0, None, 7)
    assert shown(tmp_path) == [(None, 7)]


@pytest.mark.parametrize(
    "line",
    [
        b"1",
        b"{}",
        b'{"event":"exited","time_s":"x"}',
        b'{"event":["exited"],"time_s":1}',
        b'{"event":"exited","time_s":1e300}',
        b'{"event":"exited","time_s":1,"x":{}}',
        b"[" * 50_000,
        b"\xff",
    ],
)
def test_what_is_no_news_is_left_out(tmp_path: Path, line: bytes) -> None:
    (tmp_path / runtime_directory.NEWS).write_bytes(line + b"\n")
    assert event_log.Tail(str(tmp_path)).read() == []


def names(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


def test_what_was_left_in_the_folder_comes_before_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "events"
    file = File(str(path))
    events = EventLog(file.write, 0, str(tmp_path))
    runtime_directory.tell(str(tmp_path), "worker_failed")
    for name in ("started", "spawned", "exited"):
        events.add((name, {}))
    events.end(10.0, ("finished", {}))
    file.close()
    assert names(path) == ["started", "spawned", "exited", "worker_failed", "finished"]


def test_a_fifo_whose_reader_hangs_or_goes_stops_nobody(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = File(str(path))
    for _ in range(50):
        file.write(b"x" * 4095 + b"\n")
    os.close(reader)
    file.write(b"x\n")
    file.close()


def test_a_writer_that_hangs_is_left_behind(tmp_path: Path) -> None:
    hang = threading.Event()

    def write(line: bytes) -> None:
        hang.wait(30)

    events = EventLog(write, 0, str(tmp_path))
    started_s = time.monotonic()
    for _ in range(1000):
        events.add(("started", {}))
    events.end(0.2, ("finished", {}))
    assert time.monotonic() - started_s < 10
    hang.set()
    events.end(10.0)
