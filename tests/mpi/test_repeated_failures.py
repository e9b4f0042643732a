"""What a real mpirun is started again for, and what it is not: the rules are those of torch jobs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.launching import script, start
from tests.conftest import require

# Each start leaves a mark; rank 1 fails, and rank 0 lives until it is ended.
TRAIN = """
import os, time
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
marks = {folder!r}
if rank == "1":
    number = len(os.listdir(marks))
    open(os.path.join(marks, str(number)), "w").close()
    {ending}
time.sleep(60)
"""


def ended(tmp_path: Path, ending: str) -> tuple[int, str, int]:
    """The exit code, the termination message, and how often it was started."""
    require(shutil.which("mpirun"), "mpirun is not installed")
    marks, words = tmp_path / "marks", tmp_path / "words"
    marks.mkdir()
    words.touch()
    train = script(tmp_path, TRAIN.format(folder=str(marks), ending=ending))
    options = ("--termination-log", str(words), "--max-restarts", "5", "--grace", "8")
    typed = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", "python3", train)
    with start("run", *options, "--", *typed) as launcher:
        code, _ = launcher.end()
    return code, words.read_text(), len(list(marks.iterdir()))


@pytest.mark.process
def test_a_rank_that_raises_the_same_name_error_twice_ends_an_mpi_job_without_further_restarts(
    tmp_path: Path,
) -> None:
    code, words, starts = ended(tmp_path, "model.train()")
    assert starts == 2, words
    assert code == 1
    assert words.startswith("reason=ProgramError "), words
    assert "retryable=false" in words
    assert "NameError: name 'model' is not defined" in words
    assert "not restarted, because the same NameError has ended two starts in a row" in words
