"""A job whose names a cluster would refuse is refused here, by the names that its own controller makes of it."""

from __future__ import annotations

import pytest

from tests.rehearsal.controllers.manifests import documents_of, job_of, pytorch, replica, runtime, trainjob
from trainer_launch.model import NodeRange
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.controllers import overridden, workload_of

POD = "template: {spec: {restartPolicy: Never, containers: [{name: c, image: i, command: [a]}]}}"
INDEXED = "completionMode: Indexed, completions: 11, parallelism: 11"


def workers(length: int) -> str:
    return pytorch(f"{{pytorchReplicaSpecs: {{Worker: {replica('pytorch', spec='replicas: 11')}}}}}", "a" * length)


def mpijob(length: int) -> str:
    specs = f"{{Launcher: {replica('l')}, Worker: {replica('w', spec='replicas: 11')}}}"
    head = f"apiVersion: kubeflow.org/v2beta1\nkind: MPIJob\nmetadata: {{name: {'a' * length}}}\n"
    return f"{head}spec: {{mpiReplicaSpecs: {specs}}}\n"


def jobset(length: int, more: str = "") -> str:
    job = f"{{name: workers, template: {{spec: {{{INDEXED}, {POD}}}}}}}"
    head = f"apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\nmetadata: {{name: {'a' * length}}}\n"
    return f"{head}spec: {{{more}replicatedJobs: [{job}]}}\n"


def job(length: int, name: str = "name: {}", spec: str = "") -> str:
    head = f"apiVersion: batch/v1\nkind: Job\nmetadata: {{{name.format('a' * length)}}}\n"
    return f"{head}spec: {{{spec}{POD}}}\n"


def indexed(length: int) -> str:
    return job(length, spec=f"{INDEXED}, ")


def generated(length: int) -> str:
    return job(length, "generateName: {}-", f"{INDEXED}, ")


@pytest.mark.parametrize(
    ("written", "most", "named"),
    [
        (workers, 53, "{}-worker-10, which has 64"),
        (mpijob, 53, "{}-worker-10, which has 64"),
        (jobset, 44, "{}-workers-0-10-xxxxx, which has 64"),
        (job, 63, "{}, which has 64"),
        (indexed, 60, "{}-10, which has 64"),
        (generated, 54, "{}-xxxxx-10, which has 64"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_longest_name_of_each_controller_is_the_limit(written: object, most: int, named: str) -> None:
    assert callable(written)
    assert job_of(written(most)).drafts
    with pytest.raises(UsageError) as caught:
        job_of(written(most + 1))
    said = str(caught.value)
    assert "; expected 1 character less in it" in said
    assert said.endswith("a cluster allows 63 for " + named.format("a" * (most + 1)))


def test_the_value_of_the_label_that_names_a_jobsets_coordinator_counts() -> None:
    text = "coordinator: {replicatedJob: workers}, "
    assert job_of(jobset(24, text)).drafts
    with pytest.raises(UsageError, match="expected 2 characters less in it or replicatedJobs"):
        job_of(jobset(26, text))


def test_a_trainjobs_pods_are_those_of_its_jobset() -> None:
    assert job_of(trainjob(name="a" * 46), runtime()).drafts
    with pytest.raises(
        UsageError, match=r"metadata\.name is 'a+'; expected 2 characters less in it or replicatedJ"
    ):
        job_of(trainjob(name="a" * 50), runtime())


def test_more_nodes_may_make_a_name_too_long() -> None:
    documents = documents_of(workers(53))
    assert workload_of(overridden(documents, NodeRange(11, 11))).drafts
    with pytest.raises(UsageError, match="-worker-100, which has 64"):
        workload_of(overridden(documents_of(workers(53)), NodeRange(101, 101)))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (jobset(3, f"network: {{subdomain: {'s' * 64}}}, "), "spec.network.subdomain"),
        (
            job(3).replace("template: {spec", f"template: {{metadata: {{labels: {{l: {'v' * 64}}}}}, spec"),
            "labels.l",
        ),
    ],
)
def test_a_service_or_a_label_of_the_users_own_is_not_too_long_either(text: str, place: str) -> None:
    with pytest.raises(UsageError, match=rf"{place} is '.*; expected at most 63 characters"):
        job_of(text)
