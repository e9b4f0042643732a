"""An unmodified image with Python and torch, in which a user only says pip install: in the ways that users have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.containers import jobs
from tests.containers.images import MAKING_S, ROOT, bases, build, launcher_wheels, podman, revision
from tests.containers.podman import Cluster, Container

pytestmark = [pytest.mark.containers, pytest.mark.process, pytest.mark.timeout(MAKING_S)]

JOB = " ".join(jobs.train(3))
# An image of PyTorch's starts as root, with its own file system to write into.
AS_ROOT = ("--user", "0:0", "--read-only=false")
OWN_HOME = ("-e", "HOME=/tmp/home")


def start(cluster: Cluster, command: Sequence[str], how: Sequence[str] = ()) -> Container:
    """One pod with two workers; pip finds what a registry would have in a folder."""
    found = ["-e", "PIP_FIND_LINKS=/wheelhouse", "-v", f"{launcher_wheels()}:/wheelhouse:ro"]
    env = {**jobs.env_of(0, pods=1), "PET_NPROC_PER_NODE": "2"}
    options = jobs.options(cluster, more=[*found, *how])
    return cluster.start("job-node-0-0", bases().torch, command, env=env, options=options, entrypoint=False)


@pytest.mark.parametrize(
    ("script", "how"),
    [
        pytest.param("pip install -q trainer-launch && exec trainer-launch run --", AS_ROOT, id="as root"),
        pytest.param(
            "pip install -q --user trainer-launch && exec ~/.local/bin/trainer-launch run --", OWN_HOME, id="--user"
        ),
        pytest.param(  # pip sees that it may not write site-packages, and the user's bin is not in PATH
            "pip install -q trainer-launch && exec python3 -m trainer_launch run --", OWN_HOME, id="read-only"
        ),
        pytest.param(
            "python3 -m venv --system-site-packages /tmp/venv && . /tmp/venv/bin/activate"
            " && pip install -q trainer-launch && exec trainer-launch run --",
            (),
            id="venv",
        ),
        pytest.param(  # without a home, as a user of nobody's
            "pip install -q --target /tmp/site trainer-launch && export PYTHONPATH=/tmp/site"
            " && exec python3 -m trainer_launch run --",
            ("--user", "4711:0"),
            id="--target",
        ),
    ],
)
def test_pip_install_in_an_unmodified_image_is_enough(cluster: Cluster, script: str, how: Sequence[str]) -> None:
    pod = start(cluster, ["sh", "-c", f"{script} {JOB}"], how)
    assert pod.code() == 0, pod.logs()
    assert jobs.steps_in(pod.logs())[-1] == 3
    assert pod.last_words().startswith("reason=Succeeded")
    assert jobs.checkpoint(cluster).exists()


def test_the_recipe_for_an_own_image_gives_one_whose_args_are_the_program(cluster: Cluster, tmp_path: Path) -> None:
    _, _, told = (ROOT / "docker" / "README.md").read_text().partition("```dockerfile\n")
    recipe = told.partition("```")[0]
    assert "FROM your/training-image\n" in recipe
    path = tmp_path / "Dockerfile"
    path.write_text(recipe.replace("your/training-image", bases().torch))
    name = f"localhost/trainer-launch-test/recipe:{revision()}"
    build(name, path, {}, wheels=launcher_wheels())
    options = jobs.options(cluster)
    pod = cluster.start("job-node-0-0", name, jobs.train(3), env=jobs.env_of(0, pods=1), options=options)
    assert pod.code() == 0, pod.logs()
    assert json.loads(podman("image", "inspect", name).stdout)[0]["Config"]["Entrypoint"] == [
        "trainer-launch",
        "run",
        "--",
    ]
    assert jobs.steps_in(pod.logs())[-1] == 3
