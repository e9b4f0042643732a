"""Pair tests as a pure state: by which means, on which rails, and what that comes to."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.preflight.cluster.job import Simulation, present
from tests.preflight.world import subject
from trainer_launch.model import Cpus, Gpus
from trainer_launch.model.findings import Finding, Measure, Scope, Status
from trainer_launch.model.settings import Settings
from trainer_launch.preflight.cluster import node_side, pairs
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.thresholds import load_table

NCCL_8 = "nccl on 8 GPUs"


def simulated(nodes: int, fact: str | None = None, **settings: object) -> Simulation:
    """Nodes that all say the same of what they can test with."""
    job = Simulation(nodes, **settings)  # type: ignore[arg-type]
    if fact is not None:
        job.facts = {node: {pairs.FACT: fact} for node in range(nodes)}
    return job


def ended(job: Simulation) -> Simulation:
    job.come(*range(job.settings.max_nodes))
    job.wait(300)
    assert job.is_over
    return job


def named(job: Simulation) -> list[tuple[str, Scope]]:
    return [(found.subject, found.scope) for found in job.loud()]


def of_check(job: Simulation, check: str) -> list[Finding]:
    return [found for found in job.hall.findings if found.check == check]


@pytest.mark.parametrize(
    ("facts", "n_rails"),
    [
        ([None, None], 0),
        ([NCCL_8, NCCL_8], 8),
        ([NCCL_8, "nccl on 7 GPUs"], 7),
        ([NCCL_8, "only plain sockets: x"], 0),
        ([NCCL_8, None], 0),
    ],
)
def test_pairs_use_nccl_where_all_nodes_have_it(facts: list[str | None], n_rails: int) -> None:
    assert pairs.rails_of(facts) == n_rails


def test_what_a_node_says_of_itself_is_what_is_understood() -> None:
    assert pairs.rails_of([pairs.means_fact(8, "")]) == 8
    assert "No module" in pairs.means_fact(0, "No module named torch")


@pytest.mark.parametrize("n_nodes", [3, 4, 5, 8, 9])
def test_each_node_listens_for_one_neighbour_and_connects_to_the_other(n_nodes: int) -> None:
    job = ended(simulated(n_nodes))
    for rank in (0, 1):
        assert sorted(node for node, _, test in job.tests if test.rank == rank) == list(range(n_nodes))


@pytest.mark.parametrize("n_nodes", [3, 4, 5, 8, 9])
def test_a_node_to_which_nobody_may_connect_is_found_wherever_it_is(n_nodes: int) -> None:
    for closed in range(n_nodes):
        job = simulated(n_nodes)
        answer = job.answer

        def refused(rank: int, message: msg.Message, job=job, answer=answer, closed=closed) -> None:
            if isinstance(message, msg.Test) and message.host == f"job-node-0-{closed}.job":
                job.say(rank, msg.Result(message.round, (msg.RailResult("no connection came", 0),)))
            else:
                answer(rank, message)

        job.answer = refused  # type: ignore[method-assign]
        ended(job)
        assert job.loud(), closed
        assert all(f"job-node-0-{closed})" in found.subject for found in job.loud())


@pytest.mark.parametrize("n_nodes", [2, 8, 64])
def test_a_network_that_lets_nothing_through_is_told_once_and_accuses_nobody(n_nodes: int) -> None:
    (finding,) = ended(Simulation(n_nodes, outcome=lambda node, partner: ("no connection came", 0))).loud()
    assert (finding.status, finding.scope) == (Status.FAIL, Scope.LINK)
    assert "node 0 (job-node-0-0) and node 1 (job-node-0-1)" in finding.text


@pytest.mark.parametrize("n_nodes", [4, 5, 8])
def test_a_slow_node_is_named_alone_however_few_there_are(n_nodes: int) -> None:
    for slow in range(n_nodes):
        job = simulated(n_nodes)
        job.outcome = lambda n, p, slow=slow: ("", 10**8 if slow in (n, p) else 10**9 + 10**7 * (n + p))  # type: ignore[misc]
        ended(job)
        assert named(job) == [(f"node {slow} (job-node-0-{slow})", Scope.NODE)]
        assert "100 MB/s" in job.loud()[0].text
        assert "while nodes reach 1" in job.loud()[0].text


@pytest.mark.parametrize("n_nodes", [4, 5, 8])
def test_a_slow_way_is_named_as_a_link_however_few_there_are(n_nodes: int) -> None:
    for one in range(n_nodes):
        ends = {one, (one + 1) % n_nodes}
        job = simulated(n_nodes)
        job.outcome = lambda n, p, ends=ends: ("", 10**8 if {n, p} == ends else 10**9)  # type: ignore[misc]
        ended(job)
        first, last = sorted(ends)
        assert named(job) == [(f"node {first} (job-node-0-{first}) - node {last} (job-node-0-{last})", Scope.LINK)]
        assert "is slow in 3 of 3 tests" in job.loud()[0].text


@pytest.mark.parametrize("n_nodes", [4, 5, 8])
@pytest.mark.parametrize("blocked", [frozenset(), frozenset((1, 2))])
def test_a_way_that_was_slow_once_and_then_well_is_no_finding(n_nodes: int, blocked: frozenset[int]) -> None:
    """Other work on a machine takes a test's time, also beside one that fails."""
    for one in range(n_nodes):
        ends = {one, (one + 1) % n_nodes} - blocked
        job = simulated(n_nodes)

        def outcome(n: int, p: int, job: Simulation = job, ends: set[int] = ends) -> tuple[str, int]:
            if {n, p} == blocked:
                return "timed out", 0
            is_first = [(rank, partner) for rank, partner, _ in job.tests].count((n, p)) == 1
            return "", 10**8 if {n, p} == ends and is_first else 10**9

        job.outcome = outcome
        ended(job)
        assert named(job) == ([("node 1 (job-node-0-1) - node 2 (job-node-0-2)", Scope.LINK)] if blocked else [])


@pytest.mark.parametrize("n_nodes", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("why", "status"), [("out of time", Status.WARN), ("the data arrives damaged", Status.FAIL)]
)
def test_a_way_that_failed_once_and_then_never_warns_unless_it_changed_data(
    n_nodes: int, why: str, status: Status
) -> None:
    job = simulated(n_nodes)

    def outcome(n: int, p: int) -> tuple[str, int]:
        is_first = [(rank, partner) for rank, partner, _ in job.tests].count((n, p)) == 1
        return (why, 0) if {n, p} == {0, 1} and is_first else ("", 10**9)

    job.outcome = outcome
    (finding,) = ended(job).loud()
    assert (finding.status, finding.remedy) == (status, "")
    assert "fails in 1 of 3 tests" in finding.text
    assert ("other nodes" in finding.text) == (n_nodes > 2)


@pytest.mark.parametrize(("n_nodes", "per_place"), [(8, 4), (8, 7), (16, 8), (16, 4), (36, 18)])
@pytest.mark.parametrize("is_fabric", [False, True])
def test_pods_of_one_machine_or_nvlink_fabric_are_nearer_and_no_way_between_two_of_them_is_slow(
    n_nodes: int, per_place: int, is_fabric: bool
) -> None:
    job = simulated(n_nodes)
    job.outcome = lambda n, p: ("", (6 if n // per_place == p // per_place else 1) * 10**9 + 10**6 * (n + p))
    if is_fabric:
        facts = {pairs.FACT: NCCL_8}
        job.facts = {n: facts | {"clique of NVLink fabric ab": str(n // per_place)} for n in range(n_nodes)}
    for node in range(n_nodes):
        machine = "" if is_fabric else f"job-node-0-{node} boot-{node // per_place}"  # or the name of a machine
        job.say(node, replace(present(node), machine=machine))
    job.wait(300)
    assert job.is_over
    assert [found.status for found in of_check(job, "pairs")] == [Status.PASS]


def test_a_slow_node_among_pods_that_share_machines_is_named() -> None:
    job = simulated(16)
    job.outcome = lambda n, p: ("", (6 if n // 4 == p // 4 else 1) * 10**9 // (10 if 3 in (n, p) else 1))
    for node in range(16):
        job.say(node, replace(present(node), machine=f"gpu-{node // 4}"))
    job.wait(300)
    assert named(job) == [("node 3 (job-node-0-3)", Scope.NODE)]
    assert "while nodes reach" in job.loud()[0].text


@pytest.mark.parametrize("n_nodes", [4, 6, 8, 16, 64])
def test_racks_of_two_between_which_it_is_slower_by_design_are_no_finding(n_nodes: int) -> None:
    job = simulated(n_nodes)
    job.outcome = lambda n, p: ("", 10**9 if n // 2 == p // 2 else 2 * 10**8)
    assert named(ended(job)) == []


def test_results_with_too_few_rails_are_no_pass() -> None:
    job = simulated(4, NCCL_8)
    job.on_rail = lambda n, p, rail: ("no report", 0) if n == 1 and rail > 3 else None
    ended(job)
    assert named(job) == [("node 1 (job-node-0-1), rail 4, 5, 6, 7", Scope.RAIL)]


def test_a_healthy_job_with_rails_says_how_many_and_measures_them() -> None:
    job = simulated(8, NCCL_8, table=load_table(None))
    job.outcome = lambda n, p: ("", 45_000_000_000)
    job.measures = {node: [Measure("gemm", 665.0, "TFLOP/s", "NVIDIA H200", 0)] for node in range(8)}
    ended(job)
    assert not job.loud()
    assert "8 pair tests in 2 rounds passed on each of 8 rails" in of_check(job, "pairs")[0].text
    measured = [one for one in job.hall.measured() if one.name == "pair"]
    assert len(measured) == 64
    assert measured[0] == Measure("pair", 45.0, "GB/s", "NVIDIA H200", None)


def test_a_whole_job_over_plain_sockets_is_one_finding_about_the_job() -> None:
    job = simulated(8, NCCL_8, table=load_table(None))
    job.measures = {node: [Measure("gemm", 665.0, "TFLOP/s", "NVIDIA H200", 0)] for node in range(8)}
    job.outcome = lambda n, p: ("", 2_000_000_000)
    ended(job)
    assert named(job) == [("", Scope.JOB)]
    assert "4% of the reference" in job.loud()[0].text
    assert job.loud()[0].status is Status.WARN


def test_with_fewer_cpus_than_gpus_pairs_are_tested_over_plain_sockets() -> None:
    few = subject(host={"gpus": Gpus(count=8, reason="8 in /dev"), "cpus": Cpus(affinity=16, quota=2.0)})
    assert node_side._collectives(few, Settings({}), ()) is None


def test_on_a_network_that_gives_nobody_the_reference_a_node_in_a_slower_rack_only_warns() -> None:
    job = simulated(8, NCCL_8, table=load_table(None))
    job.measures = {node: [Measure("gemm", 665.0, "TFLOP/s", "NVIDIA H200", 0)] for node in range(8)}
    job.outcome = lambda n, p: ("", 13_000_000_000 if 3 in (n, p) else 20_000_000_000)
    ended(job)
    assert {found.status for found in job.loud()} == {Status.WARN}
    assert "node 3 (job-node-0-3)" in [found.subject for found in job.loud()]
