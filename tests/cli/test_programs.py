"""Why a program cannot run, and what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer_launch.model.errors import NotRunnableError
from trainer_launch.planning import reading

PATH = os.environ.get("PATH")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs of all kinds in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noext").write_text("print('here')\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "w.sh").write_text("#!/bin/sh\necho\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("empty", "install it, or give"),
        ("./empty", "is a directory; name a program in it, or write: python ./empty"),
        ("./noext", "run chmod +x on it, or write: python ./noext"),
        ("./w.sh", "is not executable for this user; run chmod +x on it"),
        ("w.sh", "the working directory has it: write ./w.sh"),
        ("tru", "install it, or give"),
        ("/gone/x", "does not exist"),
    ],
)
def test_why_a_program_cannot_run_is_said_with_what_to_do(folder: Path, name: str, said: str) -> None:
    with pytest.raises(NotRunnableError) as refused:
        reading.check_command(reading.recognise((name,), PATH), PATH)
    assert said in str(refused.value)
