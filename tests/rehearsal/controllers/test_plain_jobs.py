"""A JobSet and a batch Job without an operator above them: their pods, how they end, and what is refused."""

from __future__ import annotations

import pytest

from tests.rehearsal.controllers.actors import Job
from tests.rehearsal.controllers.manifests import documents_of, job_of, pytorch, replica
from tests.rehearsal.refusals import refusal
from trainer_launch.model import NodeRange
from trainer_launch.rehearsal.controllers import overridden
from trainer_launch.rehearsal.controllers.pod_values import pods as pods

POD = "containers: [{name: c, image: i}]"
TWO = "parallelism: 2, completions: 2"
INDEXED = f"completionMode: Indexed, {TWO}"


def a_job(spec: str, pod: str = "restartPolicy: Never", name: str = "train") -> str:
    template = f"template: {{spec: {{{pod}, {POD}}}}}"
    return f"apiVersion: batch/v1\nkind: Job\nmetadata: {{name: {name}}}\nspec: {{{spec}, {template}}}\n"


def a_set(job: str = TWO, more: str = "", pod: str = "restartPolicy: Never", also: str = "") -> str:
    template = f"{{spec: {{{job}, template: {{spec: {{{pod}, {POD}}}}}}}}}"
    spec = f"replicatedJobs: [{{name: w, template: {template}{also}}}]{', ' + more if more else ''}"
    return f"apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\nmetadata: {{name: set}}\nspec: {{{spec}}}\n"


# -- pods and their names ----------------------------------------------------------------------


def test_the_port_belongs_to_the_pod_that_the_address_names() -> None:
    env = "env: [{name: MASTER_ADDR, value: set-w-1-0.set}, {name: MASTER_PORT, value: '1234'}]"
    text = a_set("backoffLimit: 0", also=", replicas: 2").replace("image: i", f"image: i, {env}")
    assert job_of(text).ports == {"MASTER_PORT": "set-w-1-0"}
    assert job_of(text.replace("set-w-1-0.set", "elsewhere")).ports == {}


def test_a_job_of_one_pod_needs_no_index_and_is_told_none() -> None:
    (pod,) = pods(job_of(a_job("backoffLimit: 1")))
    assert (pod.name, dict(pod.main.env), pod.draft.names) == ("train", {}, ())


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        (a_job(INDEXED), "set subdomain in the pod's spec, and make a headless Service of that name"),
        (a_set(more="network: {enableDNSHostnames: false}"), "set enableDNSHostnames: true"),
    ],
)
def test_pods_that_have_no_names_on_a_cluster_have_none_here(text: str, advice: str) -> None:
    made = job_of(text)
    assert [draft.names for draft in made.drafts] == [(), ()]
    assert made.odd == (f"the pods of this {made.kind} do not find each other by name; {advice}",)


def test_a_job_beside_another_kind_of_job_is_ignored() -> None:
    made = job_of(
        a_job(INDEXED, name="download"), pytorch(f"{{pytorchReplicaSpecs: {{Worker: {replica('pytorch')}}}}}")
    )
    assert made.kind == "PyTorchJob"
    assert "Job" in made.ignored


# -- how they end ------------------------------------------------------------------------------


def test_a_job_succeeds_when_all_its_indexes_have() -> None:
    job = Job(a_job(INDEXED))
    job.end("train-0")
    assert job.verdict is None
    job.end("train-1")
    assert job.verdict == (True, "CompletionsReached")


def test_a_failed_index_comes_back_until_the_backoff_limit_is_reached() -> None:
    job = Job(a_job(f"{INDEXED}, backoffLimit: 1"))
    job.end("train-1", 138)
    job.wait(60)
    assert job.state.states["train-1"].starts == 2
    assert job.state.states["train-0"].starts == 1, "nobody else is restarted"
    job.end("train-1", 7)
    assert job.verdict == (False, "BackoffLimitExceeded")


def test_a_jobs_own_deadline_ends_it() -> None:
    job = Job(a_job(f"{INDEXED}, activeDeadlineSeconds: 30"))
    job.wait(31)
    assert job.verdict == (False, "DeadlineExceeded")


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            a_job(TWO),
            "completionMode is missing; expected Indexed, so that each of the 2 pods knows which one it is",
        ),
        (a_job("completions: 8"), "spec.completions is the number 8; expected parallelism, which is 1"),
        (a_job("completionMode: Indexed, parallelism: 2"), "spec.completions is missing; expected a number"),
        (a_job(INDEXED, "restartPolicy: Always"), "restartPolicy is 'Always'; expected one of OnFailure, Never"),
        (a_job(INDEXED, "subdomain: s"), "spec.template.spec.restartPolicy is missing"),
        (a_set("completionMode: NonIndexed"), "expected Indexed, by which the pods of a JobSet get their names"),
        (a_set(pod="restartPolicy: Always"), "expected one of OnFailure, Never"),
        (a_set(more="coordinator: {replicatedJob: x}"), "spec.coordinator.replicatedJob is"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_with_its_place(text: str, part: str) -> None:
    assert part in refusal(lambda: job_of(text))


def test_a_field_of_a_pod_in_the_wrong_place_is_ignored_and_told_where_it_belongs() -> None:
    (sentence,) = job_of(a_set(more="restartPolicy: Never")).unknown
    assert "spec.restartPolicy (a pod's fields belong to replicatedJobs[].template.spec.template.spec)" in sentence


@pytest.mark.parametrize("text", [a_job(INDEXED), a_set()])
def test_other_numbers_are_refused_because_nothing_tells_the_pods(text: str) -> None:
    documents = documents_of(text)
    assert "whose pods are not told how many they are" in refusal(lambda: overridden(documents, NodeRange(3, 3)))
    assert "it has no number of workers per node" in refusal(lambda: overridden(documents, nproc="2"))
