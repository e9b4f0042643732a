"""`rehearse -f` with `--nodes` and `--nproc-per-node`, from another folder, and with what cannot be run here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.launching import launch, launched
from tests.refusals import refusal
from tests.rehearsal.controllers.manifests import documents_of, replica, runtime, trainjob
from trainer_launch.model import NodeRange
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.controllers import other_counts, overridden, retyped, without_init, workload_of
from trainer_launch.rehearsal.controllers.pod_lifecycle import own_init
from trainer_launch.rehearsal.controllers.pod_values import pods as pods

TWO = "replicas: 2"


def specs(field: str, **roles: str) -> str:
    """The replica specs of a job."""
    return f"{field}ReplicaSpecs: {{{', '.join(f'{role}: {spec}' for role, spec in roles.items())}}}"


def job(kind: str, spec: str, version: str = "v1") -> str:
    return f"apiVersion: kubeflow.org/{version}\nkind: {kind}\nmetadata: {{name: job}}\nspec: {{{spec}}}\n"


WORKERS = job("PyTorchJob", specs("pytorch", Worker=replica("pytorch", spec=TWO)))
PAIR = specs("pytorch", Master=replica("pytorch"), Worker=replica("pytorch", spec=TWO))
WITH_MASTER = job("PyTorchJob", f"nprocPerNode: gpu, {PAIR}")
RANGE = "elasticPolicy: {minReplicas: 2, maxReplicas: 3}"
ELASTIC = job("PyTorchJob", f"{RANGE}, {specs('pytorch', Worker=replica('pytorch'))}")
MPI = job("MPIJob", specs("mpi", Launcher=replica("l"), Worker=replica("w", spec=TWO)), "v2beta1")
TF = job("TFJob", specs("tf", PS=replica("tensorflow"), Worker=replica("tensorflow")))


def env_of(*texts: str, nodes: NodeRange | None = None, nproc: str | None = None) -> tuple[int, dict[str, str]]:
    """How many pods there are, and the variables of the last one's main container."""
    made = pods(workload_of(overridden(documents_of(*texts), nodes, nproc)))
    return len(made), dict(made[-1].main.env)


def test_a_trainjob_has_the_numbers_that_were_asked_for() -> None:
    count, env = env_of(trainjob("{numNodes: 4, numProcPerNode: 8}"), runtime(), nodes=NodeRange(2, 2), nproc="1")
    assert (count, env["PET_NNODES"], env["PET_NPROC_PER_NODE"]) == (2, "2", "1")


def test_a_pytorchjobs_master_is_one_of_its_nodes() -> None:
    count, env = env_of(WITH_MASTER, nodes=NodeRange(2, 2), nproc="1")
    assert (count, env["PET_NNODES"], env["PET_NPROC_PER_NODE"]) == (2, "2", "1")
    assert env_of(WITH_MASTER, nodes=NodeRange(1, 1))[0] == 1


@pytest.mark.parametrize(
    ("nodes", "pods", "told"),
    [
        (NodeRange(1, 4), 4, "1:4"),
        (NodeRange(1, 1), 1, "1:3"),
        (NodeRange(3, 3), 3, "2:3"),
        (NodeRange(5, 5), 5, "2:5"),
    ],
)
def test_the_range_of_an_elastic_job_is_changed_or_widened(nodes: NodeRange, pods: int, told: str) -> None:
    count, env = env_of(ELASTIC, nodes=nodes)
    assert (count, env["PET_NNODES"]) == (pods, told)


def test_the_nodes_of_an_mpijob_are_its_workers_and_the_slots_their_processes() -> None:
    made = pods(workload_of(overridden(documents_of(MPI), NodeRange(3, 3), "4")))
    assert len(made) == 4
    launcher = next(pod for pod in made if pod.draft.role == "launcher")
    assert launcher.main.files["/etc/mpi/hostfile"].text.count(" slots=4\n") == 3


@pytest.mark.parametrize(
    ("texts", "nodes", "nproc", "part"),
    [
        ((WORKERS,), NodeRange(1, 2), None, "--nodes 1:2 needs an elastic job; this PyTorchJob has no"),
        ((TF,), NodeRange(3, 3), None, "--nodes 3 does not apply to a job with ps"),
        ((TF,), None, "2", "--nproc-per-node does not apply to this TFJob: its pods get no number of workers"),
        ((trainjob(), runtime("jax: {}")), None, "2", "--nproc-per-node does not apply to this TrainJob"),
        ((trainjob(), runtime("xgboost: {}")), None, "2", "--nproc-per-node does not apply to this TrainJob"),
    ],
)
def test_a_number_that_a_job_does_not_have_is_refused(
    texts: tuple[str, ...], nodes: NodeRange | None, nproc: str | None, part: str
) -> None:
    assert part in refusal(lambda: overridden(documents_of(*texts), nodes, nproc))


HELPER = (
    "---\napiVersion: batch/v1\nkind: Job\nmetadata: {name: prepare}\n"
    "spec: {template: {spec: {restartPolicy: Never, containers: [{name: c, image: i}]}}}\n"
)


def test_a_helper_job_beside_the_job_keeps_its_own_size() -> None:
    count, env = env_of(trainjob("{numNodes: 4}") + HELPER, runtime(), nodes=NodeRange(1, 1), nproc="2")
    assert (count, env["PET_NNODES"], env["PET_NPROC_PER_NODE"]) == (1, "1", "2")
    made = workload_of(overridden(documents_of(HELPER, trainjob(), runtime()), NodeRange(3, 3)))
    assert (made.kind, len(made.drafts), made.ignored) == ("TrainJob", 3, ("Job",))


@pytest.mark.parametrize(
    ("typed", "want"),
    [
        (["torchrun", "--nproc-per-node=8", "t.py"], ["torchrun", "--nproc-per-node=2", "t.py"]),
        (["torchrun", "--nproc_per_node", "8", "t.py"], ["torchrun", "--nproc_per_node", "2", "t.py"]),
        (["sh", "-c", "torchrun --nproc_per_node=$N && ls"], ["sh", "-c", "torchrun --nproc_per_node=2 && ls"]),
        (["sh", "-c", "(torchrun --nproc-per-node 8)"], ["sh", "-c", "(torchrun --nproc-per-node 2)"]),
        (["t.py", "--my-nproc-per-node=8"], ["t.py", "--my-nproc-per-node=8"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("field", ["command", "args"])
def test_the_option_of_the_command_itself_gets_the_number_too(
    typed: list[str], want: list[str], field: str
) -> None:
    workers = specs("pytorch", Worker=replica("pytorch", f"{field}: {json.dumps(typed)}"))
    (pod,) = pods(retyped(workload_of(documents_of(job("PyTorchJob", workers))), "--nproc-per-node", "2"))
    assert [*pod.main.command, *pod.main.args] == want


@pytest.mark.parametrize("typed", ["mpirun, -np, '16', t.py", "sh, -c, 'deepspeed --num_gpus 8 t.py'"])
def test_a_number_of_ranks_that_it_does_not_change_is_named_as_it_is_written(typed: str) -> None:
    body = specs("mpi", Launcher=replica("l", f"command: [{typed}]"), Worker=replica("w"))
    sentence = other_counts(workload_of(documents_of(job("MPIJob", body, "v2beta1"))))
    number = "-np 16" if "-np" in typed else "--num_gpus 8"
    assert sentence.startswith(f"--nproc-per-node does not change '{number}' in the command of container l; change")
    assert other_counts(workload_of(documents_of(MPI))) == ""


# -- --skip-init ------------------------------------------------------------------------------


def test_an_init_container_can_be_left_out_by_its_name() -> None:
    init = "initContainers: [{name: clone, command: [git]}, {name: data, command: [aws]}]"
    template = f"{{spec: {{{init}, containers: [{{name: pytorch, image: i}}]}}}}"
    given = workload_of(documents_of(job("PyTorchJob", specs("pytorch", Worker=f"{{template: {template}}}"))))
    (pod,) = pods(without_init(given, ["data"]))
    assert [each.name for each in own_init(pod)] == ["clone"]
    with pytest.raises(UsageError, match="--skip-init 'dat': there is no such init container; did you mean data"):
        without_init(given, ["dat"])
    with pytest.raises(UsageError, match="the job has none"):
        without_init(workload_of(documents_of(WORKERS)), ["data"])


# -- as a user does it ------------------------------------------------------------------------


def write(folder: Path, command: list[str], spec: str = "replicas: 3", more: str = "") -> str:
    workers = replica("pytorch", f"command: {json.dumps(command)}", spec)
    path = folder / "job.yaml"
    path.write_text(job("PyTorchJob", f"{more}{specs('pytorch', Worker=workers)}"))
    return str(path)


@pytest.mark.process
def test_as_many_workers_as_gpus_without_one_is_a_single_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n")
    path = write(
        tmp_path, ["trainer-launch", "run", "--", "python", "train.py"], "replicas: 1", "nprocPerNode: gpu, "
    )
    hidden = {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    ended = launch("rehearse", "-f", path, env=hidden)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("this machine has no GPU") == 1
    assert "add --nproc-per-node 1" in ended.stderr


@pytest.mark.process
def test_what_a_container_cannot_run_is_one_error_before_anything_starts(tmp_path: Path) -> None:
    ended = launch("rehearse", "-f", write(tmp_path, ["trainer-launch", "run", "--", "absent-script.py"]))
    assert (ended.returncode, ended.stdout) == (127, "")
    assert ended.stderr.count("the script 'absent-script.py' does not exist") == 1


@pytest.mark.process
def test_an_init_container_whose_program_is_not_here_is_left_out_on_request(tmp_path: Path) -> None:
    init = "initContainers: [{name: data, command: [absent-program]}]"
    template = f"{{spec: {{{init}, containers: [{{name: pytorch, command: [echo, trained]}}]}}}}"
    path = tmp_path / "job.yaml"
    path.write_text(job("PyTorchJob", specs("pytorch", Worker=f"{{template: {template}}}")))
    ended = launched("rehearse", "-f", str(path), code=127)
    assert "--skip-init data leaves it out" in ended.stderr
    ended = launch("rehearse", "-f", str(path), "--skip-init", "data")
    assert (ended.returncode, ended.stdout) == (0, "[job-worker-0] trained\n"), ended.stderr
