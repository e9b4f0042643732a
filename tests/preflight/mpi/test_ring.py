"""A hello and a ring over real MPI on this machine, and who is named where it fails."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence

import pytest

from tests.conftest import require
from trainer_launch.host import deadline_subprocess
from trainer_launch.host.deadline_subprocess import Ended
from trainer_launch.model.findings import Fault, Status
from trainer_launch.preflight.mpi import ring
from trainer_launch.preflight.thresholds import Thresholds

pytestmark = pytest.mark.process
YES, NO = Ended(status=0), Ended(status=1, stderr=b"No module named 'mpi4py'")
EASY = Thresholds(floor=1.0, ratio=0.0)  # a busy machine's pairs may differ by any factor
PYTHON = f"'{sys.executable}'"


def mpirun(hosts: Sequence[str], program: Sequence[str]) -> tuple[Sequence[str], Mapping[str, str]]:
    """A rank here for each host."""
    found = shutil.which("mpirun.openmpi") or shutil.which("mpirun")
    require(found and importlib.util.find_spec("mpi4py"), "needs Open MPI and mpi4py")
    assert found
    options = ("--allow-run-as-root", "--oversubscribe", "-np", str(len(hosts)))
    return (found, *options, sys.executable, *program[1:]), os.environ


def sabotaged(bad: Sequence[str]):
    """An mpirun that fails wherever two of `bad`, or the only one of them, take part."""

    def way(hosts: Sequence[str], program: Sequence[str]) -> tuple[Sequence[str], Mapping[str, str]]:
        if set(bad) <= set(hosts):
            return ("sh", "-c", "echo the cable is cut >&2; exit 7"), os.environ
        return mpirun(hosts, program)

    return way


def findings(hosts: Sequence[str], way=mpirun, has=lambda host, command: YES):
    return list(ring.findings(hosts, sys.executable, way, has, EASY))


def test_three_well_hosts_pass_in_one_run_with_latency_and_rate() -> None:
    [found] = findings(["a", "b", "c"])
    assert (found.check, found.status) == ("mpi-ring", Status.PASS)
    assert "3 pair tests in 3 rounds passed" in found.text
    assert "µs in the middle" in found.text


def test_the_host_with_which_nobody_can_talk_is_named() -> None:
    [found] = findings(["a", "b", "c", "d"], sabotaged(["c"]))
    assert (found.status, found.fault, found.subject) == (Status.FAIL, Fault.NODE, "c")
    assert any("the cable is cut" in line for line in found.evidence)


def test_the_link_between_two_well_hosts_is_named() -> None:
    [found] = findings(["a", "b", "c", "d"], sabotaged(["b", "c"]))
    assert (found.status, found.subject) == (Status.FAIL, "b - c")


@pytest.mark.parametrize("n_hosts", range(4, 10))
def test_where_pairs_are_tested_one_by_one_a_slow_host_is_named_alone(
    n_hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(hosts: Sequence[str], program: Sequence[str], mpirun: object, limit_s: float) -> ring.Heard:
        if len(hosts) > 2:
            return ring.Heard(why="exit code 7")
        return ring.Heard(pairs=((0, 1, 1e-5, 1e8 if slow in hosts else 1e9),))

    monkeypatch.setattr(ring, "_run", run)
    names = [f"host-{number}" for number in range(n_hosts)]
    for slow in names:
        found = list(ring.findings(names, "python3", mpirun, lambda host, command: YES, Thresholds()))
        assert [(one.status, one.subject) for one in found] == [(Status.WARN, slow)]


def test_without_mpi4py_it_is_skipped_and_says_where() -> None:
    [found] = findings(["a", "b"], has=lambda host, command: NO if host == "b" else YES)
    assert found.status is Status.SKIPPED
    assert found.text.endswith("has no mpi4py that works on b: No module named 'mpi4py'")


def test_an_mpi4py_without_its_library_is_no_fault_of_the_hosts() -> None:
    def has(host: str, command: str) -> Ended:
        return deadline_subprocess.run(("sh", "-c", f"MPI4PY_MPIABI=nonsense {command}"), os.environ, 60.0)

    [found] = findings(["a", "b"], has=has)
    assert found.status is Status.SKIPPED
    assert "has no mpi4py that works on a, b" in found.text


def test_an_mpi4py_of_another_mpi_accuses_nobody() -> None:
    """Then each rank is an MPI job of its own."""

    def each_alone(hosts: Sequence[str], program: Sequence[str]) -> tuple[Sequence[str], Mapping[str, str]]:
        argv, env = mpirun(hosts[:1], program)
        return ("sh", "-c", '"$@" & "$@" & wait', "sh", *argv), env

    [found] = findings(["a", "b"], each_alone)
    assert found.status is Status.UNKNOWN
    assert "belongs to another MPI" in found.text


def test_one_host_has_nobody_to_be_tested_with() -> None:
    [found] = findings(["a"])
    assert found.status is Status.SKIPPED


@pytest.mark.parametrize(
    "text", ["", "t {", "t []", 't {"pairs": 3}', 't {"pairs": [[1]]}', 'x {"pairs": []}', 't {"hello": ["a"]}']
)
def test_what_is_cut_short_or_garbage_is_not_whole(text: str) -> None:
    heard = ring.read("t", text)
    assert heard.pairs == ()
    assert not heard.is_whole
