"""docs/migrating.md is true of flytekit: what it makes of tasks, and where a launcher can stand in them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks import frameworks
from tests.kubernetes import pages

pytestmark = [pytest.mark.frameworks, pytest.mark.process, pytest.mark.timeout(frameworks.MAKING_S)]

TASKS = Path(__file__).with_name("flyte_tasks.py")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By the name of a task, what Flyte would be given."""
    folder = tmp_path_factory.mktemp("flyte")
    (folder / "workflow.py").write_text(pages.FLYTE_WORKFLOW.read_text())
    (folder / "train.py").write_text("def fit(lr): return lr\n")
    env = frameworks.env({"PYTHONPATH": f"{folder}:{frameworks.ROOT}"})
    words = [frameworks.python("flyte"), "-W", "ignore", str(TASKS), "workflow"]
    ended = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    told = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    return {one["name"]: one for one in told}


def primary(task: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in task["pod"]["containers"] if one["name"] == "primary")


def test_the_pages_tasks_have_no_command_and_pyflyte_execute_as_args(made: dict[str, dict[str, Any]]) -> None:
    for name in ("on_one_node", "on_three_nodes"):
        container = primary(made[name])
        assert container["command"] == []
        assert container["args"][0] == "pyflyte-execute"
        assert container["args"][-4:] == ["task-module", "workflow", "task-name", name]
    assert made["on_three_nodes"]["type"] == "pytorch"
    custom = made["on_three_nodes"]["custom"]
    assert custom["workerReplicas"]["replicas"] == 2
    assert custom["masterReplicas"]["restartPolicy"] == "RESTART_POLICY_ON_FAILURE"


def test_what_a_pod_template_adds_stays(made: dict[str, dict[str, Any]]) -> None:
    pod = made["on_one_node"]["pod"]
    assert [one["command"][:2] for one in pod["initContainers"]] == [["trainer-launch", "preflight"]]
    assert pod["terminationGracePeriodSeconds"] == 60
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in pod["volumes"]


def test_kfmpi_puts_mpirun_before_it_without_a_command(made: dict[str, dict[str, Any]]) -> None:
    command, args = made["over_mpi"]["container"]
    assert command == []
    assert args[0] == "mpirun"
    assert args[args.index("-np") + 1] == "2"
    assert args.index("python") < args.index("pyflyte-execute")
    assert made["over_mpi"]["custom"]["workerReplicas"]["command"] == ["trainer-launch", "sshd"]
