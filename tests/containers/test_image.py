"""The images themselves: what the launcher adds to one, and that it is what the Dockerfile promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trainer_launch
from tests.containers.images import DOCKERFILE, MAKING_S, NAME, bases, build, image, podman, revision

pytestmark = [pytest.mark.containers, pytest.mark.process, pytest.mark.timeout(MAKING_S)]
ADDED_BYTES = 25_000_000  # by the launcher, to a user's image
TARGETS = ("torch", "mpi", "preflight")
EPOCH = "315532800"
# What the manifests start; Debian's Python has no `python`.
LAUNCHER = frozenset(("trainer-launch", "python3", "sh", "sleep"))
MPI = LAUNCHER | {"mpirun", "ssh", "sshd"}


def facts(name: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = json.loads(podman("image", "inspect", name).stdout)
    return found[0]


def in_image(name: str, *command: str) -> str:
    """What a program in the image says, on both streams."""
    words = ["--rm", "--network", "none", "--read-only", "--user", "1000:1000", "--entrypoint", command[0]]
    ended = podman("run", *words, name, *command[1:])
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("target", ["torch", "preflight"])
def test_the_launcher_adds_at_most_25_mb(target: str) -> None:
    assert 0 < facts(image(target))["Size"] - facts(bases().torch)["Size"] <= ADDED_BYTES


def test_all_images_on_one_base_share_the_layer_of_the_launcher() -> None:
    layers = [facts(image(target))["RootFS"]["Layers"] for target in TARGETS]
    below = len(facts(bases().torch)["RootFS"]["Layers"])
    assert len({found[below] for found in layers}) == 1


def test_nothing_of_the_users_image_is_replaced() -> None:
    """But for the lines of the user in /etc."""
    layer = Path(facts(image("torch"))["GraphDriver"]["Data"]["UpperDir"])
    files = sorted(f"/{path.relative_to(layer)}" for path in layer.rglob("*") if not path.is_dir())
    script = f"import os; print(*filter(os.path.lexists, {files}))"
    ended = podman("run", "--rm", "--network", "none", bases().torch, "python3", "-c", script)
    # Whatever runs or builds makes an empty /etc/hosts where there is none.
    assert set(ended.stdout.split()) - {"/etc/hosts"} == {"/etc/passwd", "/etc/group"}


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_says_what_it_is_and_whose_pid_1_is_the_launcher(target: str) -> None:
    found = facts(image(target))
    labels = {key.rpartition(".")[2]: value for key, value in found["Labels"].items() if "opencontainers" in key}
    assert labels["title"] == "trainer_launch"
    assert labels["version"] == trainer_launch.__version__
    assert labels["revision"] == revision()
    assert labels["licenses"] == "Apache-2.0"
    config = found["Config"]
    assert config["User"] == "1000:1000"
    command = ["preflight"] if target == "preflight" else ["run", "--"]
    assert config["Entrypoint"] == ["trainer-launch", *command]
    assert "Healthcheck" not in config
    assert in_image(image(target), "trainer-launch", "--version").split()[-1] == trainer_launch.__version__


@pytest.mark.parametrize(("target", "programs"), [("torch", LAUNCHER), ("mpi", MPI)])
def test_an_image_has_the_programs_that_the_manifests_start(target: str, programs: frozenset[str]) -> None:
    script = f"PATH=$PATH:/usr/sbin; for one in {' '.join(sorted(programs))}; do command -v $one; done"
    found = in_image(image(target), "sh", "-c", script)
    assert {path.rpartition("/")[2] for path in found.split()} == programs, found


def test_two_builds_of_one_tree_give_the_same_layer_and_python_compiles_nothing_again() -> None:
    layers = []
    for number in range(2):
        name = f"{NAME}/again:{number}"
        arguments = {"BASE_IMAGE": bases().torch, "REVISION": "same"}
        build(name, DOCKERFILE, arguments, target="torch", more=["--no-cache", "--timestamp", EPOCH])
        layers.append(facts(name)["RootFS"]["Layers"])
    assert layers[0] == layers[1]
    # The compiled files hold although all files have been given another time.
    said = in_image(name, "python3", "-v", "-c", "import trainer_launch.cli, pydantic_settings")
    own = [line for line in said.splitlines() if "-packages/" in line and line.startswith("# code object from")]
    assert len(own) > 20, said[-3000:]
    assert [line for line in own if not line.rstrip("'").endswith(".pyc")] == []
