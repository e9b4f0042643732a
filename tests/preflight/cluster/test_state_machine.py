"""The cluster preflight as a pure state: who is missing and why, what is compared and tested, one verdict."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.preflight.cluster.job import JOB, Simulation, failure, present
from trainer_launch import __version__
from trainer_launch.model.codec import encode
from trainer_launch.model.findings import Fault, Measure, Report, Scope, Status
from trainer_launch.preflight import registry, report_formats
from trainer_launch.preflight.check import Where
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.node_side import failing_nodes
from trainer_launch.preflight.node_preflight import merged

OTHER_VERSION = (
    f"node 0 (trainer-launch {__version__}) uses protocol version {msg.VERSION}, this node {msg.VERSION - 1}; "
    "install the same trainer-launch in all pods"
)


def test_at_the_deadline_every_missing_node_is_named() -> None:
    job = Simulation(4, deadline_s=60.0)
    job.come(0, 1)
    job.wait(59)
    assert not job.is_over
    job.wait(1)
    assert job.is_over
    [found] = job.loud()
    assert (found.subject, found.measured) == ("node 2 (job-node-0-2.job), node 3 (job-node-0-3.job)", 2)
    assert (found.fault, found.scope) == (Fault.NODE, Scope.NODE)
    assert len(set(job.verdicts().values())) == 1
    assert sorted(job.verdicts()) == [0, 1]


def test_who_falls_silent_is_missing_and_it_is_said_that_it_was_there() -> None:
    job = Simulation(3, deadline_s=60.0)
    job.come(0, 2)
    job.wait(60, silent=[2])
    [found] = job.loud()
    assert found.subject == "node 1 (job-node-0-1.job), node 2 (job-node-0-2)"
    assert "node 2 (job-node-0-2) (it was present before: no message from it for 6 s)" in found.text


def test_who_went_and_came_back_in_time_is_there() -> None:
    job = Simulation(3)
    job.come(0, 1)
    job.leave(1)
    job.say(1, present(1, incarnation="b"))
    job.come(2)
    assert job.is_over
    assert not job.loud()


def test_a_newer_process_of_a_node_takes_its_place() -> None:
    job = Simulation(3)
    job.come(0, 1)
    job.say(1, present(1, incarnation="b"), peer=11)
    job.leave(1)  # the old connection, which was dropped
    job.come(2)
    assert job.is_over
    assert not job.loud()


def test_two_hosts_with_one_rank_are_fatal_for_the_job() -> None:
    job = Simulation(3, deadline_s=30.0)
    job.come(0, 1)
    job.say(1, present(1, host="job-init-0-1"), peer=9)
    job.wait(30)
    collisions = [found for found in job.loud() if found.fault is Fault.JOB]
    assert [found.text for found in collisions] == ["job-init-0-1 and job-node-0-1 both claim to be node 1"]


def test_a_pod_that_takes_the_place_of_one_that_fell_silent_collides_with_nobody() -> None:
    """It has another name, and comes before the lease of the old one is over."""
    job = Simulation(3)
    job.come(0, 1)
    job.say(1, present(1, host="job-node-0-1-x7k2p", incarnation="b"), peer=9)
    assert isinstance(job.told[9][-1], msg.Refused)
    job.leave(1)
    job.say(1, present(1, host="job-node-0-1-x7k2p", incarnation="b"), peer=10)
    job.come(2)
    job.wait(60)
    assert job.is_over
    assert not job.loud()


@pytest.mark.parametrize(
    ("said", "reason", "retry"),
    [
        (present(1, job="other"), f"this is the preflight of job {JOB}, not other", False),
        (present(7), "node rank 7 is invalid: this job has nodes 0 to 2", False),
        (present(1, version=msg.VERSION - 1), OTHER_VERSION, False),
    ],
)
def test_who_does_not_belong_here_is_refused(said: msg.Hello, reason: str, retry: bool) -> None:
    job = Simulation(3)
    job.say(5, said)
    assert job.told[5] == [msg.Refused(reason, retry)]


def test_an_elastic_job_goes_on_with_the_minimum_a_moment_after_the_last_one() -> None:
    job = Simulation(4, min_nodes=2)
    job.come(0, 1)
    job.wait(1.5)
    job.come(3)
    job.wait(1.5)
    assert not job.is_over
    job.wait(1)
    assert job.is_over
    assert not job.loud()
    assert next(found.measured for found in job.hall.findings if found.check == "roll-call") == 3


def test_a_node_that_is_at_work_already_ends_the_cluster_preflight() -> None:
    job = Simulation(3)
    job.come(0)
    job.say(8, msg.Hello(1, JOB, 1, "job-node-0-1", "x", 4))
    assert job.is_over
    assert isinstance(job.told[8][0], msg.Refused)
    assert job.told[8][0].retry
    assert [found.status for found in job.hall.findings] == [Status.PASS]


def test_a_node_of_another_job_that_is_at_work_ends_nothing() -> None:
    """As where two jobs on one machine's network are given one port."""
    job = Simulation(3)
    job.come(0)
    job.say(8, msg.Hello(1, "another", 1, "other-1", "x", 4))
    assert not job.is_over
    assert job.told[8] == [msg.Refused(f"this is the preflight of job {JOB}, not another", retry=False)]
    job.come(1, 2)
    assert job.is_over


@pytest.mark.parametrize(
    ("leaves", "how"),
    [(True, "it closed the connection"), (False, "it did not report the results of its own checks")],
)
def test_a_node_that_ends_or_hangs_before_its_record_is_named(leaves: bool, how: str) -> None:
    job = Simulation(3)
    job.mute = {2}
    job.come(0, 1, 2)
    if leaves:
        job.leave(2)
    job.wait(10 if leaves else 70)
    (found,) = job.loud()
    assert found.subject == "node 2 (job-node-0-2)"
    assert found.text == f"node 2 (job-node-0-2) was lost during the cluster preflight: {how}"


def test_what_nodes_find_by_themselves_is_told_to_all_and_alike_findings_are_one() -> None:
    job = Simulation(4)
    job.own = {1: [failure()], 2: [failure(text="it is too small here, too")], 3: [failure(check="memlock")]}
    job.come(*range(4))
    found = {one.check: one for one in job.loud()}
    assert found["shm"].subject == "node 1 (job-node-0-1), node 2 (job-node-0-2)"
    assert found["memlock"].subject == "node 3 (job-node-0-3)"
    assert found["shm"].fault is Fault.JOB


LOADED = Measure("gemm", 665.0, "TFLOP/s", "NVIDIA H200", 0)


@pytest.mark.parametrize(("n_nodes", "fault"), [(2, Fault.JOB), (3, Fault.NODE)])
def test_an_image_that_fails_on_few_nodes_is_not_the_jobs_fault(n_nodes: int, fault: Fault) -> None:
    """Such as on a machine with an older driver, while drivers are updated; that node's own verdict is the same."""
    job = Simulation(n_nodes)
    job.measures = {0: [LOADED], 2: [LOADED]}
    own = replace(failure("gpu-load", "the driver is too old"), remedy="FIX_IMAGE")
    job.own = {1: [own]}
    job.come(*range(n_nodes))
    (found,) = job.loud()
    assert (found.fault, found.remedy) == (fault, "FIX_IMAGE" if fault is Fault.JOB else "")
    job = Simulation(n_nodes)
    job.own = {1: [own]}
    job.come(*range(n_nodes))
    assert [unmeasured.fault for unmeasured in job.loud()] == [Fault.JOB], "nobody has shown that the image works"
    (told,) = merged([own], [found], "node 1 (job-node-0-1)", registry.ids(Where.CLUSTER))
    assert (told.fault, told.remedy, told.text) == (fault, found.remedy, own.text)


@pytest.mark.parametrize(("n_nodes", "ill", "is_shared"), [(8, 8, True), (8, 5, True), (8, 4, False), (2, 2, True)])
@pytest.mark.parametrize(("check", "remedy"), [("gpu-load", "DRAIN"), ("storage", "")])
def test_no_machine_is_at_fault_for_what_most_nodes_have(
    n_nodes: int, ill: int, is_shared: bool, check: str, remedy: str
) -> None:
    """Such as cards of which all fail with this image, or a file server that is gone."""
    job = Simulation(n_nodes)
    own = replace(failure(check, "it fails"), fault=Fault.NODE, remedy=remedy, action="see it")
    job.own = {node: [own] for node in range(ill)}
    job.come(*range(n_nodes))
    (found,) = job.loud()
    machines = {f"job-node-0-{node}": f"gpu-{node}" for node in range(n_nodes)}
    assert (found.status, found.fault) == (Status.FAIL, Fault.NODE)
    assert found.remedy == ("" if is_shared else remedy)
    assert failing_nodes([found], machines).count("gpu-") == (0 if is_shared else ill)
    assert ("most nodes of this job have this" in found.action) == is_shared
    assert report_formats.at_fault(Report(findings=(found,))).startswith("the job: " if is_shared else "node 0 ")
    (told,) = merged([own], [found], "node 1 (job-node-0-1)", registry.ids(Where.CLUSTER))
    assert (told.remedy, told.text, told.subject) == (found.remedy, own.text, found.subject)


def test_a_machine_is_at_fault_for_what_all_its_pods_have_though_they_are_most_of_the_job() -> None:
    job = Simulation(5)
    own = replace(failure("gpu-load", "it fails"), fault=Fault.NODE, remedy="DRAIN")
    job.own = {node: [own] for node in range(4)}
    for node in range(5):
        job.say(node, replace(present(node), machine="gpu-1" if node < 4 else "gpu-2"))
    (found,) = job.loud()
    assert (found.remedy, found.scope) == ("DRAIN", Scope.NODE)


def test_the_kubernetes_node_of_a_pod_at_fault_is_told_where_it_is_known() -> None:
    job = Simulation(3)
    fault = replace(failure("gpu-ecc", "GPU 3 had uncorrected errors"), fault=Fault.NODE)
    job.own = {1: [fault], 2: [fault]}
    job.come(0)
    job.say(1, replace(present(1), machine="gpu-node-7"))
    job.say(2, replace(present(2), machine="job-node-0-2-2 8c6f"))
    (found,) = job.loud()
    assert found.subject == "node 1 (job-node-0-1), node 2 (job-node-0-2)"
    assert found.evidence == ("node 1 (job-node-0-1) is on gpu-node-7",)


def test_a_slow_node_is_only_a_warning_until_it_is_too_slow_for_anything() -> None:
    def speed(rate: int) -> list[Status]:
        job = Simulation(8, outcome=lambda n, p: ("", rate if 5 in (n, p) else 10**9 + 10**6 * n))
        job.come(*range(8))
        assert [found.subject for found in job.loud()] == ["node 5 (job-node-0-5)"]
        return [found.status for found in job.loud()]

    assert speed(100_000_000) == [Status.WARN]
    assert speed(1_000_000) == [Status.FAIL]


@pytest.mark.parametrize("n_nodes", [2, 3, 8])
def test_a_pod_that_is_lost_during_pair_tests_accuses_neither_its_machine_nor_its_partner(n_nodes: int) -> None:
    """It may have been preempted; the others are tested to the end."""
    job, last = Simulation(n_nodes), n_nodes - 1
    answered = job.answer

    def answer(rank: int, message: msg.Message) -> None:
        if isinstance(message, msg.Test) and last == rank:
            return
        if isinstance(message, msg.Test) and str(last) in message.token.split("-"):
            job.say(rank, msg.Result(message.round, (msg.RailResult("no answer", 0),)))
        else:
            answered(rank, message)

    job.answer = answer  # type: ignore[method-assign]
    job.come(*range(n_nodes))
    assert not job.is_over
    job.leave(last)
    job.wait(100)
    assert job.is_over
    (found,) = job.loud()
    assert (found.check, found.subject, found.remedy) == ("roll-call", f"node {last} (job-node-0-{last})", "")
    assert failing_nodes([found], {f"job-node-0-{last}": "gpu-7"}) == f"job-node-0-{last}\tunknown\n"
    assert len({rank for rank, _, _ in job.tests}) == last - (n_nodes == 2)
    assert len(set(job.verdicts().values())) == 1


def test_4096_nodes_are_called_compared_and_tested_and_the_odd_ones_named() -> None:
    job = Simulation(4096, outcome=lambda n, p: ("cut", 0) if 77 in (n, p) else ("", 10**9))
    job.facts = {1234: {"env NCCL_ALGO": "Ring"}}
    job.offsets = {99: 45.0}
    job.come(*range(4096))
    job.wait(60)
    assert job.is_over
    assert {found.subject.split(" (")[0] for found in job.loud()} == {"node 77", "node 99", "node 1234"}
    assert all(len(encode(verdict)) <= msg.MAX_FINDINGS_BYTES for verdict in job.verdicts().values())


def test_4096_nodes_of_which_a_thousand_are_missing_fit_into_one_verdict() -> None:
    job = Simulation(4096, deadline_s=30.0)
    job.come(*range(3000))
    job.wait(31)
    verdict = next(iter(job.verdicts().values()))
    assert len(encode(verdict)) <= msg.MAX_FINDINGS_BYTES
    assert verdict[0].measured == 3000
    assert "node 3000 (job-node-0-3000.job)" in verdict[0].text


def test_what_those_have_found_who_came_is_in_the_verdict_of_all_though_others_never_come() -> None:
    job = Simulation(3)
    job.come(0, 1)
    job.say(1, msg.NodeReport(findings=(failure("shm", "too small"),), is_early=True))
    job.wait(130)
    assert job.is_over
    told = {(found.check, found.subject) for found in job.loud()}
    assert ("shm", "node 1 (job-node-0-1)") in told
    assert ("roll-call", "node 2 (job-node-0-2.job)") in told
    assert len(set(job.verdicts().values())) == 1
