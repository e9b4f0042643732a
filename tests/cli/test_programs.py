"""What runs as Python although it is not called *.py, as with python and torchrun; and why a program cannot run."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from tests.cli.launching import launch
from trainer_launch.model.errors import NotRunnableError
from trainer_launch.planning import programs
from trainer_launch.planning.command import Kind, parse_command

SOURCE = "import sys\nprint('here', sys.argv)\n"
PATH = os.environ.get("PATH")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs of all kinds in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noext").write_text(SOURCE)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(SOURCE)
    (tmp_path / "empty").mkdir()
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", SOURCE)
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data.txt", "1")
    (tmp_path / "users").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (tmp_path / "w.sh").write_text("#!/bin/sh\necho\n")
    (tmp_path / "shebang").write_text("#!/usr/bin/env python3\nprint 1\n")
    (tmp_path / "run").write_text(SOURCE)
    (tmp_path / "run").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("name", ["noext", "./noext", "app", "app/", "app.zip", "shebang"])
def test_what_python_can_run_is_a_script(folder: Path, name: str) -> None:
    command = programs.recognise((name, "x"), PATH)
    assert (command.kind, command.program) == (Kind.SCRIPT, (name, "x"))
    programs.check(command, PATH)


@pytest.mark.parametrize("name", ["empty", "data.zip", "users", "w.sh", "./run", "true", "gone", "no\0name"])
def test_what_is_a_program_or_nothing_that_runs_is_no_script(folder: Path, name: str) -> None:
    assert programs.recognise((name, "x"), PATH).kind is Kind.PROGRAM


@pytest.mark.process
@pytest.mark.parametrize("name", ["noext", "app", "app.zip"])
def test_it_runs_as_python_runs_it(folder: Path, name: str) -> None:
    ended = launch("run", "--", name, "x", cwd=folder)
    assert (ended.returncode, ended.stdout) == (0, f"here ['{name}', 'x']\n"), ended.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("empty", "install it in the image"),
        ("./empty", "directory without __main__.py"),
        ("./w.sh", "is not executable for this user; run chmod +x on it"),
        ("w.sh", "the working directory has it: write ./w.sh"),
        ("tru", "install it in the image"),
        ("/gone/x", "does not exist"),
    ],
)
def test_why_a_program_cannot_run_is_said_with_what_to_do(folder: Path, name: str, said: str) -> None:
    with pytest.raises(NotRunnableError) as refused:
        programs.check(programs.recognise((name,), PATH), PATH)
    assert said in str(refused.value)


def test_a_program_is_suggested_only_where_it_is_installed(folder: Path) -> None:
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").touch(mode=0o755)
    said = {}
    for name in ("pyton3", "accelerate", "torchrum"):
        with pytest.raises(NotRunnableError) as refused:
            programs.check(parse_command((name,)), str(folder / "bin"))
        said[name] = str(refused.value)
    assert "did you mean python3?" in said["pyton3"]
    assert "did you mean" not in said["accelerate"] + said["torchrum"]
