"""What the preflight of an MPI launcher takes from the command."""

from __future__ import annotations

import shlex

import pytest

from trainer_launch.planning.command import parse_command
from trainer_launch.preflight.mpi import launcher_checks, ring


@pytest.mark.parametrize(
    ("line", "mpirun", "number", "python"),
    [
        ("mpirun -np 4 python3.11 train.py", "mpirun", 4, "python3.11"),
        ("/opt/mpi/bin/mpirun -n 2 ./a.out", "/opt/mpi/bin/mpirun", 2, "python3"),
        ("python train.py", "mpirun", None, "python"),
        ("horovodrun -np 3 /venv/bin/python train.py", "", 3, "/venv/bin/python"),
    ],
)
def test_the_mpirun_its_ranks_and_the_interpreter(line: str, mpirun: str, number: int | None, python: str) -> None:
    taken = launcher_checks._typed(parse_command(shlex.split(line)))
    assert (taken.mpirun, taken.number, ring._python(taken.program)) == (mpirun, number, python)


def test_the_ring_talks_as_the_job_would_and_does_nothing_else_of_what_was_typed() -> None:
    kept = (
        "--mca",
        "btl",
        "^openib",
        "--bind-to",
        "none",
        "-x",
        "NCCL_DEBUG=INFO",
        "--tag-output",
        "-genv",
        "A",
        "b",
    )
    talking = ("--mca", "btl", "^openib", "-x", "NCCL_DEBUG=INFO", "-genv", "A", "b")
    assert ring._about_talking(kept) == talking
