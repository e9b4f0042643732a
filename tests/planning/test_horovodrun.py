"""The engine of horovodrun: when it is picked, and what its agent is told."""

from __future__ import annotations

import pytest

from tests.planning.requests import request
from tests.planning.test_mpirun import spec_of
from trainer_launch.model import Job, Member, Mpi, NodeRange
from trainer_launch.model.errors import UsageError
from trainer_launch.planning import engines
from trainer_launch.planning.mpi import Spec

OPERATOR = Job(
    contract="mpijob-v2beta1",
    role="launcher",
    engine="mpirun",
    nodes=NodeRange(2, 2),
    members=(Member("w-0", 2), Member("w-1", 2)),
    ssh_dir="/root/.ssh",
    mpi=Mpi(hostfile_path="/etc/mpi/hostfile", launch_agent="ssh", slots_env=2),
)


def told(line: str, job: Job = OPERATOR) -> Spec:
    return spec_of(engines.plan(request(line, job)))


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


def test_the_agent_gets_the_command_as_typed_and_the_platforms_hosts() -> None:
    plan = engines.plan(request("horovodrun -np 4 --gloo python train.py --lr 1", OPERATOR))
    assert plan.processes[0].argv == ("horovodrun", "-np", "4", "--gloo", "python", "train.py", "--lr", "1")
    spec = told("horovodrun -np 4 python train.py")
    assert (spec.hostfile, spec.slots, spec.agent, spec.settings.min_hosts) == ("/etc/mpi/hostfile", 2, "ssh", None)
    assert any("static" in reason for reason in plan.reasons)


def test_typed_hosts_slots_and_scripts_go_before_the_platforms() -> None:
    assert told("horovodrun -np 4 --hostfile /mine x").hostfile == "/mine"
    assert told("horovodrun -np 4 -p 2022 x").ssh_port == 2022
    spec = told("horovodrun -np 4 --min-np 2 --host-discovery-script /mine.sh --slots-per-host 4 x")
    assert (spec.discovery, spec.slots, spec.slots_are_given, spec.settings.min_hosts) == ("/mine.sh", 4, True, 1)
    assert told("horovodrun -np 4 --min-np 2 -H a:2,b:2 x").discovery is None, "no others join a typed list"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("horovodrun python train.py", "needs the number of processes"),
        ("horovodrun -np none x", "expected a number"),
        ("horovodrun -np 2 -p 65536 x", "expected 1 to 65535"),
        ("horovodrun -np 2 --min-np 0 x", "expected a number"),
        ("horovodrun -np 2", "names no program"),
        ("horovodrun -np 2 --bogus x", "unknown option of horovodrun"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(line: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        engines.plan(request(line, OPERATOR))
