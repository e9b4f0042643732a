"""torch's error file of a worker: what a program leaves there, and what the launcher reads."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_launch.pytorch import error_file
from trainer_launch.supervisor.error_lines import message_in, read_error_file, read_own_error


@pytest.mark.parametrize("what", ["fifo", "device", "huge"])
def test_what_a_worker_puts_in_place_of_its_error_file_neither_blocks_nor_fills_the_launcher(
    tmp_path: Path, what: str
) -> None:
    path = tmp_path / "error.json"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    assert read_error_file(str(path)) == {}


_LEAKS = """
import os, resource
from trainer_launch.pytorch import error_file
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
kept = []
try:
    while True:
        kept.append(os.dup(2))
except OSError as problem:
    error_file.leave_exception(problem)
"""


def test_a_program_that_has_no_descriptors_left_leaves_its_error_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}
    subprocess.run([sys.executable, "-c", _LEAKS], env=env, check=True, timeout=120)
    assert json.loads(path.read_text())["message"]["message"] == "OSError: [Errno 24] Too many open files"


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ValueError("bad batch: " + "x" * 2_000_000), "ValueError: bad batch: xxx"),
        (AssertionError(), "AssertionError: test_error_file.py, line "),
        (struct.error("unpack requires 8 bytes"), "struct.error: unpack requires 8 bytes"),
    ],
    ids=["a long one", "one without words", "one whose name says nothing"],
)
def test_an_exception_is_told_however_much_or_little_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, told: str
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    with pytest.raises(type(raised)) as caught:
        raise raised
    error_file.leave_exception(caught.value)
    assert (message_in(read_error_file(str(path))) or "").startswith(told)


FAILED = subprocess.CalledProcessError(1, ["torchrun", "eval.py"])


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (KeyError("step"), "KeyError: 'step'"),
        (FAILED, f"CalledProcessError: {FAILED} (from ValueError: bad shard)"),
    ],
    ids=["another error", "that of the command"],
)
def test_what_a_torchrun_has_left_that_a_worker_has_started_is_not_the_workers_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, told: str
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    message = {"message": "ValueError: bad shard", "extraInfo": {"py_callstack": "", "timestamp": "1"}}
    path.write_text(json.dumps({"message": message}))
    assert message_in(read_own_error(str(path))) == "ValueError: bad shard", "@record in the worker has left it"
    path.write_text(json.dumps({"message": {**message, "errorCode": 1}}))
    assert read_own_error(str(path)) == {}
    error_file.leave_exception(raised)
    assert message_in(read_own_error(str(path))) == told
    error_file.leave("<NONE>", "", 3)
    assert message_in(read_own_error(str(path))) == told, "the first that it leaves counts"
