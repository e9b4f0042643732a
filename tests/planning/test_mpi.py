"""The engines of mpirun and horovodrun: when they are picked, and what their jobs are told."""

from __future__ import annotations

import pytest

from tests.planning.requests import request
from trainer_launch.model import Job, Member, Mpi, NodeRange, signal_policy
from trainer_launch.model.errors import UsageError
from trainer_launch.planning import engines

ALONE = Job(contract="unknown")


@pytest.mark.parametrize("line", ["mpirun -np 2 x", "horovodrun -np 2 x"])
def test_the_plan_has_what_signals_are_for(line: str) -> None:
    text = "TERM=drain,USR1=checkpoint"
    assert engines.plan(request(line, ALONE, signals=text)).signals == signal_policy.parse(text)


def test_some_signal_has_to_be_left_to_stop_by() -> None:
    given = "TERM=drain,INT=drain,QUIT=drain,HUP=drain"
    with pytest.raises(UsageError, match="no signal that stops the job"):
        engines.plan(request("mpirun -np 2 x", ALONE, signals=given))


OPERATOR = Job(
    contract="mpijob-v2beta1",
    role="launcher",
    engine="mpirun",
    nodes=NodeRange(2, 2),
    members=(Member("w-0", 2), Member("w-1", 2)),
    ssh_dir="/root/.ssh",
    mpi=Mpi(hostfile_path="/etc/mpi/hostfile", launch_agent="ssh", slots_env=2),
)


@pytest.mark.parametrize(
    ("line", "engine"),
    [
        ("horovodrun -np 4 python train.py", "horovodrun"),
        ("/opt/conda/bin/horovodrun -np 4 python train.py", "horovodrun"),
        ("horovodrun --check-build", "plain"),
        ("horovodrun --help", "plain"),
    ],
)
def test_it_is_picked_by_the_command(line: str, engine: str) -> None:
    assert engines.plan(request(line, OPERATOR)).engine == engine
    assert engines.plan(request(line, Job(contract="unknown"))).engine == engine


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("horovodrun python train.py", "needs the number of processes"),
        ("horovodrun -np none x", "expected a number"),
        ("horovodrun -np 2 -p 65536 x", "expected 1 to 65535"),
        ("horovodrun -np 2 --min-np 0 x", "expected a number"),
        ("horovodrun -np 2", "has no program"),
        ("horovodrun -np 2 --bogus x", "unknown option of horovodrun"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(line: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        engines.plan(request(line, OPERATOR))
