"""Why a process could not be started: what is missing is named, and nothing that is there is called missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_launch.model import Process
from trainer_launch.supervisor import system

NOT_THERE = FileNotFoundError(2, "No such file or directory")


def test_a_script_that_lies_here_but_not_in_path_is_not_said_to_lack_an_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    why = system.why(Process(name="main", argv=("train.py",), env={"PATH": "/bin"}), NOT_THERE)
    assert str(why) == "cannot run 'train.py' for main: not found in PATH (/bin)"
    assert why.exit_code == 127


def test_an_interpreter_that_does_not_exist_is_named(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/python\n")
    why = system.why(Process(name="main", argv=(str(program),), env={}), NOT_THERE)
    assert "its interpreter does not exist: '#!/no/such/python'" in str(why)
    assert why.exit_code == 126
