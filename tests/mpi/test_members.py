"""Who belongs to a job: the list, the script, and both together."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import program
from tests.planning.requests import request
from trainer_launch.host import deadline_subprocess
from trainer_launch.host.deadline_subprocess import Ended
from trainer_launch.model import Job, Member, Mpi, NodeRange
from trainer_launch.model.errors import LaunchError
from trainer_launch.mpi import remote_hosts
from trainer_launch.mpi.remote_hosts import HostList, merged
from trainer_launch.planning import engines, mpi_options
from trainer_launch.planning.mpi import spec_of

A, B, C = Member("a", 2), Member("b", 2), Member("c", 2)


def listed(path: Path, text: str, line: str = "mpirun x", **mpi: Any) -> HostList:
    """The list of a job whose platform mounts one with this text."""
    path.write_text(text)
    job = Job(contract="c", nodes=NodeRange(2, 2), mpi=Mpi(hostfile_path=str(path), launch_agent="ssh", **mpi))
    task = request(line, job)
    return HostList(spec_of(task, engines.plan(task).processes[0]), mpi_options.parse(shlex.split(line)))


def run(argv: Sequence[str], limit_s: float) -> Ended:
    return deadline_subprocess.run(argv, None, limit_s)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hosts"


def script(folder: Path, text: str) -> str:
    """An elastic horovodrun with a script of its own."""
    path = program(folder / "discover_hosts.sh", text)
    return f"horovodrun -np 2 --host-discovery-script {path} x"


def test_a_file_may_have_the_other_mpis_form(path: Path) -> None:
    assert listed(path, "a:2\nb:2\n").members == (A, B)
    assert listed(path, "a slots=2\n", mpi_implementation="MPICH").members == (A,)


def test_a_line_of_neither_form_is_refused_with_its_number(path: Path) -> None:
    with pytest.raises(LaunchError, match="line 1 is 'a:2'; expected HOST, or HOST slots=N"):
        listed(path, "a:2\nb;c\n")


def test_a_typed_file_goes_before_the_platforms_and_one_that_is_not_there_is_told(path: Path) -> None:
    with pytest.raises(LaunchError, match="/nowhere cannot be read; is its volume mounted"):
        listed(path, "a\n", "mpirun --hostfile /nowhere x")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mpirun x", (A, Member("b", 4))),
        ("horovodrun -np 2 --slots-per-host 3 x", (Member("a", 3), Member("b", 3))),
        ("mpirun -H b,c:1,d,d x", (Member("b", 4), Member("c", 1), Member("d", 2))),
        ("horovodrun -np 2 --min-np 1 -H b x", (Member("b", 4),)),
    ],
)
def test_the_platforms_slots_fill_gaps_and_what_is_typed_goes_before_the_list(
    path: Path, line: str, expected: tuple[Member, ...]
) -> None:
    hosts = listed(path, "a\nb slots=4\n", line, slots_env=2)
    assert hosts.members == expected
    assert hosts.is_fixed is ("-H" in line), "no others join a typed list"


def test_who_is_discovered_stands_behind_the_list_and_keeps_its_place() -> None:
    found = (Member("d"), Member("a"), Member("c"))
    assert merged((A, B), found, (A, B, C)) == (A, B, C, Member("d", 2))


def test_who_is_discovered_no_more_leaves() -> None:
    assert merged((A,), (Member("b"),), (A, B, C)) == (A, B)


@pytest.mark.parametrize(
    ("text", "says"), [("exit 3", "failed"), ("echo 'a b c'", "expected"), ("exec sleep 60", "failed: no end")]
)
def test_a_script_that_fails_hangs_or_makes_no_sense_is_told_and_changes_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    monkeypatch.setattr(remote_hosts, "_SCRIPT_S", 2.0)
    hosts = listed(path, "a slots=2\n", script(tmp_path, text))
    assert hosts.look(run) == (A,)
    assert says in hosts.trouble


def test_a_list_that_stops_making_sense_changes_nothing(path: Path, tmp_path: Path) -> None:
    hosts = listed(path, "a slots=2\n", script(tmp_path, "echo b"))
    assert hosts.look(run) == (A, B)
    path.write_text("\x00")
    assert hosts.look(run) == (A,)
    assert "line 1" in hosts.trouble
