"""Users' scripts under faults, by the command itself: those that do not survive are shown up."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.rehearsal.users.commanded import clean, command

pytestmark = pytest.mark.process


class Ended:
    """A rehearsal that has ended."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.said = " ".join(done.stderr.split())


def rehearse(folder: Path, script: str, *flags: str, last: int = 200) -> Ended:
    """One pod runs a user's script up to step `last`."""
    return ended(command(folder, script, *flags, last=last), folder)


def ended(argv: tuple[str, ...], folder: Path) -> Ended:
    return Ended(
        subprocess.run(argv, text=True, capture_output=True, timeout=110, check=False, env=clean(), cwd=folder)
    )


def test_a_script_that_resumes_survives_being_killed_and_being_asked_to_stop(tmp_path: Path) -> None:
    faults = ("--fault", "kill pod at=step:25", "--fault", "term pod grace=10 at=step:45")
    done = rehearse(tmp_path, "survives", *faults, "--report", "out.html")
    assert (done.code, "does not survive" in done.said) == (0, False), done.err
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "<h1>Survived 2 faults</h1>" in page
    assert re.search(r"<b>\d{1,2}</b><span>repeated steps</span>", page)


def test_a_script_that_never_loads_its_checkpoint_is_shown_up(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "forgets", "--fault", "kill pod at=step:30", "--report", "out.html")
    assert done.code == 1, done.err
    assert re.search(
        r"FAILED: the script did not resume from its checkpoint, demo-master-0 at [\d.]+ s: "
        r"after 'kill pod[^']*' training restarted at step 1, "
        r"after it had reached step \d+ What to do: load the newest checkpoint",
        done.said,
    ), done.err
    assert "<h1>FAILED: the script did not resume from its checkpoint</h1>" in (tmp_path / "out.html").read_text(
        encoding="utf-8"
    )


def test_the_report_of_a_rehearsal_that_is_interrupted_is_written_too(tmp_path: Path) -> None:
    argv = command(tmp_path, "survives", "--report", "out.html", last=100_000)
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean(), cwd=tmp_path
    ) as running:
        assert running.stdout is not None
        while b"step 12 " not in running.stdout.readline():
            pass
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=120)
    assert running.returncode == 130
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "<h1>Stopped before the job ended</h1>" in page
    assert ">terminating<" in page
