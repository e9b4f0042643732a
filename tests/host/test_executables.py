"""Why a file cannot be executed: told only where that is sure, with what to do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from trainer_launch.host import executables
from trainer_launch.model import Process
from trainer_launch.supervisor import system

PATH = os.environ.get("PATH")


def program(folder: Path, content: bytes) -> str:
    path = folder / "program"
    path.write_bytes(content)
    path.chmod(0o755)
    return str(path)


def ends(path: str, env: dict[str, str] | None = None) -> str:
    """Why it is not started, as the launcher tells it; "": it was."""
    process = Process(name="main", argv=(path,), env=env or dict(os.environ))
    try:
        subprocess.run([path], env=dict(process.env), capture_output=True, check=True, timeout=60)
    except OSError as error:
        return str(system.why(process, error))
    except subprocess.CalledProcessError as error:  # of /usr/bin/env
        return executables.obstacle(path, process.env.get("PATH")) or str(error)
    return ""


@pytest.mark.process
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            b"#!/bin/sh\r\necho\r\n",
            "its lines end as on Windows (CRLF), also the first: '#!/bin/sh\\r'; write: sed -i",
        ),
        (b"#!/usr/bin/env python3\r\n", "its lines end as on Windows (CRLF)"),
        (b"#!/no/such/python\n", "its interpreter does not exist: '#!/no/such/python'; install it in the image"),
        (b"#!/usr/bin/env no-such-python\n", "its interpreter 'no-such-python' was not found in PATH"),
    ],
)
def test_a_first_line_that_cannot_work_is_found_before_the_start(tmp_path: Path, content: bytes, says: str) -> None:
    path = program(tmp_path, content)
    assert says in str(executables.obstacle(path, PATH))
    assert ends(path), "and it is true"


@pytest.mark.process
@pytest.mark.parametrize(
    "content",
    [
        b"#!/bin/sh\n# a comment\r\nexit 0\n",
        b"#! /bin/sh -e\nexit 0\n",
        b"#!/usr/bin/env -S sh -e\nexit 0\n",
        b"#!/usr/bin/env sh\nexit 0\n",
        Path("/bin/true").read_bytes(),
    ],
    ids=["CRLF below", "an option", "env -S", "env", "a binary"],
)
def test_what_runs_is_accused_of_nothing(tmp_path: Path, content: bytes) -> None:
    path = program(tmp_path, content)
    assert executables.obstacle(path, PATH) is None
    assert ends(path) == ""


@pytest.mark.process
def test_why_the_kernel_refused_a_file_is_said(tmp_path: Path) -> None:
    assert ends(program(tmp_path, b"echo hi\n")).endswith(
        f"no first line names its interpreter; add one, such as #!/bin/sh, or write: sh {tmp_path}/program"
    )
    assert ends(program(tmp_path, b"")).endswith("it is empty")
    other = bytearray(Path("/bin/true").read_bytes())
    number = 62 if os.uname().machine == "aarch64" else 183
    other[18:20] = number.to_bytes(2, "little")
    machine = "x86_64" if number == 62 else "aarch64"
    words = ends(program(tmp_path, bytes(other)))
    assert f"it is a program for {machine}, and this machine is {os.uname().machine}" in words


@pytest.mark.process
def test_a_binary_of_another_libc_is_told_by_the_loader_that_it_names(tmp_path: Path) -> None:
    binary = Path("/bin/true").read_bytes()
    loader = executables.loader_of(program(tmp_path, binary))
    assert os.path.exists(loader)
    foreign = binary.replace(loader.encode(), loader[:-1].encode() + b"9", 1)
    assert f"its dynamic loader {loader[:-1]}9 does not exist" in ends(program(tmp_path, foreign))


NOT_THERE = FileNotFoundError(2, "No such file or directory")


def test_a_script_that_lies_here_but_not_in_path_is_not_said_to_lack_an_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    why = system.why(Process(name="main", argv=("train.py",), env={"PATH": "/bin"}), NOT_THERE)
    assert str(why) == "cannot run 'train.py' for main: not found in PATH (/bin)"
    assert why.exit_code == 127
