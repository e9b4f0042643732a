"""What a program may do about a finding: only where the cause is certain, and only to the machine that has it."""

from __future__ import annotations

import errno
import json
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from tests.preflight.cluster.job import Simulation, present
from tests.preflight.fleet import Fleet
from tests.preflight.world import Names, run_all, subject
from tests.schemas.validator import schema
from trainer_launch.host.deadline_subprocess import Tried
from trainer_launch.model.findings import OF_MACHINES, REMEDIES, Fault, Finding, Report, Scope, Status
from trainer_launch.preflight import external_check, registry, report_formats, report_page, rules
from trainer_launch.preflight.check import Where
from trainer_launch.preflight.cluster.node_side import failing_nodes
from trainer_launch.preflight.node_preflight import Selection
from trainer_launch.preflight.policy import Policy
from trainer_launch.preflight.report_formats import ReportPlace
from trainer_launch.preflight.rules import with_remedy

HERE = ReportPlace(host="pod-1", node_rank=1, nodes="4", contract="trainer-v2-torch")
BAD_GPU = Finding(
    check="gpu-ecc",
    status=Status.FAIL,
    fault=Fault.NODE,
    scope=Scope.GPU,
    subject="GPU 3",
    text="GPU 3 had 2 errors",
    action="have the GPU reset",
    remedy="RESET",
)
MISSING = Finding(check="roll-call", status=Status.FAIL, fault=Fault.NODE, text="node 2 is missing")


def remedies_of(findings: tuple[Finding, ...]) -> dict[str, str]:
    """The remedy of each loud finding, by check."""
    loud = [one for one in Selection().kept(findings) if one.status in (Status.WARN, Status.FAIL)]
    return {one.check: one.remedy for one in loud}


def cluster(job: Simulation) -> dict[str, str]:
    job.come(*range(job.settings.max_nodes))
    job.wait(200)
    return remedies_of(job.hall.findings)


def test_all_names_are_of_checks() -> None:
    assert {rule.check for rule in rules.RULES} <= set(registry.ids(*Where))


def test_the_schemas_list_the_same_words() -> None:
    published = [
        schema("preflight")["properties"]["findings"]["items"]["properties"]["remedy"]["enum"],
        schema("external")["properties"]["findings"]["items"]["properties"]["remedy"]["enum"],
        list(get_args(external_check._Remedy)),
    ]
    assert published == [["", *REMEDIES]] * 3


@pytest.mark.parametrize(
    ("remedy", "word"), [("RESET", "reset"), ("REBOOT", "reboot"), ("DRAIN", "drain"), ("RMA", "replace")]
)
def test_what_a_program_is_told_to_do_people_are_told_as_well(remedy: str, word: str) -> None:
    assert [rule.action for rule in rules.RULES if rule.remedy == remedy and word not in rule.action] == []
    assert remedy == "RMA" or word in rules._xids([{"RESET": 48, "REBOOT": 79, "DRAIN": 62}[remedy]])[2]


def test_nodes_with_other_images_are_for_the_image() -> None:
    job = Simulation(4)
    job.facts = {2: {"torch": "2.8.0"}}
    assert cluster(job) == {"facts": "FIX_IMAGE"}


def test_a_clock_and_a_node_that_fails_with_all_others_are_of_their_machines() -> None:
    job = Simulation(5, outcome=lambda node, partner: ("", 10**9) if 3 not in (node, partner) else ("reset", 0))
    job.offsets = {2: 60.0}
    assert cluster(job) == {"clock": "DRAIN", "pairs": "DRAIN"}


@pytest.mark.parametrize("gpus", ["7 of H200", "8 of A100"])
def test_a_machine_with_other_gpus_than_the_majority_is_not_drained(gpus: str) -> None:
    """Its pod may have asked for fewer, and a machine of another model is as good as the others."""
    job = Simulation(4)
    job.facts = {rank: {"gpus": gpus if rank == 2 else "8 of H200"} for rank in range(4)}
    assert cluster(job) == {"facts": ""}


@pytest.mark.parametrize("offsets", [{1: 90.0}, {1: 90.0, 2: 90.0}, {1: 90.0, 2: 180.0, 3: 270.0}])
def test_where_no_majority_of_clocks_agrees_none_is_called_wrong_and_no_machine_is_drained(
    offsets: dict[int, float],
) -> None:
    job = Simulation(4 if len(offsets) > 1 else 2)
    job.offsets = offsets
    assert cluster(job) == {"clock": ""}
    (finding,) = job.loud()
    assert (finding.subject, finding.scope, finding.status) == ("", Scope.JOB, Status.FAIL)
    assert "drain" not in finding.action
    assert failing_nodes([finding], {}) == ""


def test_pods_of_one_machine_are_no_majority_of_clocks() -> None:
    job = Simulation(5)
    job.offsets = {4: 60.0}
    for node in range(5):
        job.say(node, replace(present(node), machine="gpu-1" if node < 4 else "gpu-2"))
    assert remedies_of(job.hall.findings) == {"clock": ""}
    assert [finding.subject for finding in job.loud()] == [""]
    job = Simulation(6)
    job.offsets = dict.fromkeys(range(4), 60.0)
    for node in range(6):
        job.say(node, replace(present(node), machine="gpu-1" if node < 4 else f"job-node-0-{node} boot-{node}"))
    (finding,) = job.loud()
    assert (finding.check, finding.subject.count("node "), finding.remedy) == ("clock", 4, "DRAIN")


@pytest.mark.parametrize(("full", "fault"), [({3}, Fault.NODE), ({*range(8)}, Fault.JOB)])
@pytest.mark.parametrize(
    ("check", "number"), [("storage", errno.ENOSPC), ("shm", errno.ENOSPC), ("storage", errno.EROFS)]
)
def test_a_volume_that_is_full_or_read_only_on_few_nodes_is_theirs_and_on_all_the_jobs(
    check: str, number: int, full: set[int], fault: Fault
) -> None:
    """Such as a local disk, which the kernel mounts again after an error: the job may run on other machines."""
    fleet = Fleet(8)
    result = Tried(stage="write", errno=number)
    changes: dict[str, dict[str, Any]] = {
        "shm": {"write_problem": lambda size: number},
        "storage": {"try_out": lambda what, *_: result if what == "storage" else Tried(values={"bytes": 1.0})},
    }
    for rank in full:
        fleet.nodes[rank].change(**changes[check])
    (finding,) = [one for one in fleet.findings() if one.status is Status.FAIL]
    assert (finding.check, finding.fault, finding.remedy) == (check, fault, "FIX_JOB" if len(full) == 8 else "")


def test_a_link_between_healthy_nodes_and_a_pair_of_which_either_may_be_faulty_have_none() -> None:
    job = Simulation(5, outcome=lambda node, partner: ("reset", 0) if {node, partner} == {1, 2} else ("", 10**9))
    assert cluster(job) == {"pairs": ""}
    job = Simulation(2, outcome=lambda node, partner: ("reset", 0))
    assert cluster(job) == {"pairs": ""}


@pytest.mark.parametrize(
    ("rail", "rate", "limited", "expected"),
    [
        (2, 22e9, 0, ("fail", "DRAIN")),
        (2, 22e9, 8, ("fail", "DRAIN")),
        (None, 22e9, 0, ("warn", "")),
        (None, 6e9, 0, ("warn", "")),
        (None, 1e9, 0, ("fail", "")),
    ],
)
def test_a_node_that_is_slow_on_all_rails_is_not_accused_as_its_switch_may_be_shared(
    rail: int | None, rate: float, limited: int, expected: tuple[str, str]
) -> None:
    fleet = Fleet(8)
    for node in fleet.nodes[:limited]:
        node.each_card(power_limit=[500_000, 700_000])  # which says nothing of links
    fleet.rated = lambda one, other, on: ("", rate) if 3 in (one, other) and rail in (None, on) else None
    (finding,) = [one for one in fleet.findings() if one.check == "pairs"]
    assert (finding.status.value, finding.remedy) == expected
    assert "node 3 (job-node-0-3)" in finding.subject


def test_a_node_that_is_missing_a_name_that_does_not_resolve_and_a_slow_clock_have_none() -> None:
    job = Simulation(3)
    job.come(0, 1)
    job.wait(200)
    assert remedies_of(job.hall.findings) == {"roll-call": ""}
    assert remedies_of(run_all(subject(lookup=Names({}))).findings)["dns"] == ""
    job = Simulation(4)
    job.offsets = {2: 3.0}
    assert cluster(job) == {"clock": ""}


def test_a_machines_remedy_never_stands_on_what_is_about_no_single_machine() -> None:
    for scope in (Scope.JOB, Scope.LINK):
        assert with_remedy(replace(BAD_GPU, scope=scope)).remedy == ""
    assert with_remedy(replace(BAD_GPU, remedy="FIX_IMAGE", scope=Scope.JOB)).remedy == "FIX_IMAGE"


def test_a_policy_adds_no_remedy_and_takes_none_away() -> None:
    told = Finding(check="storage", status=Status.FAIL, fault=Fault.NODE, text="hangs")
    graded = Policy(rules={"storage": "fatal", "gpu-ecc": "warn"}).graded
    assert with_remedy(graded(with_remedy(told))).remedy == ""
    assert graded(with_remedy(BAD_GPU)).remedy == "RESET"


def test_nodes_of_one_check_that_need_different_things_are_not_told_as_one() -> None:
    job = Simulation(4)
    job.own = {1: (BAD_GPU,), 2: (replace(BAD_GPU, remedy="RMA"),), 3: (BAD_GPU,)}
    job.come(0, 1, 2, 3)
    job.wait(200)
    told = {one.remedy: one.subject for one in job.loud()}
    assert told == {"RESET": "node 1 (job-node-0-1), node 3 (job-node-0-3)", "RMA": "node 2 (job-node-0-2)"}


def test_the_remedy_is_in_the_data_on_the_page_on_the_screen_and_in_the_pods_status() -> None:
    report = Report(findings=(BAD_GPU,))
    document = json.loads(json.dumps(report_formats.document(report, HERE, exit_code=20, at_s=1.0)))
    assert document["findings"][0]["remedy"] == "RESET"
    assert "-> have the GPU reset [RESET]" in report_formats.screen(report, HERE, 20)
    assert "have the GPU reset [RESET]" in report_page.page(report, HERE, 20, 1.0)
    first, *rest = report_formats.termination_message(report, HERE, 20).splitlines()
    assert first.startswith("reason=PreflightRetryable exit=20 retryable=true node=1 host=pod-1 remedy=RESET | ")
    assert "  What to do: have the GPU reset [RESET]" in rest


@pytest.mark.parametrize("remedy", OF_MACHINES)
def test_the_status_of_a_healthy_machines_pod_names_no_remedy_of_another_machine(remedy: str) -> None:
    other = replace(BAD_GPU, subject="node 2 (pod-2), GPU 3", remedy=remedy)
    first = report_formats.termination_message(Report(findings=(other,)), HERE, 20).splitlines()[0]
    assert " remedy=" not in first
    own = replace(other, subject="node 2 (pod-2), node 1 (pod-1)")
    assert f" remedy={remedy} " in report_formats.termination_message(Report(findings=(own,)), HERE, 20)


def test_what_the_job_must_fix_is_in_the_status_of_each_pod_and_warnings_ask_for_nothing() -> None:
    other = Finding(
        check="facts", status=Status.FAIL, fault=Fault.JOB, subject="node 2 (pod-2)", text="torch differs"
    )
    told = replace(other, remedy="FIX_IMAGE")
    assert " remedy=FIX_IMAGE " in report_formats.termination_message(Report(findings=(told, MISSING)), HERE, 30)
    warned = replace(told, status=Status.WARN, fault=None)
    assert " remedy=" not in report_formats.termination_message(Report(findings=(warned,)), HERE, 0)
    assert " remedy=" not in report_formats.termination_message(Report(findings=(MISSING,)), HERE, 20)
