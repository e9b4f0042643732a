"""Every contract, every engine and every check is listed once, by a name of its own."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import get_args

import pytest

from tests.architecture.package import ROOT, module_of, plugins_in
from trainer_launch.model.settings import Settings

REGISTRIES = {
    "contracts": ("contracts.CONTRACTS", ["contracts"]),
    "engines": ("planning.engines.ENGINES", ["planning/engines"]),
    "preflight": ("preflight.CHECKS", ["preflight/container", "preflight/gpu"]),
}

each_registry = pytest.mark.parametrize("folder", REGISTRIES)


def listed_in(folder: str) -> list[ModuleType]:
    """The modules of a registry, in its order; a registry holds modules or, to load fewer of them, their names."""
    name, _, registry = REGISTRIES[folder][0].rpartition(".")
    package = import_module(f"trainer_launch.{name}")
    entries: tuple[ModuleType | str, ...] = getattr(package, registry)
    return [
        entry if isinstance(entry, ModuleType) else import_module(f"{package.__name__}.{entry.rpartition('.')[2]}")
        for entry in entries
    ]


@each_registry
def test_every_file_is_listed(folder: str) -> None:
    assert sorted(module.__name__ for module in listed_in(folder)) == sorted(
        module_of(path) for place in REGISTRIES[folder][1] for path in plugins_in(place)
    )


@each_registry
def test_every_name_is_unique(folder: str) -> None:
    names = [module.NAME for module in listed_in(folder)]
    assert len(set(names)) == len(names)


@each_registry
def test_every_file_says_what_it_is_for(folder: str) -> None:
    assert [module.NAME for module in listed_in(folder) if not module.__doc__] == []


def test_every_engine_can_be_asked_for_but_sshd_which_has_a_command_of_its_own() -> None:
    names = {engine.NAME for engine in listed_in("engines")} - {"sshd"}
    assert set(get_args(Settings.model_fields["engine"].annotation)) == {"auto", *names}


@pytest.mark.parametrize("folder", ["contracts", "preflight"])
def test_every_name_has_its_row_in_the_page(folder: str) -> None:
    page = (ROOT / "docs" / f"{folder}.md").read_text(encoding="utf-8")
    assert [module.NAME for module in listed_in(folder) if f"`{module.NAME}`" not in page] == []
