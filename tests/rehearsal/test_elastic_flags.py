"""`local --nodes MIN:MAX`: an elastic job without a manifest shrinks, grows, and survives node 0."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.cli.launching import launch, launched, script
from tests.conftest import require
from tests.rehearsal.test_torch_faults import PRINTS, TRAIN
from trainer_launch.contracts import read_job
from trainer_launch.contracts.snapshot import SnapshotFiles
from trainer_launch.contracts.source import PodInput
from trainer_launch.model import NodeRange
from trainer_launch.rehearsal.controllers.flag_jobs import elastic_job
from trainer_launch.rehearsal.controllers.pod_values import pods as pods
from trainer_launch.rehearsal.faults import InjectedFault, parse, wants_names


def faults(*texts: str) -> tuple[InjectedFault, ...]:
    return tuple(map(parse, texts))


# On a machine of any speed the fault comes while both nodes train: neither alone makes the first step, and the job
# does not end before one of them has gone on alone.
WHILE = "while step < last or dist.get_world_size() < most:"
WHILE_SHRUNK = """
size, shrunk = dist.get_world_size(), saved.with_name("shrunk")
while size == 1 and not step:
    time.sleep(0.05)
if size == 1:
    shrunk.touch()
while step < last or size != most or not shrunk.exists():
"""


def sizes(tmp_path: Path, nodes: str, enough: int, fault: str, watched: int) -> list[str]:
    """With how many workers the worker of a node has begun, each time."""
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    words = ("--nodes", nodes, "--fault", fault)
    train = script(tmp_path, TRAIN.replace("{say}", PRINTS).replace(WHILE, WHILE_SHRUNK))
    ended = launched("rehearse", *words, "--", train, str(tmp_path / "saved"), "20", str(enough))
    return re.findall(rf"^\[{watched}:\d+\] begun at \d+ with (\d)", ended.stdout, re.MULTILINE)


@pytest.mark.process
@pytest.mark.torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "enough", "want"),
    [
        ("kill pod back=never at=step:5", 1, ["2", "1"]),
        pytest.param(
            "kill pod back=10s at=step:5",
            2,
            ["1", "2"],
            marks=pytest.mark.long("tests/rehearsal/test_elastic_flags.py"),
        ),
    ],
)
def test_a_pod_that_is_lost_for_good_and_one_that_joins_late_change_the_jobs_size(
    tmp_path: Path, fault: str, enough: int, want: list[str]
) -> None:
    assert sizes(tmp_path, "1:2", enough, fault, watched=0)[-2:] == want


def test_only_the_loss_of_node_0_for_good_needs_the_pods_names() -> None:
    assert wants_names(faults("kill pod node=0 back=never"))
    assert wants_names(faults("kill pod", "term pod node=0 back=never at=3s"))
    assert not wants_names(faults("kill pod node=0", "kill pod back=never", "kill worker node=0"))


def test_each_pod_has_the_variables_of_an_elastic_pytorchjob() -> None:
    made = pods(elastic_job(NodeRange(1, 2), "4", ("train.py", "$HOME"), 25.0))
    assert [pod.name for pod in made] == ["local-worker-0", "local-worker-1"]
    assert [pod.main.env["TRAINER_LAUNCH_NODE_LABEL"] for pod in made] == ["0", "1"]
    assert made[0].main.command == ("trainer-launch", "run", "--", "train.py", "$HOME")
    assert made[0].draft.template.grace_s == 25.0
    found = PodInput(env=made[1].main.env, files=SnapshotFiles({}), hostname=made[1].name)
    job = read_job(found)
    assert (job.contract, job.nodes, job.nproc_per_node) == ("pytorchjob-v1-elastic", NodeRange(1, 2), 4)


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--nodes", "2:1"), "invalid value '2:1' for --nodes: expected N, or MIN:MAX with 0 < MIN <= MAX"),
        (("--nodes", "1:2", "--engine", "mpi"), "invalid value '1:2' for --nodes: expected N for an MPI job"),
        (("--nodes", "2:3", "--fault", "kill pod node=3"), "there is no node 3"),
        (("--nodes", "1:201"), "invalid value 201 for --nodes: a rehearsal runs 1 to 200 nodes"),
    ],
)
def test_a_range_that_does_not_fit_is_one_error(words: tuple[str, ...], part: str) -> None:
    ended = launch("rehearse", *words, "--", "true")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert part in ended.stderr
    assert "Traceback" not in ended.stderr
