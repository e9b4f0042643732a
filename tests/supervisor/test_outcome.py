"""The exit code, the one line, the termination message."""

from __future__ import annotations

import os

import pytest
from msgspec.structs import replace

from trainer_launch.model import Failure, Outcome, Verdict
from trainer_launch.supervisor import outcome

FAILURE = Failure(
    reason="OutOfMemory",
    message="rank 11 ended with signal SIGKILL",
    exit_code=137,
    rank=11,
    node_rank=1,
    host="worker-1",
    signal=9,
    last_lines=("step 1", "step 2"),
    hint="raise the memory limit",
)
FAILED = Outcome(verdict=Verdict.FAILED, failure=FAILURE, took_s=12.34, attempt=3)


def with_lines(*lines):
    failure = Failure(reason="Failed", message="m", exit_code=1, last_lines=lines, hint="read it")
    return Outcome(verdict=Verdict.FAILED, failure=failure)


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (Outcome(verdict=Verdict.SUCCEEDED), 0),
        (Outcome(verdict=Verdict.STOPPED), 143),
        (FAILED, 137),
        (Outcome(verdict=Verdict.FAILED), 1),
    ],
)
def test_each_outcome_has_its_exit_code(ended, code):
    assert outcome.exit_code(ended) == code


def test_the_summary_can_be_read_alone():
    assert outcome.summary(FAILED) == (
        "reason=OutOfMemory rank=11 node=1 host=worker-1 signal=SIGKILL exit=137 attempt=3 retryable=true"
        " seconds=12.3"
        " | rank 11 ended with signal SIGKILL"
    )
    assert outcome.summary(Outcome(verdict=Verdict.SUCCEEDED, took_s=1)) == (
        "reason=Succeeded exit=0 attempt=1 seconds=1.0"
    )


def test_the_evidence_stands_before_what_to_do():
    failure = replace(FAILURE, evidence=("limit 1 GiB", "peak\n1 GiB"))
    words = outcome.termination_message(Outcome(verdict=Verdict.FAILED, failure=failure)).splitlines()
    assert words[-2:] == ["Evidence: limit 1 GiB; peak 1 GiB", "What to do: raise the memory limit"]


def test_whether_a_restart_helps_is_not_said_where_nobody_knows():
    failure = Failure(reason="Failed", message="rank 0 ended with exit code 1", exit_code=1)
    ended = Outcome(verdict=Verdict.FAILED, failure=failure)
    assert "retryable=" not in outcome.summary(ended)
    assert "retryable=true" in outcome.summary(replace(ended, failure=replace(failure, exit_code=138)))


def test_the_summary_is_one_line_whatever_the_message():
    failure = Failure(reason="Failed", message="a\nb\t" + "x" * 9000, exit_code=1)
    line = outcome.summary(Outcome(verdict=Verdict.FAILED, failure=failure))
    assert "\n" not in line
    assert "| a b x" in line
    assert len(line) <= 1024


def test_a_termination_message_holds_summary_lines_and_what_to_do():
    words = outcome.termination_message(FAILED).splitlines()
    assert words == [outcome.summary(FAILED), "step 1", "step 2", "What to do: raise the memory limit"]
    assert outcome.termination_message(Outcome(verdict=Verdict.SUCCEEDED)).count("\n") == 1


@pytest.mark.parametrize("line", ["x" * 200, "ü" * 300, "🙂" * 5000, "\udc80" * 100])
def test_a_termination_message_fits_and_keeps_the_latest_lines(line):
    text = outcome.termination_message(with_lines(*[f"{i} {line}" for i in range(100)]))
    assert len(text.encode()) <= 4096
    words = text.splitlines()
    assert words[0].startswith("reason=Failed")
    assert words[-2].startswith("99 ")
    assert words[-1] == "What to do: read it"


def test_what_the_platform_knows_is_added_and_what_the_agent_knows_stands():
    ended = outcome.placed(with_lines(), 3, "me")
    assert " node=3 host=me " in outcome.summary(ended)
    assert outcome.summary(outcome.placed(ended, 4, "other")) == outcome.summary(ended)


def test_a_refusal_has_the_same_first_line():
    words = "reason=Misconfigured host=pod-0 exit=2 retryable=false | no way\n"
    assert outcome.refusal("no\nway", 2, "pod-0") == words
    assert len(outcome.refusal("ä" * 9000, 2, "pod-0").encode()) <= 4096


def test_written_in_place(tmp_path):
    path = tmp_path / "log"
    path.write_text("something longer than the words")
    inode = path.stat().st_ino
    outcome.write_termination_message("words\n", str(path))
    assert (path.read_text(), path.stat().st_ino) == ("words\n", inode)


def test_the_default_file_is_made_by_kubelet_alone(tmp_path, caplog, monkeypatch):
    path = tmp_path / "log"
    outcome.write_termination_message("words", str(path))
    assert path.read_text() == "words"
    path.unlink()
    monkeypatch.setattr(outcome, "_DEFAULT", str(path))
    outcome.write_termination_message("words", str(path))
    assert not path.exists()
    assert not caplog.records


def test_a_place_that_cannot_be_written_is_one_line_in_the_log(tmp_path, caplog):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)  # nobody reads it: must not hang
    for path in (fifo, tmp_path, "/nowhere/at/all"):
        caplog.clear()
        outcome.write_termination_message("words", str(path))
        assert len(caplog.records) == 1
