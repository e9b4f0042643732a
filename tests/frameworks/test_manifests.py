"""Every manifest that we publish is one that its controller's API takes, whole."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.frameworks import frameworks
from tests.kubernetes.published import ALL

pytestmark = [pytest.mark.frameworks, pytest.mark.process, pytest.mark.timeout(frameworks.MAKING_S)]

READER = Path(__file__).with_name("api_classes.py")
DISTIL = Path(__file__).with_name("distil.py")
SCHEMAS = Path(__file__).parents[1] / "kubernetes" / "schemas"


def wrong_in(*paths: Path) -> list[str]:
    words = [frameworks.python("kubernetes"), *map(str, (READER, *paths))]
    told: str = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return told.splitlines()


def test_published_manifests_hold_nothing_that_their_api_does_not_know() -> None:
    assert len(ALL) > 8
    assert wrong_in(*ALL) == []


def test_the_schemas_that_quick_tests_read_are_those_of_the_published_classes() -> None:
    words = [frameworks.python("kubernetes"), str(DISTIL)]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    distilled = [json.loads(line) for line in told.splitlines()]
    assert [one["file"] for one in distilled] == ["kubernetes", "trainer", "training-operator"]
    for one in distilled:
        kept = json.loads((SCHEMAS / f"{one.pop('file')}.json").read_text())
        assert kept == one, "to renew a file, write there what distil.py prints for it"


@pytest.mark.parametrize(
    ("name", "right", "mistaken", "told"),
    [
        ("trainjob-torch.yaml", "numProcPerNode:", "numProcsPerNode:", "numProcsPerNode is not a field"),
        ("trainjob-torch.yaml", "replicatedJobs:", "replicatedJob:", "replicatedJob is not a field"),
        ("trainjob-torch.yaml", "numNodes: 3", "numNodes: three", "refused"),
        ("pytorch-elastic.yaml", "maxRestarts:", "maximumRestarts:", "maximumRestarts is not a field"),
        ("pytorch-elastic.yaml", "mountPath:", "path:", "path is not a field"),
        ("mpijob-horovod-elastic.yaml", "slotsPerWorker:", "slots:", "slots is not a field"),
    ],
)
def test_a_mistake_in_a_manifest_is_seen(tmp_path: Path, name: str, right: str, mistaken: str, told: str) -> None:
    text = (frameworks.EXAMPLES / name).read_text()
    assert right in text
    changed = tmp_path / name
    changed.write_text(text.replace(right, mistaken))
    assert any(told in line for line in wrong_in(changed)), wrong_in(changed)
