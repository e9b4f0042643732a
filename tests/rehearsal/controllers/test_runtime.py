"""A TrainJob over its runtime: who wins, who gets what, how many there are."""

from __future__ import annotations

import pytest

from tests.refusals import refusal
from tests.rehearsal.controllers.manifests import job_of, pytorch, replica, runtime, trainjob
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.controllers.pod_values import Pod, expanded
from trainer_launch.rehearsal.controllers.pod_values import pods as pods
from trainer_launch.rehearsal.controllers.trainer_v2 import merged

LABEL = "metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: %s}}, "


def rjob(name: str, container: str = "{name: node, image: i}", step: str = "", init: str = "") -> str:
    spec = f"{{{'initContainers: [' + init + '], ' if init else ''}containers: [{container}]}}"
    inner = f"{{template: {{spec: {spec}}}}}"
    return f"{{name: {name}, template: {{{LABEL % step if step else ''}spec: {inner}}}}}"


def made(trainer: str = "{}", policy: str = "torch: {}", jobs: str | None = None, more: str = "") -> dict[str, Pod]:
    found = job_of(trainjob(trainer, more=more), runtime(policy, jobs))
    return {pod.name: pod for pod in pods(found)}


ENV = "{name: node, image: i, command: [old], args: [a], env: [{name: A, value: '1'}, {name: B, value: $(A)2}]}"


def test_the_trainjobs_command_arguments_and_variables_win_and_keep_their_places() -> None:
    trainer = "{command: [new], env: [{name: A, value: '9'}, {name: C, value: c}]}"
    pod = made(trainer, jobs=rjob("node", ENV, "trainer"))["job-node-0-0"]
    assert (pod.main.command, pod.main.args) == (("new",), ("a",))
    assert list(pod.main.env.items())[:3] == [("A", "9"), ("B", "92"), ("C", "c")]


def test_only_the_trainers_container_called_node_is_changed() -> None:
    containers = "{name: side, image: i, command: [side]}, {name: node, image: i}"
    pod = made("{command: [new]}", jobs=rjob("node", containers, "trainer"))["job-node-0-0"]
    assert [one.command for one in pod.containers] == [("side",), ("new",)]
    assert pod.main.name == "node"
    assert "PET_NNODES" not in pod.containers[0].env
    assert pod.containers[0].env["JOB_COMPLETION_INDEX"] == "0"


@pytest.mark.parametrize(
    "patch",
    [
        "podTemplateOverrides: [{targetJobs: [{name: other}], spec: {}}, {targetJobs: [{name: node}], spec: %s}]",
        "podSpecOverrides: [{targetJobs: [{name: node}], %s}]",
        "runtimePatches: [{manager: m, trainingRuntimeSpec: {template: {spec: {replicatedJobs: [{name: node, "
        "template: {spec: {template: {spec: %s}}}}]}}}}]",
    ],
)
def test_patches_of_every_version_are_merged_by_the_names_of_containers(patch: str) -> None:
    inner = "{terminationGracePeriodSeconds: 7, containers: [{name: node, env: [{name: A, value: '5'}]}]}"
    text = patch % (inner[1:-1] if "podSpecOverrides" in patch else inner)
    pod = made(jobs=rjob("node", ENV, "trainer"), more=text)["job-node-0-0"]
    assert pod.main.command == ("old",)
    assert (pod.main.env["A"], pod.main.env["B"]) == ("5", "52")
    assert pod.draft.template.grace_s == 7


@pytest.mark.parametrize(
    "patch",
    [
        "podTemplateOverrides: [{targetJobs: [{name: nod}], spec: {}}]",
        "runtimePatches: [{manager: m, trainingRuntimeSpec: {template: {spec: {replicatedJobs: [{name: nod}]}}}}]",
    ],
)
def test_a_patch_for_a_replicated_job_that_the_runtime_has_not_is_listed_as_ignored(patch: str) -> None:
    (phrase,) = job_of(trainjob(more=patch), runtime()).ignored
    assert phrase.endswith(".name 'nod': the runtime has no such replicatedJob")


def test_an_override_may_have_labels_alone_but_no_container_that_the_runtime_has_not() -> None:
    text = "podTemplateOverrides: [{targetJobs: [{name: node}], %s}]"
    pod = made(more=text % "spec: null, metadata: {labels: {team: a}}")["job-node-0-0"]
    assert pod.draft.template.labels == {"team": "a"}
    for kind, there in (("containers", "node"), ("initContainers", "none")):
        with pytest.raises(
            UsageError, match=rf"{kind}\[0\].name is 'x'; expected one of the runtime's {kind} \({there}"
        ):
            made(more=text % f"spec: {{{kind}: [{{name: x}}]}}")


OURS, ELSEWHERE = "{name: rt}", "{name: rt, namespace: elsewhere}"


def referring(kind: str, *runtimes: tuple[str, str]) -> str:
    """The variable FROM of a TrainJob's node; each runtime's is its kind and metadata."""
    job = trainjob().replace("{name: rt}", f"{{name: rt{kind and ', kind: '}{kind}}}")
    texts = []
    for own, metadata in runtimes:
        node = rjob("node", f"{{name: node, env: [{{name: FROM, value: '{own} {metadata}'}}]}}", "trainer")
        text = runtime(jobs=node).replace("kind: ClusterTrainingRuntime", f"kind: {own}")
        texts.append(text.replace("metadata: {name: rt}", f"metadata: {metadata}", 1))
    return pods(job_of(job, *texts))[0].main.env["FROM"]


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("", f"ClusterTrainingRuntime {OURS}"),
        ("ClusterTrainingRuntime", f"ClusterTrainingRuntime {OURS}"),
        ("TrainingRuntime", f"TrainingRuntime {OURS}"),
    ],
)
def test_the_runtime_is_the_one_of_the_kind_and_namespace_that_is_referred_to(kind: str, want: str) -> None:
    given = [("ClusterTrainingRuntime", OURS), ("TrainingRuntime", OURS), ("TrainingRuntime", ELSEWHERE)]
    assert referring(kind, *given) == referring(kind, *reversed(given)) == want


@pytest.mark.parametrize(
    ("kind", "own", "metadata", "there"),
    [
        ("", "TrainingRuntime", OURS, "TrainingRuntime rt"),
        ("TrainingRuntime", "ClusterTrainingRuntime", OURS, "ClusterTrainingRuntime rt"),
        ("TrainingRuntime", "TrainingRuntime", ELSEWHERE, "TrainingRuntime rt of namespace elsewhere"),
    ],
)
def test_a_runtime_of_another_kind_or_namespace_is_not_taken_but_named(
    kind: str, own: str, metadata: str, there: str
) -> None:
    said = refusal(lambda: referring(kind, (own, metadata)))
    wanted = kind or "ClusterTrainingRuntime"
    assert f"expected a {wanted} from one of the files (found: {there})" in said
    assert said.endswith("add its file with another -f, or set runtimeRef.kind")


def at(volume: str) -> dict[str, str]:
    return {"mountPath": "/a", "name": volume}


@pytest.mark.parametrize(
    ("base", "patch", "want"),
    [
        ({"a": 1, "b": 2}, {"b": None, "c": 3}, {"a": 1, "c": 3}),
        ({"args": [1, 2]}, {"args": [3]}, {"args": [3]}),
        ({"env": [{"name": "A"}]}, {"env": [{"name": "B"}]}, {"env": [{"name": "B"}, {"name": "A"}]}),
        ({"volumeMounts": [at("x")]}, {"volumeMounts": [at("y")]}, {"volumeMounts": [at("y")]}),
    ],
)
def test_a_patch_is_merged_as_kubernetes_does(base: object, patch: object, want: object) -> None:
    assert merged(base, patch) == want


def test_nodes_of_mpi_get_the_users_variables_only_where_the_launcher_is_a_node_too() -> None:
    trainer = "{numNodes: 2, command: [mpirun], env: [{name: A, value: a}]}"
    jobs = f"{rjob('launcher', step='trainer')}, {rjob('node', '{name: node, image: i, command: [sshd]}')}"
    for works, wanted in (("true", "a"), ("false", None)):
        node = made(trainer, f"mpi: {{runLauncherAsNode: {works}}}", jobs)["job-node-0-0"].main
        assert node.env.get("A") == wanted
        assert node.command == ("sshd",)


def test_an_initializer_has_one_pod_and_its_program_is_in_its_image() -> None:
    first = rjob("model-initializer", "{name: model-initializer, image: i}", "model-initializer")
    jobs = f"{first.replace('template:', 'replicas: 3, template:', 1)}, {rjob('node', step='trainer')}"
    job = job_of(trainjob(more="initializer: {model: {storageUri: 'hf://x/y'}}"), runtime(jobs=jobs))
    initializer, _ = pods(job)
    assert initializer.main.platforms
    assert "model-initializer: its program is in its image" in job.ignored


# -- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("$(A)", "1"),
        ("$$(A)", "$(A)"),
        ("$(X)", "$(X)"),
        ("a$(A)b$(B)", "a1b2"),
        ("$A ${A} $", "$A ${A} $"),
        ("$$$(A)", "$1"),
    ],
)
def test_references_are_expanded_as_the_kubelet_does(text: str, want: str) -> None:
    assert expanded(text, {"A": "1", "B": "2"}) == want


def test_references_that_grow_without_end_are_refused() -> None:
    items = ["{name: A0, value: xxxxxxxxxxxxxxxx}"]
    items += [f"{{name: A{n + 1}, value: $(A{n})$(A{n})$(A{n})$(A{n})}}" for n in range(40)]
    worker = replica("pytorch", f"env: [{', '.join(items)}]")
    with pytest.raises(UsageError, match="longer than"):
        pods(job_of(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {worker}}}}}")))


SERVES = "command: [/usr/sbin/sshd], args: [-De, -f, /home/mpiuser/.sshd_config]"


@pytest.mark.parametrize(
    ("step", "wish", "is_told"),
    [
        ("trainer", "{command: [sh, -c, 'mpirun train.py'], numNodes: 3}", True),
        ("trainer", "{image: mine, numNodes: 3}", False),
        ("", "{command: [sh, -c, 'mpirun train.py'], numNodes: 3}", False),
        ("trainer", "{command: [sh, -c, 'mkdir /run/sshd && exec /usr/sbin/sshd -De'], numNodes: 3}", False),
        ("trainer", "{command: [trainer-launch, sshd], args: [], numNodes: 3}", False),
    ],
)
def test_a_command_that_replaces_sshd_is_told_before_anything_starts(step: str, wish: str, is_told: bool) -> None:
    """kubeflow/trainer#4030: with the trainer's label on the nodes, the TrainJob's command is theirs too."""
    jobs = f"{rjob('launcher', step='trainer')}, {rjob('node', f'{{name: node, image: i, {SERVES}}}', step)}"
    odd = job_of(trainjob(wish), runtime("mpi: {runLauncherAsNode: true}", jobs)).odd
    told = "job-node-0-0 runs 'sh -c mpirun train.py -De -f /home/mpiuser/.sshd_config' in place of sshd. "
    assert [sentence.startswith(told) for sentence in odd] == [True] * is_told
    assert all("or the label trainer.kubeflow.org/trainjob-ancestor-step of the repl" in text for text in odd)


@pytest.mark.parametrize(
    ("worker", "is_told"),
    [("command: [python, train.py]", True), ("", False), ("command: [/usr/sbin/sshd, -De]", False)],
)
def test_so_is_one_of_an_mpijobs_workers(worker: str, is_told: bool) -> None:
    specs = f"{{Launcher: {replica('l', 'command: [mpirun, a]')}, Worker: {replica('w', worker)}}}"
    head = "apiVersion: kubeflow.org/v2beta1\nkind: MPIJob\nmetadata: {name: job}\n"
    odd = job_of(f"{head}spec: {{mpiReplicaSpecs: {specs}}}\n").odd
    assert [sentence.startswith("job-worker-0 runs 'python train.py' in place of sshd") for sentence in odd] == (
        [True] * is_told
    )
