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
