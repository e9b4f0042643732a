"""What a process that cannot be started leaves behind: nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.waiting import eventually
from trainer_launch.model import Destination
from trainer_launch.supervisor.output import Output


@pytest.mark.parametrize("which", ["file", "copy"])
def test_a_log_file_that_cannot_be_opened_leaves_no_descriptor(tmp_path: Path, which: str) -> None:
    output = Output()
    before = descriptors()
    good = Destination(file=str(tmp_path / "out"))
    bad = replace(Destination(file=str(tmp_path / "err")), **{which: "/nowhere/x"})  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        output.open("a", "a", {1: good, 2: bad})
    eventually(lambda: descriptors() <= before, f"the same descriptors as before: {before}")
    output.close(5.0)


def descriptors() -> set[str]:
    """Those that are open now."""
    return set(os.listdir("/proc/self/fd"))
