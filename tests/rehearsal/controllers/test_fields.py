"""Fields of manifests: what does not fit ends in one sentence, what is ignored is listed, and fields of the pod."""

from __future__ import annotations

import builtins
import uuid
from typing import Any

import pytest

from tests.refusals import refusal
from tests.rehearsal.controllers.manifests import job_of, pytorch, replica, runtime, trainjob
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.controllers.documents import MAX_BYTES, read_documents
from trainer_launch.rehearsal.controllers.pod_values import Pod
from trainer_launch.rehearsal.controllers.pod_values import pods as pods

WORKER = replica("pytorch")


def workers(container: str, more: str = "", spec: str = "") -> str:
    return pytorch(f"{{pytorchReplicaSpecs: {{Worker: {replica(container, more, spec)}}}}}")


def given(spec: str) -> str:
    return pytorch(f"{{{spec}, pytorchReplicaSpecs: {{Worker: {WORKER}}}}}")


def ruled(rules: str) -> str:
    return workers("pytorch", f"restartPolicy: Never, restartPolicyRules: {rules.replace('%s', '1')}")


def elastic(policy: str) -> str:
    return pytorch(f"{{elasticPolicy: {policy}, pytorchReplicaSpecs: {{Worker: {WORKER}}}}}")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["0.yaml", "no Kubernetes object"]),
        ("a: [", ["0.yaml", "not valid YAML", "line"]),
        ("metadata: {name: x}", ["kind is missing"]),
        ("kind: ConfigMap\nmetadata: {name: x}\napiVersion: v1", ["no job (ConfigMap)", "PyTorchJob"]),
        ("[" * 9_000 + "]" * 9_000, ["not valid YAML", "recursion"]),
        ("x" * (MAX_BYTES + 1), [f"larger than {MAX_BYTES}"]),
        ("a: !!python/object/apply:os.system [ls]", ["not valid YAML"]),
        ("kind: TFJob\nmetadata: {name: x}\nspec: {}\napiVersion: kubeflow.org/v1", ["tfReplicaSpecs is missing"]),
        (pytorch("{pytorchReplicaSpec: {}}"), ["pytorchReplicaSpec", "did you mean pytorchReplicaSpecs?"]),
        (workers('main'), ["Worker.template.spec.containers", "named pytorch"]),
        (pytorch("{pytorchReplicaSpecs: {Worker: {template: {spec: {containers: []}}}}}"), ["an empty list"]),
        (workers('pytorch', spec='replicas: -1'), ["the number -1", "whole number"]),
        (given("nprocPerNode: 2"), ["spec.nprocPerNode is the number 2", "quote it"]),
        (workers('pytorch', 'env: [{name: A, value: 1}]'), ["env[0].value is the number 1", "quote it"]),
        (workers('pytorch', 'env: [{name: A, value: y}]'), ["env[0].value is true", "quote it"]),
        (workers('pytorch', 'volumeMounts: [{name: v, mountPath: /v}]'), ["the volume v"]),
        (workers('pytorch').replace("metadata: {name: job}\n", ""), ["metadata.name is missing"]),
        (workers('pytorch', 'env: [{name: A}], env: [{name: B}]'), ["at line 4", "the key 'env' stands twice"]),
        (workers('pytorch', 'env: [{name: A, value: x, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]'),
            ["env[0].valueFrom", "one source, and no value"]),
        (workers('pytorch', 'env: [{name: A, valueFrom: {}}]'), ["env[0].valueFrom", "one source"]),
        (workers('pytorch').replace("containers:", "volumes: [{name: v}, {name: v}], containers:"),
            ["volumes[1].name is 'v'", "no other"]),
        (trainjob(), ["runtimeRef.name is 'rt'", "another -f"]),
        (ruled("[{action: Restart}]"), ["restartPolicyRules[0].exitCodes.operator is missing", "one of In, NotIn"]),
    ],
)  # fmt: skip
def test_one_sentence_says_what_is_wrong(text: str, parts: list[str]) -> None:
    said = refusal(lambda: job_of(text))
    assert all(part in said for part in parts), said
    assert "\n" not in said
    assert len(said) < 500


@pytest.mark.parametrize(
    ("job", "given_runtime", "parts"),
    [
        (
            trainjob(),
            runtime("torch: {envInjection: {targets: [{jobName: x, containerNames: [a]}]}}"),
            ["'x'", "node"],
        ),
        (trainjob(), runtime("torch: {envInjection: {targets: [{jobName: node, containerNames: [a]}]}}"), ["'a'"]),
        (trainjob(), runtime("mpi: {mpiImplementation: LAM}"), ["'LAM'", "one of OpenMPI"]),
        (trainjob(), runtime().replace("trainer.kubeflow.org/v1", "kubeflow.org/v2"), ["kubeflow.org/v2alpha1"]),
        (trainjob(), runtime("flux: {}"), ["a Flux job is not rehearsed", "--nodes N -- PROGRAM"]),
    ],
)
def test_a_trainjob_that_does_not_fit_its_runtime(job: str, given_runtime: str, parts: list[str]) -> None:
    said = refusal(lambda: job_of(job, given_runtime))
    assert all(part in said for part in parts), said


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (elastic("{minReplica: 1}"), "spec.elasticPolicy.minReplica (did you mean minReplicas?)"),
        (workers("pytorch", "commnd: [x]"), "containers[0].commnd (did you mean command?)"),
        (workers("pytorch", spec="replica: 2"), "Worker.replica (did you mean replicas?)"),
        (given("whatever: 1"), "whatever"),
    ],
)
def test_an_unknown_field_is_ignored_and_named_with_the_one_that_may_be_meant(text: str, told: str) -> None:
    (phrase,) = job_of(text).ignored
    assert phrase.endswith(told)


def test_a_name_with_capital_letters_is_said_to_be_refused_by_a_cluster() -> None:
    assert job_of(workers("pytorch").replace("{name: job}", "{name: MyJob}")).odd == (
        "a cluster refuses the job: MyJob-worker-0 has capital letters; write its names without",
    )


@pytest.mark.parametrize(
    ("version", "kind", "want"),
    [
        ("kubeflow.org/v1", "MPIJob", "kubeflow.org/v2beta1"),
        ("batch.volcano.sh/v1alpha1", "Job", "batch/v1"),
        ("example.com/v1", "PyTorchJob", "kubeflow.org/v1"),
    ],
)
def test_a_job_of_another_api_is_refused_with_the_one_to_write_it_as(version: str, kind: str, want: str) -> None:
    said = refusal(lambda: job_of(f"apiVersion: {version}\nkind: {kind}\nmetadata: {{name: j}}\nspec: {{}}\n"))
    assert said == (f"0.yaml, document 1 ({kind} j): {kind} of {version} is not rehearsed; write it as {want}")


def test_a_job_without_pods_is_one_error_that_names_the_number() -> None:
    none = replica("pytorch", spec="replicas: 0")
    with pytest.raises(
        UsageError, match=r"the job has no pods; expected 1 or more in spec\.\w+\.Worker\.replicas$"
    ):
        job_of(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {none}}}}}"))


def test_two_jobs_at_once_are_refused() -> None:
    one = pytorch(f"{{pytorchReplicaSpecs: {{Worker: {WORKER}}}}}")
    with pytest.raises(
        UsageError,
        match=r"2 jobs, .*: 0\.yaml, document 1 \(PyTorchJob job\); 1\.yaml, document 1 \(PyTorchJob job\)",
    ):
        job_of(one, one)


def test_anchors_and_lists_are_read_as_kubectl_reads_them() -> None:
    inner = f"{{pytorchReplicaSpecs: {{Master: &p {WORKER}, Worker: {{<<: *p, <<: *p, replicas: 1}}}}}}"
    body = f"{{apiVersion: kubeflow.org/v1, kind: PyTorchJob, metadata: {{name: j}}, spec: {inner}}}"
    other = "{kind: PriorityClass, apiVersion: scheduling.k8s.io/v1}"
    job = job_of(f"kind: List\nitems: [{body}, {other}, {other}]")
    assert [draft.hostname for draft in job.drafts] == ["j-master-0", "j-worker-0"]
    assert job.ignored[-1] == "2 PriorityClass objects"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (("y", "N", "on", "Off", "yes", "TRUE"), [True, False, True, False, True, True]),
        (("12:30", "2026-11-29", "0o8", "1_0x", "nO", "=", "1.2.3"), None),  # texts
        (
            ("0777", "0o777", "-0b11", "0x_1F", "1_000", "+5", "0", "00", "010"),
            [511, 511, -3, 31, 1000, 5, 0, 0, 8],
        ),
        (("1e3", "2.0", "1.5E1", "08", "1.", ".5", "-.5e1", "1e-3"), [1000, 2, 15, 8, 1, 0.5, -5, 0.001]),
        (("~", "null", ""), [None] * 3),
    ],
)
def test_plain_words_are_numbers_flags_and_texts_as_kubectl_has_them(words: list[str], value: list[Any]) -> None:
    (document,) = read_documents("kind: X\nspec:\n" + "".join(f"- {word}\n" for word in words), "x.yaml")
    made = document.get("spec").value
    assert made == (value or list(words))
    assert [type(one) for one in made] == [type(one) for one in (value or words)]
    (document,) = read_documents("{kind: X, data: {2: a, on: b, ~: c}}", "x.yaml")
    assert [*document.get("data").value] == ["2", "true", None]  # JSON's keys are texts; null is none


def test_without_pyyaml_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UsageError, match=r"trainer-launch\[local\]"):
        read_documents("kind: X", "f")


VOLUME = "volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 1Gi}}]"
RESOURCE = "env: [{name: CPUS, valueFrom: {resourceFieldRef: {resource: limits.cpu}}}]"
TFJOB = "apiVersion: kubeflow.org/v1\nkind: TFJob\nmetadata: {name: job}\nspec: "


def two_workers(container: str = "", pod: str = "") -> str:
    spec = f"{{containers: [{{name: pytorch, image: i, {container}}}], {pod}}}"
    return pytorch(f"{{pytorchReplicaSpecs: {{Worker: {{replicas: 2, template: {{spec: {spec}}}}}}}}}")


@pytest.mark.parametrize(
    ("texts", "ignored"),
    [
        ((two_workers(pod=VOLUME),), "sizeLimit of volume shm"),
        ((two_workers(RESOURCE),), "variable CPUS (from resourceFieldRef)"),
        ((trainjob(more="initializer: {dataset: {storageUri: 'hf://a/b'}}"), runtime()), "initializer"),
        (
            (f"{TFJOB}{{enableDynamicWorker: true, tfReplicaSpecs: {{Worker: {{template: {{spec: "
             "{containers: [{name: tensorflow, image: i}]}}}}}",),
            "enableDynamicWorker",
        ),
    ],
)  # fmt: skip
def test_a_field_without_effect_here_is_listed_once(texts: tuple[str, ...], ignored: str) -> None:
    assert job_of(*texts).ignored == (ignored,)


@pytest.mark.parametrize(
    ("text", "most"),
    [(pytorch("{pytorchReplicaSpecs: {Worker: {template: {spec: {containers: [{name: pytorch, image: i}]}}}}}",
              "NAME"), 54), (trainjob(name="NAME"), 48)],
    ids=["behind the name: -worker-0", "behind the name: -node-0-0-xxxxx"],
)  # fmt: skip
def test_a_job_whose_pods_have_names_that_a_cluster_refuses_is_rehearsed_with_a_warning(
    text: str, most: int
) -> None:
    there = (runtime(),) if "TrainJob" in text else ()
    assert job_of(text.replace("NAME", "a" * most), *there).odd == ()
    (sentence,) = job_of(text.replace("NAME", "a" * (most + 1)), *there).odd
    assert "has 64 characters, and a pod's name at most 63" in sentence


def job(source: str, container: str = "", pod: str = "") -> tuple[Pod, ...]:
    side = "{name: side, image: i, command: [a], resources: {limits: {memory: 3Gi}}}"
    main = f"{{name: pytorch, image: i, env: [{{name: V, valueFrom: {source}}}]{container}}}"
    meta = "metadata: {labels: {team: blue}, annotations: {note: 'a b'}}"
    template = f"{{{meta}, spec: {{containers: [{main}, {side}]{pod}}}}}"
    workers = f"{{replicas: 2, template: {template}}}"
    return pods(job_of(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {workers}}}}}")))


def of_field(path: str, pod: str = "") -> list[str]:
    return [each.main.env["V"] for each in job(f'{{fieldRef: {{fieldPath: "{path}"}}}}', pod=pod)]


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("metadata.name", ["job-worker-0", "job-worker-1"]),
        ("metadata.namespace", ["default"] * 2),
        ("metadata.labels['team']", ["blue"] * 2),
        ("metadata.annotations['note']", ["a b"] * 2),
        ("metadata.labels['training.kubeflow.org/replica-index']", ["0", "1"]),
        ("spec.nodeName", ["node-0", "node-1"]),
        ("spec.serviceAccountName", ["default"] * 2),
        ("status.hostIP", ["127.0.0.1"] * 2),
        ("status.hostIPs", ["127.0.0.1"] * 2),
        ("status.podIP", ["10.244.0.2", "10.244.0.3"]),
        ("status.podIPs", ["10.244.0.2", "10.244.0.3"]),
    ],
)
def test_a_field_of_the_pod_has_its_value(path: str, values: list[str]) -> None:
    assert of_field(path) == values


def test_each_pod_has_a_uid_of_its_own() -> None:
    first, second = of_field("metadata.uid")
    assert first != second
    assert str(uuid.UUID(first)) == first


@pytest.mark.parametrize("name", ["serviceAccountName", "serviceAccount"])
def test_a_pods_service_account_is_the_one_that_it_asks_for(name: str) -> None:
    assert of_field("spec.serviceAccountName", f", {name}: robot") == ["robot", "robot"]
