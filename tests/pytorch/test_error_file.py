"""The launcher's own TORCHELASTIC_ERROR_FILE, written as torch's ErrorHandler writes torchrun's."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import require
from trainer_launch.pytorch import error_file
from trainer_launch.supervisor.error_lines import hand_up

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
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    theirs, ours, workers = tmp_path / "theirs.json", tmp_path / "ours.json", tmp_path / "worker.json"
    workers.write_text(json.dumps(error))
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(theirs)}
    subprocess.run([sys.executable, "-c", _TORCHS, str(workers), str(code)], env=env, check=True, timeout=120)
    hand_up(str(workers), code, str(ours))
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_file_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    own, workers = tmp_path / "own.json", tmp_path / "worker.json"
    own.write_text("an earlier run's, and longer than what comes now" * 100)
    workers.write_text(json.dumps(ERROR))
    hand_up(str(workers), 1, str(own))
    assert json.loads(own.read_text())["message"]["errorCode"] == 1


@pytest.mark.parametrize("text", [None, "", "[]", "no json"])
def test_a_worker_that_wrote_no_error_leaves_it_alone(tmp_path: Path, text: str | None) -> None:
    own, workers = tmp_path / "own.json", tmp_path / "worker.json"
    if text is not None:
        workers.write_text(text)
    hand_up(str(workers), 1, str(own))
    assert not own.exists()


def test_nobody_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "worker.json").write_text(json.dumps(ERROR))
    hand_up(str(tmp_path / "worker.json"), 1, None)
    assert [path.name for path in tmp_path.iterdir()] == ["worker.json"]


def test_a_place_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "worker.json").write_text(json.dumps(ERROR))
    with caplog.at_level(logging.WARNING):
        hand_up(str(tmp_path / "worker.json"), 1, str(tmp_path / "nowhere" / "own.json"))
    assert "own.json was not written: No such file or directory" in caplog.text


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """No new descriptor can be opened but those that a test closes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    opened: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            opened.append(os.dup(1))
    error_file.reserve_descriptor(opened[-1])
    yield
    for fd in opened:
        with contextlib.suppress(OSError):
            os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_worker_without_descriptors_leaves_its_error_by_the_one_that_was_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_descriptors: None, is_closed: bool
) -> None:
    """Unless the program has closed it, and has a file of its own under this number."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    if is_closed:
        ((fd, _),) = error_file._reserved
        os.close(fd)
        assert os.open(os.devnull, os.O_RDONLY) == fd
    error_file.leave_exception(OSError(errno.EMFILE, "Too many open files"))
    assert path.exists() == (not is_closed)
    if not is_closed:
        assert "Too many open files" in path.read_text()
