"""The launcher's own TORCHELASTIC_ERROR_FILE, written as torch's ErrorHandler writes torchrun's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_launch.supervisor.error_lines import hand_up, read_error_file

ERROR = {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "…", "timestamp": "1"}}}
_TORCHS = """
import sys
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler
ErrorHandler().dump_error_file(sys.argv[1], int(sys.argv[2]))
"""


@pytest.mark.torch
@pytest.mark.parametrize("error", [ERROR, {"message": "text", "timestamp": 1}, {"other": 1}], ids=str)
@pytest.mark.parametrize("code", [1, pytest.param(-9, marks=pytest.mark.long("tests/pytorch/test_error_file.py"))])
def test_it_has_what_torchruns_has(tmp_path: Path, error: dict[str, object], code: int) -> None:
    theirs, ours, workers = tmp_path / "theirs.json", tmp_path / "ours.json", tmp_path / "worker.json"
    workers.write_text(json.dumps(error))
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(theirs)}
    subprocess.run([sys.executable, "-c", _TORCHS, str(workers), str(code)], env=env, check=True, timeout=120)
    hand_up(str(workers), code, str(ours))
    assert ours.read_bytes() == theirs.read_bytes()


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
