"""Incidents of several nodes that are one, and the line of code that each is listed with."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from trainer_launch.commands.incidents import line_of
from trainer_launch.diagnosis import incident_bundle
from trainer_launch.diagnosis.collectives import RankState
from trainer_launch.diagnosis.incident_bundle import FAILURE, HANG, Incident, Stored

NOW_S = 1_795_504_000.0
SENTENCE = "rank 5 (node 0) never entered all_reduce #41 of default_pg; rank 5 is in data.py:22 (read_batch)"


def state(rank: int, node: int, place: str = "waits in all_reduce, called from train.py:31 (step)") -> RankState:
    return RankState(rank=rank, node=node, place=place)


def bundle(place: Path, node: int, *states: RankState) -> None:
    at_s = NOW_S + node / 10
    folder = incident_bundle.new_folder(str(place), f"job-node{node}", at_s)
    hang = Incident(sentence=SENTENCE, kind=HANG, job="job", generation=3, ranks=(5,), time_s=at_s, states=states)
    incident_bundle.finish(folder, replace(hang, node_rank=node))


def joined(place: Path) -> list[Stored]:
    return incident_bundle.chosen(incident_bundle.moments(incident_bundle.stored(str(place))), None)


def small(place: Path) -> list[Stored]:
    bundle(place, 0, *(state(rank, 0) for rank in range(4)))
    bundle(place, 1, state(4, 1), state(5, 1, "in data.py:22 (read_batch)"))
    return joined(place)


def test_a_moment_has_one_incident_of_each_node_and_none_of_other_generations(tmp_path: Path) -> None:
    small(tmp_path)
    folder = incident_bundle.new_folder(str(tmp_path), "job-node2", NOW_S + 1)
    later = Incident(sentence="x", kind=HANG, time_s=NOW_S + 1, job="job", generation=4, node_rank=2)
    incident_bundle.finish(folder, later)
    groups = incident_bundle.moments(incident_bundle.stored(str(tmp_path)))
    assert [[entry.incident.node_rank for entry in group] for group in groups] == [[0, 1], [2]]


def test_a_node_that_was_told_of_a_failure_is_shown_behind_the_hang_that_led_to_it(tmp_path: Path) -> None:
    bundle(tmp_path, 1, state(5, 1))
    folder = incident_bundle.new_folder(str(tmp_path), "job-node0", NOW_S + 2)
    told = "rank 5 failed on node 1 (host-1) by signal 9"
    failure = Incident(sentence=told, kind="failure", time_s=NOW_S + 2, job="job", generation=3, node_rank=0)
    incident_bundle.finish(folder, failure)
    assert [one.incident.sentence for one in joined(tmp_path)] == [SENTENCE, told]


TRACEBACK = """{0}Traceback (most recent call last):
{0}  File "/app/train.py", line 31, in main
{0}    step()
{0}  File "/app/data.py", line 22, in read_batch
{0}    open(name)
{0}  File "/usr/lib/python3.11/pathlib.py", line 9, in open
{0}FileNotFoundError: shard-7
"""


@pytest.mark.parametrize("prefix", ["", "[rank1]: "], ids=["Python's", "torch's"])
def test_an_exception_is_listed_with_the_line_of_the_users_that_raised_it(tmp_path: Path, prefix: str) -> None:
    folder = incident_bundle.new_folder(str(tmp_path), "job-node0", NOW_S)
    incident_bundle.add(folder, "output/rank-0.txt", TRACEBACK.format("").replace("data", "victim"))
    incident_bundle.add(folder, "output/rank-1.txt", TRACEBACK.format(prefix))
    about = Incident(sentence="rank 1 ended with exit code 1", kind=FAILURE, time_s=NOW_S, job="job", node_rank=0)
    incident_bundle.finish(folder, about)
    assert line_of(joined(tmp_path)) == "data.py:22 (read_batch)"


def test_a_hang_is_listed_with_the_line_of_the_rank_that_is_named(tmp_path: Path) -> None:
    assert line_of(small(tmp_path)) == "data.py:22 (read_batch)"


def test_where_no_line_is_known_none_is_listed(tmp_path: Path) -> None:
    folder = incident_bundle.new_folder(str(tmp_path), "run", NOW_S)
    incident_bundle.finish(folder, Incident(sentence="program was killed", kind=FAILURE, time_s=NOW_S))
    assert line_of(joined(tmp_path)) == "-"
