"""What a process that cannot be started leaves behind: nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.waiting import eventually
from trainer_launch.model import Destination
from trainer_launch.supervisor.output import Output


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
