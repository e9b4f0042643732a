"""An MPI launcher that is asked to stop while it waits for hosts says for which."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.mpi.jobs import Life, MpiRun
from tests.supervisor.fakes import Program
from trainer_launch.model import Verdict


def test_the_hosts_that_are_missing_are_named(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", away="b")
    job.system.signalled(10.0, signal.SIGTERM)
    ended = job.run()
    assert (ended.verdict, job.starts) == (Verdict.STOPPED, [])
    assert ended.note.startswith("it was waiting: 1 of 2 hosts ready; missing: b")


def test_a_launcher_whose_ranks_run_waits_for_nobody(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", Life(Program(ends_s=60.0)))
    job.system.signalled(10.0, signal.SIGTERM)
    ended = job.run()
    assert (ended.verdict, ended.note) == (Verdict.STOPPED, "")
