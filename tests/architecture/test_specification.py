"""The tests can be read as a specification: `make spec` prints it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import spec
from tests.architecture.package import ROOT
from tests.architecture.rooms import CONTRIBUTING, arrows

each_file = pytest.mark.parametrize("path", spec.files(), ids=lambda path: path.relative_to(spec.TESTS).as_posix())


@each_file
def test_each_file_says_what_it_holds(path: Path) -> None:
    assert spec.purpose(path).endswith(".")


@each_file
def test_each_test_is_called_by_a_sentence(path: Path) -> None:
    assert [sentence for sentence in spec.sentences(path) if len(sentence.split()) < 3] == []


def test_each_folder_of_tests_is_a_room_of_the_package_or_explained() -> None:
    told = CONTRIBUTING.read_text(encoding="utf-8").partition("## The tests")[2].partition("\n## ")[0]
    explained = set(re.findall(r"^\| `(\w+)/` \|", told, re.MULTILINE))
    folders = {path.name for path in spec.TESTS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - set(arrows()) == explained


def test_it_is_printed_by_room() -> None:
    argv = (sys.executable, str(ROOT / "tests" / "spec.py"), "architecture")
    printed = subprocess.run(argv, text=True, capture_output=True, timeout=30, check=True).stdout
    assert printed.startswith("\n# architecture\n")
    assert "  - it is printed by room\n" in printed
