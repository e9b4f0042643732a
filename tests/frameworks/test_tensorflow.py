"""A TFJob of all roles trains with real TensorFlow, and gets over lost pods as far as TensorFlow can."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.frameworks import frameworks
from tests.frameworks.rehearsals import (
    AT_100,
    RUN_S,
    assert_learnt,
    changed,
    lives,
    succeeded,
)
from trainer_launch.model import exit_codes

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.process,
    pytest.mark.timeout(frameworks.MAKING_S + RUN_S),
]
ROLES = ("chief-0", "ps-0", "worker-0", "worker-1", "evaluator-0")


def longer(folder: Path) -> Path:
    """The same job with steps enough that a fault comes before its end on a busy machine, too."""
    return changed("tfjob-ps.yaml", folder, lambda text: text.replace('"600"', '"2000"'))


def test_a_job_of_all_roles_ends_with_its_chief_and_its_checkpoints_are_looked_at() -> None:
    output = succeeded("tensorflow", "tfjob-ps.yaml")
    assert "TFJob tfjob-ps: Succeeded" in output
    assert_learnt(output)
    looked_at = [float(loss) for loss in re.findall(r"evaluated step \d+: held-out loss ([\d.]+)", output)]
    assert looked_at[0] > looked_at[-1]
    assert [lives(output, f"tfjob-ps-{role}") for role in ROLES] == [(1, 0)] * len(ROLES)


@pytest.mark.parametrize("lost", ["worker-1", "chief-0"])
def test_a_job_of_all_roles_gets_over_the_loss_of_any(lost: str, tmp_path: Path) -> None:
    """The other worker does a lost one's work; a new chief goes on from the checkpoint."""
    output = succeeded("tensorflow", longer(tmp_path), f"kill pod pod={lost} {AT_100}")
    once = dict.fromkeys(ROLES, (1, 0))
    assert {role: lives(output, f"tfjob-ps-{role}") for role in ROLES} == {**once, lost: (2, 0)}
    assert ("resumed at step" in output) == (lost == "chief-0")


def test_a_lost_parameter_server_ends_the_chief_which_goes_on_from_the_checkpoint_when_it_is_back(
    tmp_path: Path,
) -> None:
    """As a rule it ends once; twice was seen on a busy machine. How servers and workers find each other again,
    that is up to TensorFlow. Ours is that every such end is known as a lost peer, and that the job goes on.
    """
    manifest = longer(tmp_path)
    manifest.write_text(manifest.read_text().replace("run, --]", "run, --prefix, --]"))
    output = succeeded("tensorflow", manifest, f"kill pod pod=ps-0 {AT_100}")
    found = {role: lives(output, f"tfjob-ps-{role}") for role in ROLES}
    starts, restarts = found.pop("chief-0")
    assert starts == 1
    assert 1 <= restarts <= 3, output
    assert output.count(f"tfjob-ps-chief-0 ended with exit code {exit_codes.INFRASTRUCTURE}") == restarts, output
    once = dict.fromkeys(found, (1, 0))
    assert found == {**once, "ps-0": (2, 0)}
    assert "resumed at step" in output
