"""Ctrl-C, for the ranks of an MPI job on all hosts."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.mpi.jobs import Life, MpiRun
from tests.supervisor.fakes import Program

INT, TERM = int(signal.SIGINT), int(signal.SIGTERM)
STUBBORN = Life(Program(term_s=None))


def test_ctrl_c_is_the_ranks_on_all_hosts_first_and_then_mpiruns(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", STUBBORN, grace=20.0)
    job.system.signalled(10.0, INT)
    assert job.run().stop_signal == INT
    assert job.did("tell") == [(10.0, "a", "b", "INT")]
    assert (job.asked(INT), job.asked(TERM)) == ([24.0], [])


def test_the_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", STUBBORN, grace=300.0)
    job.system.signalled(10.0, INT).signalled(11.0, INT)
    job.run()
    assert job.killed_at == [11.0]
