"""The schemas by which tests/kubernetes checks each published manifest are those of the operators' own classes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.frameworks import frameworks

pytestmark = [pytest.mark.frameworks, pytest.mark.process, pytest.mark.timeout(frameworks.MAKING_S)]

DISTIL = Path(__file__).with_name("distil.py")
SCHEMAS = Path(__file__).parents[1] / "kubernetes" / "schemas"


def test_the_schemas_that_quick_tests_read_are_those_of_the_published_classes() -> None:
    words = [frameworks.python("kubernetes"), str(DISTIL)]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    distilled = [json.loads(line) for line in told.splitlines()]
    assert [one["file"] for one in distilled] == ["kubernetes", "trainer", "training-operator"]
    for one in distilled:
        kept = json.loads((SCHEMAS / f"{one.pop('file')}.json").read_text())
        assert kept == one, "to renew a file, write there what distil.py prints for it"
