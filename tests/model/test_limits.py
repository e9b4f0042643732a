"""What a machine has run out of is an error for people; a defect of ours stays a defect."""

from __future__ import annotations

import errno
import os

import pytest

from trainer_launch.model.errors import LaunchError, NodeError, UsageError, explained


def raised(*causes: Exception) -> Exception:
    """The last of these, each raised while the one before it was handled."""
    before: Exception | None = None
    for cause in causes:
        cause.__context__ = before
        before = cause
    assert before is not None
    return before


@pytest.mark.parametrize(
    "cause",
    [
        RuntimeError("can't start new thread"),
        OSError(errno.EMFILE, "Too many open files", "module.py"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        MemoryError(),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        raised(RuntimeError("can't start new thread"), RuntimeError("cannot join thread before it is started")),
    ],
    ids=lambda cause: str(cause) or "memory",
)
def test_a_limit_is_the_machines(cause: Exception) -> None:
    problem = explained(cause)
    assert isinstance(problem, NodeError)
    assert "raise the container's limit (ulimit -n, pids, memory)" in str(problem)
    assert ".py" not in str(problem), "which file was to be opened is chance"


@pytest.mark.parametrize(
    "cause",
    [
        RuntimeError("dictionary changed size during iteration"),
        ImportError("No module named 'pydantic_settings'"),
        raised(FileNotFoundError(errno.ENOENT, "No such file or directory"), RuntimeError("a defect")),
        raised(UsageError("no such option"), RuntimeError("a defect")),
    ],
    ids=str,
)
def test_a_defect_keeps_its_traceback(cause: Exception) -> None:
    assert explained(cause) is None


def test_any_other_error_of_the_system_is_told_in_its_own_words() -> None:
    problem = explained(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert (type(problem), str(problem)) == (LaunchError, "[Errno 28] No space left on device")
