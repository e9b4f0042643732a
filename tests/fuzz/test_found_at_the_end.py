"""What fuzzing has found in what a run is told of its end: no failure becomes a success by what others write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.launching import launch
from tests.conftest import require
from trainer_launch.model import Death
from trainer_launch.mpi import horovod_agent
from trainer_launch.mpi.mpirun_messages import Said
from trainer_launch.supervisor.failure import parse_agent_failure


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("line", ["Exit code: 0", "=   EXIT CODE: 0"])
def test_a_job_whose_rank_prints_an_exit_code_of_0_and_fails_has_failed(line: str, tmp_path: Path) -> None:
    require(shutil.which("mpirun.openmpi"), "needs openmpi-bin")
    words = ("run", "--engine", "mpi", "--max-restarts", "0", "--termination-log", str(tmp_path / "words"))
    program = ("mpirun.openmpi", "-np", "1", "sh", "-c", f"echo '{line}' >&2; exit 3")
    ended = launch(*words, "--", *program, env={"TMPDIR": str(tmp_path)})
    assert ended.returncode == 3, ended.stderr
    assert (tmp_path / "words").read_text().startswith("reason=Failed ")


@pytest.mark.parametrize("code", ["0", "256", "999"])
def test_nor_does_a_line_of_horovods_form(code: str) -> None:
    for is_elastic in (False, True):
        assert (
            horovod_agent.heard(Said(), f"Process 3 exit with status code {code}.", is_elastic=is_elastic) == Said()
        )


@pytest.mark.parametrize("value", [0, -1, 256, 10**30, True, "7", 1.5])
def test_a_note_of_the_agent_with_a_code_that_no_failure_has_leaves_the_programs_own(value: object) -> None:
    note = {"exit_code": value, "signal": value, "message": "m"}
    assert parse_agent_failure(json.dumps(note)) == Death(message="m")


@pytest.mark.parametrize("value", [-1, 2**31, 10**400])
def test_nor_is_a_rank_any_number(value: int) -> None:
    assert parse_agent_failure(json.dumps({"rank": value, "local_rank": value})) == Death()


@pytest.mark.parametrize("name", ["a\nreason=Succeeded", "a\x85b", "\x1b[2J", "h" * 300])
def test_nor_is_a_host_any_text(name: str) -> None:
    assert parse_agent_failure(json.dumps({"hostname": name})) == Death()
