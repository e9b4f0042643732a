"""Whether the folders of all nodes are one: groups of nodes that see each other, and tokens in real folders."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.preflight.cluster.job import Simulation, failure
from trainer_launch.host.deadline_subprocess import Tried, try_out
from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.shared_storage import Tokens

AT = "/checkpoints"
LISTED = "node 2 (job-node-0-2)"


def judged(nodes: int, group_of: Callable[[int], int], *, must: bool = True) -> Finding:
    """The nodes of one group have one folder."""
    job = Simulation(nodes, storage={AT: must})
    job.sees = lambda folder, node, other: group_of(node) == group_of(other)
    job.come(*range(nodes))
    assert job.is_over
    (finding,) = [one for one in job.hall.findings if one.check == "shared-storage"]
    return finding


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 64, 1000])
@pytest.mark.parametrize("must", [True, False])
def test_one_folder_for_all_nodes_passes(nodes: int, must: bool) -> None:
    found = judged(nodes, lambda node: 0, must=must)
    assert (found.status, found.measured) == (Status.PASS, True)
    assert found.text == f"{AT} is one shared directory on all {nodes} nodes"


@pytest.mark.parametrize("nodes", [3, 4, 5, 8, 33, 64])
def test_every_single_node_with_another_folder_is_named_alone(nodes: int) -> None:
    for odd in range(nodes):
        found = judged(nodes, lambda node, odd=odd: node == odd)  # type: ignore[misc]
        assert (found.status, found.fault) == (Status.FAIL, Fault.NODE)
        assert found.subject == f"node {odd} (job-node-0-{odd})"
        assert (found.measured, found.expected) == (nodes - 1, nodes)


def test_without_a_word_that_it_has_to_be_shared_the_odd_one_is_a_warning() -> None:
    found = judged(4, lambda node: node == 2, must=False)
    assert (found.status, found.subject) == (Status.WARN, LISTED)


def test_a_folder_of_each_nodes_own_is_a_fact_or_the_jobs_fault() -> None:
    local = judged(4, lambda node: node, must=False)
    assert (local.status, local.measured) == (Status.PASS, False)
    assert local.text == f"{AT} is not shared: each of the 4 nodes has its own directory there"
    wrong = judged(4, lambda node: node)
    assert (wrong.status, wrong.fault, wrong.subject) == (Status.FAIL, Fault.JOB, "")
    assert "ReadWriteMany" in wrong.action


def test_two_halves_accuse_nobody() -> None:
    found = judged(8, lambda node: node // 4)
    assert (found.status, found.fault, found.subject) == (Status.FAIL, Fault.JOB, "")
    assert "not for all" in found.text


@pytest.mark.parametrize(("nodes", "bad"), [(2, (0,)), (2, (1,)), (2, (0, 1)), (4, (2,))])
def test_who_cannot_write_there_is_told_by_its_own_check_alone(nodes: int, bad: tuple[int, ...]) -> None:
    job = Simulation(nodes, storage={AT: True})
    job.own = {node: [replace(failure("storage", "read-only"), fault=Fault.NODE)] for node in bad}
    job.sees = lambda folder, node, other: node not in bad and other not in bad
    job.come(*range(nodes))
    assert job.is_over
    assert {one.check for one in job.loud()} == {"storage"}


def test_who_could_not_look_is_not_accused() -> None:
    job = Simulation(4, storage={AT: True})
    job.blind = {3}
    job.come(*range(4))
    assert job.is_over
    assert not job.loud()


@pytest.mark.parametrize("blind", [(0,), (0, 1)])
def test_with_less_than_two_that_could_look_nothing_is_known(blind: tuple[int, ...]) -> None:
    job = Simulation(2, storage={AT: True})
    job.blind = set(blind)
    job.come(0, 1)
    (finding,) = [one for one in job.hall.findings if one.check == "shared-storage"]
    assert (finding.status, finding.text) == (Status.UNKNOWN, f"no two nodes have looked into {AT}")


def test_a_node_that_is_alone_is_told_nothing_of_it() -> None:
    job = Simulation(1, max_nodes=2, storage={AT: True})
    job.come(0)
    job.wait(10)
    assert job.is_over
    assert not [one for one in job.hall.findings if one.check == "shared-storage"]


def test_nothing_is_sought_where_no_folder_was_given() -> None:
    job = Simulation(3)
    job.come(*range(3))
    sought = [message.tokens for told in job.told.values() for message in told if isinstance(message, msg.Complete)]
    assert sought == [()] * 3
    assert not [one for one in job.hall.findings if one.check == "shared-storage"]


@pytest.mark.process
def test_tokens_are_found_in_the_same_folder_only_and_removed(tmp_path: Path) -> None:
    same, other = str(tmp_path / "same"), str(tmp_path / "other")
    for folder in (same, other):
        Path(folder).mkdir()
    nodes = [
        Tokens((same,), "a", try_out),
        Tokens((same, "/no/such/folder"), "b", try_out),
        Tokens((other,), "c", try_out),
    ]
    for node in nodes:
        node.leave(10.0)
    assert nodes[0].seek(("b", "c", "unknown")) == {same: "b"}
    assert nodes[1].seek(("unknown", "a", "b")) == {same: "a"}
    assert nodes[2].seek(("a", "b")) == {other: "c"}
    for node in nodes:
        node.remove()
        node.remove()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_that_hangs_or_fails_is_left_out() -> None:
    outcomes: Mapping[str, Tried] = {
        "/hangs": Tried(stage="look", timed_out=True, stuck=True),
        "/fails": Tried(stage="look", errno=errno.EIO),
    }
    tokens = Tokens(
        tuple(outcomes), "a", lambda what, word, limit_s: outcomes["/hangs" if "/hangs" in word else "/fails"]
    )
    tokens.leave(10.0)
    assert tokens.seek(("b",)) == {}
    tokens.remove()


@pytest.mark.process
def test_a_folder_that_hangs_is_given_up_at_its_limit(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".trainer-launch-token-a")  # opening it waits for a reader
    tokens = Tokens((str(tmp_path),), "a", try_out)
    began_s = time.monotonic()
    tokens.leave(0.3)
    assert tokens.seek(("a", "b")) == {}
    assert time.monotonic() - began_s < 5.0
