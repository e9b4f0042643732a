"""The page on migrating: each example is taken by its operator's API, and runs."""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.launching import launched, start
from tests.kubernetes import pages, published, schema

DIFFS = pages.blocks(pages.PAGE, "diff")
each_diff = pytest.mark.parametrize(
    "diff",
    DIFFS,
    ids=[yaml.safe_load(pages.after(text))["kind"] for text in DIFFS],
)
FLYTE_PROGRAM = pages.FLYTE_WORKFLOW.read_text(encoding="utf-8")
FLYTE_JOB = Path(__file__).with_name("flyte-pytorchjob.yaml").read_text(encoding="utf-8")
RUNTIMES = published.KUBERNETES / "runtimes"
SCRIPT = """
import os, sys
env = os.environ
sys.stdout.write(f"rank {env.get('OMPI_COMM_WORLD_RANK') or env['RANK']} has {sys.argv[1:]}\\n")
"""
FIT = """
import torch.distributed as dist

def fit(lr):
    dist.init_process_group("gloo")
    return lr + dist.get_rank()
"""
ENV = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(published.DOCKER.parent)}


def test_every_example_is_read() -> None:
    assert len(DIFFS) == 3


@each_diff
def test_both_sides_of_a_change_are_manifests_that_the_operator_takes(diff: str) -> None:
    for text in (pages.before(diff), pages.after(diff)):
        assert schema.wrong_in(yaml.safe_load(text)) == []
    added = [line for line in diff.splitlines() if line.startswith("+")]
    assert len(added) <= 5, "in five lines"


def needed(folder: Path, text: str) -> list[str]:
    (folder / "job.yaml").write_text(text)
    for name in ("train.py", "train_mpi.py"):
        (folder / name).write_text(SCRIPT)
    job = yaml.safe_load(text)
    runtime = RUNTIMES / f"{job['spec'].get('runtimeRef', {}).get('name')}.yaml"
    return ["-f", str(folder / "job.yaml"), *(["-f", str(runtime)] if runtime.exists() else [])]


@pytest.mark.process
@each_diff
def test_both_sides_become_pods_that_explain_knows(diff: str, tmp_path: Path) -> None:
    for side in (pages.before, pages.after):
        folder = tmp_path / side.__name__
        folder.mkdir()
        launched("rehearse", *needed(folder, side(diff)), "--render", str(folder / "pods"))
        snapshot = min((folder / "pods").iterdir())
        told = launched("explain", "--json", "--pod", str(snapshot), "--", "train.py")
        assert json.loads(told.stdout)["contract"] != "unknown"


def test_flytes_program_is_python_and_its_job_a_manifest() -> None:
    functions = [node.name for node in ast.parse(FLYTE_PROGRAM).body if isinstance(node, ast.FunctionDef)]
    assert functions == ["on_one_node", "on_three_nodes"]
    document = yaml.safe_load(FLYTE_JOB)
    assert schema.wrong_in(document) == []
    assert not any("command" in pod.spec["containers"][0] for pod in published.pods(document))


@pytest.mark.process
@pytest.mark.torch
@pytest.mark.timeout(400)
@pytest.mark.long("tests/kubernetes/test_rehearsals.py")
def test_flytes_job_runs_its_task_on_three_nodes_under_the_entrypoint(tmp_path: Path) -> None:
    """With stand-ins for flytekit and its command; `launch` and the operator's variables are the real ones."""
    files = {**pages.STUBS, "workflow.py": FLYTE_PROGRAM, "train.py": FIT, "job.yaml": FLYTE_JOB}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = tmp_path / "bin" / "pyflyte-execute"
    command.parent.mkdir()
    text = pages.PYFLYTE_EXECUTE.format(python=sys.executable, folder=str(tmp_path))
    command.write_text(text)
    command.chmod(0o755)
    site = os.pathsep.join([str(tmp_path), ENV["PYTHONPATH"]])
    env = {**ENV, "PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": site}
    with start("rehearse", "-f", str(tmp_path / "job.yaml"), env=env, cwd=tmp_path) as rehearsal:
        output = rehearsal.ends_with(0, timeout_s=280)
    assert "[f3c9-n0-0-master-0] outputs: 0.5" in output
    assert output.count("no outputs") == 2
