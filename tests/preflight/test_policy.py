"""--policy: severities of checks as data, from words and files; and what a policy never does."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.preflight.cluster.job import Simulation
from tests.refusals import refusal
from trainer_launch.model import settings
from trainer_launch.model.errors import UsageError
from trainer_launch.model.findings import Fault, Finding, PreflightVerdict, Report, Severity, Status
from trainer_launch.preflight import registry, report_formats
from trainer_launch.preflight.check import Where
from trainer_launch.preflight.cluster.node_side import failing_nodes
from trainer_launch.preflight.node_preflight import Selection
from trainer_launch.preflight.policy import Policy, parse_flag
from trainer_launch.preflight.report_formats import ReportPlace

CHECKS = registry.ids(*Where)
HERE = ReportPlace(host="pod-1", node_rank=1, nodes="2", contract="trainer-v2-torch")
BROKEN = Finding(check="gpu-ecc", status=Status.FAIL, fault=Fault.NODE, text="3 errors", subject="node 1 (pod-1)")
WARNED = Finding(check="clock", status=Status.WARN, text="2 s ahead", subject="node 1 (pod-1)")
UNKNOWN = Finding(check="gpu-ecc", status=Status.UNKNOWN, text="not told")
PASSED = Finding(check="gpu-ecc", status=Status.PASS, text="no error")


def policy(text: str) -> Policy:
    return parse_flag(text)


@pytest.mark.parametrize(
    ("word", "severity"), [("warn", Severity.WARNING), ("fail", Severity.RETRYABLE), ("fatal", Severity.FATAL)]
)
@pytest.mark.parametrize("finding", [BROKEN, WARNED])
def test_a_warning_and_a_failure_get_the_severity_of_their_rule_and_keep_their_own_beside_it(
    finding: Finding, word: str, severity: Severity
) -> None:
    graded = policy(f"{finding.check}={word}").graded(finding)
    assert graded.severity is severity
    assert graded.without_policy is (None if severity is finding.severity else finding.severity)
    assert policy(f"{finding.check}={word}").graded(graded) == graded, "each node grades what others have graded"


@pytest.mark.parametrize("text", ["gpu-ecc=fatal", "gpu-ecc=fail", "gpu-ecc=warn", "observe"])
def test_what_is_unknown_or_passed_stays_so(text: str) -> None:
    assert policy(text).graded(UNKNOWN) == UNKNOWN
    assert policy(text).graded(PASSED) == PASSED


def test_a_policy_for_one_check_changes_no_other() -> None:
    assert policy("clock=fatal").graded(BROKEN) == BROKEN
    assert policy("").graded(BROKEN) == BROKEN


def test_observe_fails_none_whatever_else_is_said_and_runs_all() -> None:
    observed = policy("gpu-ecc=fatal,observe")
    graded = observed.graded(BROKEN)
    assert (graded.severity, graded.without_policy) == (Severity.WARNING, Severity.RETRYABLE)
    assert observed.graded(WARNED) == WARNED
    assert {check.id for check in Selection(policy=policy("observe")).at(*Where)} == set(CHECKS)


def test_a_finding_of_all_nodes_is_graded_as_one_of_this_node_is() -> None:
    job = Simulation(4)
    job.offsets = {2: 60.0}
    job.come(0, 1, 2, 3)
    for text, verdict in (
        ("", PreflightVerdict.RETRYABLE),
        ("clock=warn", PreflightVerdict.WARN),
        ("clock=fatal", PreflightVerdict.FATAL),
    ):
        selection = Selection(policy=policy(text))
        assert Report(findings=selection.kept(job.hall.findings)).verdict is verdict
    assert not any(one.check == "clock" for one in Selection(policy=policy("clock=off")).kept(job.hall.findings))


def test_a_rule_for_external_holds_for_all_that_the_command_says_unless_one_has_its_own() -> None:
    told = replace(BROKEN, check="external-dcgm")
    assert policy("external=warn").graded(told).severity is Severity.WARNING
    assert policy("external=warn,external-dcgm=fatal").graded(told).severity is Severity.FATAL
    assert policy("external=off").leaves_out("external-dcgm")


def test_a_policy_quarantines_nobody_whom_the_check_itself_does_not_find_faulty() -> None:
    """Which machines are bad is a matter of evidence, and not of what a site wants to stop for."""
    assert failing_nodes([BROKEN], {}) == "pod-1\tunknown\n"
    assert failing_nodes([policy("clock=fail").graded(WARNED)], {}) == ""
    assert failing_nodes([policy("gpu-ecc=warn").graded(BROKEN), policy("observe").graded(BROKEN)], {}) == ""


def test_what_a_policy_changed_is_on_the_screen_in_the_data_and_in_the_pods_status() -> None:
    observed = policy("observe")
    report = Report(findings=(observed.graded(BROKEN), WARNED), silenced=("cpu",))
    screen = report_formats.screen(report, HERE, 0)
    assert "WARN gpu-ecc (this node) [policy: was FAIL]: 3 errors" in screen
    assert "silenced: cpu" in screen
    assert screen.count("policy: was") == 1
    assert "WARN gpu-ecc [policy: was FAIL]: 3 errors" in report_formats.termination_message(report, HERE, 0)
    document = report_formats.document(report, HERE, policy=observed, exit_code=0, at_s=1.0)
    assert document["policy"] == {"observe": True, "rules": {}}
    _, findings = report_formats.parse(json.dumps(document).encode())
    assert [finding.without_policy for finding in findings] == [Severity.RETRYABLE, None]


TOML = """
observe = false
[rules]
cpu = "off"  # few CPUs are usual here
clock = "fatal"
"""


def test_words_and_files_say_the_same_and_the_last_one_counts(tmp_path: Path) -> None:
    site = tmp_path / "site.json"
    site.write_text(json.dumps({"rules": {"cpu": "off", "clock": "fatal"}}))
    told = policy(f"{site}, clock = warn")
    assert told.rules == {"cpu": "off", "clock": "warn"}
    assert policy(f"clock=warn,{site}") == policy("cpu=off,clock=fatal")
    assert policy(str(site)).fingerprint == policy("clock=fatal,cpu=off").fingerprint
    assert policy(str(site)).fingerprint != policy("clock=fail,cpu=off").fingerprint
    assert (policy("off").is_off, policy("off,observe").is_off, policy(f"off,{site}").is_off) == (
        True,
        False,
        False,
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TOML came with Python 3.11")
def test_toml_is_read_as_json_is(tmp_path: Path) -> None:
    site = tmp_path / "site.TOML"
    site.write_text(TOML)
    assert policy(str(site)) == policy("cpu=off,clock=fatal")
    site.write_text("[rules]\ncpu = off\n")
    with pytest.raises(UsageError, match=rf"^--policy {site}: .*\(at line 2, column 7\); expected rules"):
        policy(str(site))


def test_an_observing_file_observes_until_a_later_one_does_not(tmp_path: Path) -> None:
    site, other = tmp_path / "site.json", tmp_path / "other.json"
    site.write_text('{"observe": true}')
    other.write_text('{"observe": false}')
    assert policy(f"{site},cpu=off").observe
    assert not policy(f"{site},{other}").observe


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "obsrve",
            "--policy has 'obsrve'; expected a file that ends with .toml or .json, CHECK=off|warn|fail|fatal",
        ),
        ("obsrve", "did you mean observe?"),
        ("dnss=off", "--policy names 'dnss', which is not a check; did you mean dns?"),
        ("zzz=off", "--policy names 'zzz', which is not a check; preflight --list prints all checks"),
        ("external-A b=off", "--policy names 'external-A b', which is not a check"),
        ("dns=of", "--policy: rule dns: expected off, warn, fail, fatal, got 'of'; did you mean off?"),
    ],
)
def test_a_word_that_makes_no_sense_is_one_clear_error(text: str, sentence: str) -> None:
    assert sentence in refusal(lambda: policy(text))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "Input data was truncated"),
        (
            '{"cpu": "off"}',
            "Object contains unknown field `cpu`; expected rules, a severity for each check, and observe",
        ),
        ('{"rules": {"dnss": "off"}}', "names 'dnss', which is not a check; did you mean dns?"),
        (
            '{"rules": {"cpu": "of"}}',
            "rule cpu: expected off, warn, fail, fatal, got 'of'; did you mean off?",
        ),
        ('{"rules": {"cpu": 1}}', "Expected `str`, got `int` - at `$.rules"),
        ("[" * 50_000, "Expected `object`"),
        (" " * (1 << 17), "is larger than 65536 bytes"),
        ("\n\n\xe9", "malformed"),
    ],
)
def test_every_error_of_a_file_names_the_file_and_where_it_is(content: str, sentence: str, tmp_path: Path) -> None:
    site = tmp_path / "site.json"
    site.write_text(content, encoding="latin-1")
    said = refusal(lambda: policy(str(site)))
    assert said.startswith(f"--policy {site}")
    assert sentence in said
    assert len(said.splitlines()) == 1


def test_what_is_no_readable_file_is_said_and_nobody_waits_for_it(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe.json", tmp_path / "folder.json"
    os.mkfifo(pipe)
    folder.mkdir()
    for path, why in (
        (pipe, "it is not a regular file that this user may read"),
        (folder, "it is not a regular file that this user may read"),
        (tmp_path / "gone.json", "No such file or directory"),
    ):
        with pytest.raises(UsageError, match=f"^--policy {path} cannot be read: {why}$"):
            policy(str(path))


@pytest.mark.parametrize("flag", ["--skip", "--fatal", "--mode", "--preflight"])
def test_the_options_that_a_policy_replaces_name_it(flag: str) -> None:
    variable = settings.variable_of(flag.removeprefix("--"))
    with pytest.raises(UsageError, match=f"^{variable} was removed in 0.3; use --policy "):
        settings.load({}, {variable: "warn"})
