"""What is in a registry or a table is listed once, used and documented: plug-ins, options, what processes share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib import import_module

from tests.architecture.package import FILES, ROOT, contract_files, module_of, name_of
from trainer_launch import contracts
from trainer_launch.commands import options
from trainer_launch.contracts import CONTRACTS
from trainer_launch.contracts.source import Contract
from trainer_launch.host import runtime_directory
from trainer_launch.model.settings import INTERNAL, OF_SHIMS, PREFIX, Settings, flag_of
from trainer_launch.planning import engines
from trainer_launch.planning.task import Engine
from trainer_launch.preflight import registry
from trainer_launch.preflight.check import Check, Where

NAMED = {
    name
    for path in FILES
    if name_of(path) != "model/settings.py"
    for name in re.findall(PREFIX + r"([A-Z_]+)", path.read_text(encoding="utf-8"))
}
# What our own processes leave for each other.
OUR_VARIABLES = tuple(
    getattr(runtime_directory, name)
    for name in ("VARIABLE", "MPI_RUN", "NODE_LABEL", "INSIDE", "IN_COLOR", "LISTEN_AT", "GENERATION", "KEPT")
)


def test_every_engine_that_a_module_defines_is_listed() -> None:
    modules = [import_module(module_of(path)) for path in FILES if name_of(path).startswith("planning/")]
    defined = {value.name for module in modules for value in vars(module).values() if isinstance(value, Engine)}
    assert defined == {engine.name for engine in engines.ENGINES}


def test_every_contract_that_a_module_defines_is_listed() -> None:
    modules = [contracts, *(import_module(module_of(path)) for path in contract_files())]
    defined = [one for module in modules for one in vars(module).values() if isinstance(one, Contract)]
    assert sorted(one.name for one in defined) == sorted(one.name for one in CONTRACTS)


def test_every_engine_can_be_asked_for_but_sshd_and_front_ends_which_are_commands() -> None:
    names = {engine.name for engine in engines.ENGINES} - {"sshd", "front end"}
    assert set(Settings.model_fields["engine"].choices) == {"auto", *names}


def test_every_contract_has_its_row_in_the_page() -> None:
    page = (ROOT / "docs" / "contracts.md").read_text(encoding="utf-8")
    assert [one.name for one in CONTRACTS if f"`{one.name}`" not in page] == []


def test_every_check_is_listed_once_and_has_a_title() -> None:
    assert len(set(registry.ids(*Where))) == len(registry.CHECKS)
    assert [check.id for check in registry.CHECKS if not re.fullmatch(r".{15,}[.]", check.title)] == []


def test_every_check_that_a_module_defines_is_listed() -> None:
    names = map(module_of, FILES)
    ours = [name for name in names if ".preflight" in name and ".children." not in name]  # those are programs
    defined = [value for name in ours for value in vars(import_module(name)).values() if isinstance(value, Check)]
    assert [check.id for check in defined if not any(check is listed for listed in registry.CHECKS)] == []


def test_every_variable_is_a_setting_or_internal() -> None:
    assert INTERNAL | OF_SHIMS | {name.upper() for name in Settings.model_fields} >= NAMED


def test_whatever_a_pods_own_command_line_says_a_variable_can_say() -> None:
    parsers = [options.parser_of("trainer-launch", name) for name in ("run", "sshd")]
    known = {flag_of(name) for name in Settings.model_fields} | {"--help", "--help-all", "--standalone"}
    assert {words for words in flags(parsers) if not known & set(words)} == set()


def test_every_internal_variable_is_used() -> None:
    assert NAMED >= INTERNAL


def flags(parsers: Sequence[argparse.ArgumentParser]) -> set[tuple[str, ...]]:
    """The ways in which each option of these parsers can be written."""
    actions = [action for parser in parsers for action in parser._actions]
    return {tuple(action.option_strings) for action in actions if action.option_strings}


def test_the_private_variables_are_those_of_the_table() -> None:
    assert {PREFIX + name for name in INTERNAL} == set(OUR_VARIABLES)
