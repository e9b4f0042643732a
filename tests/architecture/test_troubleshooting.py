"""docs/troubleshooting.md names what the code can print, all of it that has a name, and nothing else."""

from __future__ import annotations

import re

import pytest

from tests.architecture import messages
from tests.architecture.package import ROOT
from trainer_launch import preflight
from trainer_launch.model import Verdict, exit_codes
from trainer_launch.preflight.cluster import participation
from trainer_launch.preflight.mpi import launcher_checks
from trainer_launch.rehearsal.script_checks import ScriptCheck
from trainer_launch.supervisor import error_lines, failure

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"`([^`\n]+)`")
# A column of the tables that quotes messages, by the table's head; their other words are not ours.
MESSAGES = {"| it says |": 1, "| why it was not started again |": 1, "| message |": 1, "| check |": 2}
NAMES = {"| reason |": 1, "| check |": 1, "| failed check |": 1}
RULES: list[failure._Rule | error_lines.Symptom] = [*failure.RULES, *error_lines.SYMPTOMS]


def column(heads: dict[str, int]) -> list[str]:
    """What stands in code in that column of the tables that begin so."""
    found: list[str] = []
    for table in re.findall(r"(?:^\|.*\n)+", FENCED.sub("", PAGE), re.MULTILINE):
        at = next((at for head, at in heads.items() if table.startswith(head)), None)
        if at is not None:
            found += [word for row in table.splitlines()[2:] for word in QUOTED.findall(row.split("|")[at])]
    return found


def test_the_tables_are_found() -> None:
    assert len(column(MESSAGES)) > 100
    assert len(column(NAMES)) > 60


@pytest.mark.parametrize("message", sorted(set(column(MESSAGES))))
def test_a_message_on_the_page_is_one_of_the_code(message: str) -> None:
    words = message.removesuffix(messages.GAP).rstrip()
    assert len(words) > 8
    assert words in messages.texts(), f"no text in the package has {words!r}, with … for what is filled in"


def test_every_reason_has_its_entry_and_no_other() -> None:
    reasons = {rule.reason for rule in RULES} | {verdict.value for verdict in Verdict} | {"NotStarted"}
    assert set(column({"| reason |": 1})) == reasons


@pytest.mark.parametrize("what", sorted({rule.what for rule in RULES} - {""}))
def test_every_rule_of_failure_has_its_entry(what: str) -> None:
    assert what in column({"| it says |": 1})


def test_every_check_has_its_entry_and_no_other() -> None:
    checks = [*(check.NAME for check in preflight.CHECKS), *participation.CHECKS, *launcher_checks.CHECKS]
    assert sorted(column({"| check |": 1})) == sorted(set(checks))


def test_every_failed_check_of_a_rehearsal_has_its_entry_and_no_other() -> None:
    assert column({"| failed check |": 1}) == [check.value for check in ScriptCheck]


def test_every_exit_code_of_our_own_has_its_entry() -> None:
    table = PAGE.partition("| code |")[2].partition("\n\n")[0]
    shown = {int(code) for row in table.splitlines()[2:] for code in re.findall(r"\b\d+\b", row.split("|")[1])}
    ours = {value for name, value in vars(exit_codes).items() if name.isupper() and not name.startswith("_")}
    assert ours - shown == set()
