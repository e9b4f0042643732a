"""`local --engine mpi`: a launcher and its workers on one machine, each with an address of its own."""

from __future__ import annotations

import os
import re

import pytest

from tests.cli.launching import launch
from tests.ssh.secrets import require_openssh

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def _ssh() -> None:
    require_openssh()


def test_the_launchers_end_is_the_jobs_end(tmp_path) -> None:
    """Its workers run until nobody needs them; nothing of them is left."""
    private = {"TMPDIR": str(tmp_path)}
    ended = launch(
        "local", "--engine", "mpi", "--nodes", "2", "--", "sh", "-c", "echo $HOSTNAME; exit 7", env=private
    )
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout == "local-launcher-0-0\n"
    rows = dict(re.findall(r"^(local-\S+) +(\d+) ", ended.stderr, re.MULTILINE))
    assert rows == {"local-node-0-0": "143", "local-node-0-1": "143", "local-launcher-0-0": "7"}
    assert os.listdir(tmp_path) == []


def test_slots_are_numbers(tmp_path) -> None:
    ended = launch("local", "--engine", "mpi", "--nproc-per-node", "auto", "--", "true")
    assert ended.returncode == 2
    assert "a rehearsal of MPI takes one whole number" in ended.stderr
