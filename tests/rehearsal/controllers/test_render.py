"""`rehearse -f --render`: snapshots that `explain --pod` reads; what is left out is said once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.launching import launch, launched
from tests.rehearsal.controllers.manifests import job_of, pytorch, replica, runtime, trainjob
from trainer_launch.commands import install_shims
from trainer_launch.commands.rehearse import without_launcher
from trainer_launch.rehearsal.controllers import render

pytestmark = pytest.mark.process


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_the_pods_are_written_and_explain_reads_them(tmp_path: Path) -> None:
    job = write(tmp_path, "job.yaml", trainjob("{numNodes: 2, numProcPerNode: 2, command: [torchrun, train.py]}"))
    made = write(tmp_path, "runtime.yaml", runtime())
    pods = tmp_path / "a folder" / "pods"
    ended = launched("rehearse", "-f", job, "-f", made, "--render", str(pods))
    assert sorted(path.name for path in pods.iterdir()) == ["job-node-0-0.json", "job-node-0-1.json"]
    assert str(pods / "job-node-0-1.json") in ended.stdout
    told = launch("explain", "--json", "--pod", str(pods / "job-node-0-1.json"))
    explained = json.loads(told.stdout)
    assert explained["contract"] == "trainer-v2-torch"
    assert (explained["job"]["nodes"], explained["job"]["node_rank"], explained["job"]["world_size"]) == (2, 1, 4)
    assert explained["plan"]["engine"] == "torch"


STEP = "metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: %s}}, "
POD = "{name: %s, template: {%sspec: {template: {spec: {initContainers: [{name: a}], containers: [{name: %s}]}}}}}"
TRAINS = ", ".join(
    POD % (name, STEP % step, name) for name, step in (("dataset-initializer",) * 2, ("node", "trainer"))
)
SET = (
    "apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\nmetadata: {name: job}\nspec: {replicatedJobs: [%s, %s]}\n"
)
MANY = (
    "{name: %s, template: {spec: {completionMode: Indexed, completions: %d, parallelism: %d, "
    "template: {spec: {containers: [{name: c, image: i, command: [a]}]}}}}}"
)
MPI = "apiVersion: kubeflow.org/v2beta1\nkind: MPIJob\nmetadata: {name: job}\nspec: {mpiReplicaSpecs: {%s}}\n"


@pytest.mark.parametrize(
    ("texts", "file"),
    [
        ((trainjob("{numNodes: 2}"), runtime(jobs=TRAINS)), "job-node-0-0.json"),
        ((pytorch(f"{{pytorchReplicaSpecs: {{Worker: {replica('pytorch')}, Master: {replica('pytorch')}}}}}"),),
         "job-master-0.json"),
        ((MPI % f"Worker: {replica('w')}, Launcher: {replica('l')}",), "job-launcher.json"),
        ((SET % (MANY % ("data", 1, 1), MANY % ("ranks", 2, 2)),), "job-ranks-0-0.json"),
    ],
)  # fmt: skip
def test_the_file_that_is_suggested_is_that_of_a_pod_that_trains(
    tmp_path: Path, texts: tuple[str, ...], file: str
) -> None:
    told = render(job_of(*texts), str(tmp_path / "pods"))
    assert told.splitlines()[-1] == f"Read one with: trainer-launch explain --pod {tmp_path}/pods/{file}"
    assert f"  {tmp_path}/pods/{file}\n" in told


def test_the_manifest_of_the_readme_is_whole(tmp_path: Path) -> None:
    told = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8").partition("```yaml\n")[2]
    pods = tmp_path / "pods"
    launched("rehearse", "-f", write(tmp_path, "job.yaml", told.partition("```")[0]), "--render", str(pods))
    for rank, container in enumerate(("my-job-node-0-0", "my-job-node-0-1")):
        snapshots = [path for path in pods.iterdir() if path.name.startswith(container)]
        assert snapshots
        for path in snapshots:
            assert json.loads(path.read_text())["env"]["PET_NODE_RANK"] == str(rank)


@pytest.mark.parametrize(
    ("command", "is_told"),
    [
        ("[torchrun, --nnodes=2, t.py]", True),
        ("[sh, -c, 'cd /x && exec torchrun t.py']", True),
        ("[python, -m, torch.distributed.run, t.py]", True),
        ("[trainer-launch, run, --, torchrun, t.py]", False),
        ("[python, t.py]", False),
    ],
)
def test_pods_that_run_torchrun_as_it_is_are_said_to_with_what_to_compare(command: str, is_told: bool) -> None:
    job = job_of(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {replica('pytorch', f'command: {command}')}}}}}"))
    told = without_launcher(job, "/bin")
    sentence = (
        "the pods run torchrun without trainer-launch. To compare what a fault costs, "
        "rehearse with --command 'trainer-launch run -- torchrun …' too"
    )
    assert told == (sentence if is_told else "")


def test_a_shim_called_torchrun_is_the_launcher(tmp_path: Path) -> None:
    install_shims.write(tmp_path)
    command = "command: [torchrun, t.py]"
    job = job_of(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {replica('pytorch', command)}}}}}"))
    assert without_launcher(job, str(tmp_path)) == ""


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("-f", "nothing.yaml", "--render", "x"), "nothing.yaml cannot be read"),
        (("-f", "nothing.yaml", "--", "true"), "use --command"),
        (("--render", "x", "--", "true"), "needs a manifest; add -f FILE"),
        (("--command", "x", "--", "true"), "needs a manifest; add -f FILE"),
    ],
)
def test_flags_that_do_not_fit_end_with_2(words: tuple[str, ...], part: str, tmp_path: Path) -> None:
    ended = launched("rehearse", *words, cwd=tmp_path, code=2)
    assert part in ended.stderr
    assert ended.stderr.count("\n") == 1
