"""A TrainJob's JobSet, a JobSet and a batch Job by themselves: their pods, how they end, and what is left out."""

from __future__ import annotations

import pytest

from tests.refusals import refusal
from tests.rehearsal.controllers.actors import Job
from tests.rehearsal.controllers.manifests import documents_of, job_of, runtime, trainjob
from trainer_launch.model import NodeRange
from trainer_launch.rehearsal.controllers import overridden
from trainer_launch.rehearsal.controllers.pod_values import pods as pods

NEVER = "restartPolicy: Never"
PAIR = "parallelism: 2, completions: 2"
INDEXED = f"completionMode: Indexed, {PAIR}"
CONTAINER = "{name: node, image: i}"


def rjob(
    name: str, spec: str = "backoffLimit: 0", pod: str = "", more: str = "", container: str = CONTAINER
) -> str:
    label = "metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}, " if name == "node" else ""
    template = f"{{spec: {{containers: [{container}]{', ' + pod if pod else ''}}}}}"
    body = f"{{{label}spec: {{template: {template}{', ' + spec if spec else ''}}}}}"
    return f"{{name: {name}, template: {body}{', ' + more if more else ''}}}"


TWO = f"{rjob('node')}, {rjob('side')}"


def train(jobs: str = TWO, policy: str = "", trainer: str = "{numNodes: 2}", more: str = "", spec: str = "") -> Job:
    given = f"failurePolicy: {{{policy}}}" if policy else ""
    return Job(trainjob(trainer, more=spec), runtime(jobs=jobs, more=", ".join(filter(None, [given, more]))))


def test_two_replicated_jobs_of_a_name_are_refused_as_their_pods_would_have_the_same_names() -> None:
    assert "replicatedJobs[1].name is 'side'; expected a name that no other" in refusal(
        lambda: train(f"{rjob('side')}, {rjob('side')}")
    )


def test_a_name_with_capital_letters_is_told_also_where_another_pods_is_longer() -> None:
    jobs = ", ".join(map(rjob, ("Side", "longer", "node")))
    (told,) = job_of(trainjob("{numNodes: 2}"), runtime(jobs=jobs)).odd
    assert told == "a cluster refuses the job: job-Side-0-0 has capital letters; write its names without"


def starts(job: Job) -> dict[str, int]:
    return {name.removeprefix("job-"): state.starts for name, state in job.state.states.items()}


def fails(job: Job, pod: str, code: int = 1) -> list[str]:
    asked = job.end(f"job-{pod}", code)
    job.finish()
    return asked


# -- when a JobSet has ended -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        ("", "node-0-0=0 node-0-1=0 side-0-0=0"),
        ("successPolicy: {operator: All, targetReplicatedJobs: [node]}", "node-0-0=0 node-0-1=0"),
        ("successPolicy: {operator: Any}", "side-0-0=0"),
    ],
)
def test_a_trainjob_has_succeeded_with_the_jobs_that_its_success_policy_names(more: str, steps: str) -> None:
    job = train(more=more)
    for step in steps.split():
        assert job.verdict is None
        job.go(step)
    assert job.verdict == (True, "TrainJobSucceeded")
    assert not any(state.running and not state.stopping for state in job.state.states.values()), (
        "others are stopped"
    )


def test_a_job_gives_up_at_its_backoff_limit_of_restarts() -> None:
    job = train(rjob("node", "backoffLimit: 2")).go("node-0-1=1")
    assert job.verdict is None
    assert job.go("node-0-1=4").verdict == (False, "BackoffLimitExceeded")


def test_under_never_a_failed_pod_is_made_anew_until_the_limit() -> None:
    job = train(rjob("node", "backoffLimit: 1", NEVER))
    assert job.end("job-node-0-1", 5) == []
    assert job.wait(1) == ["start job-node-0-1/node"]
    assert starts(job) == {"node-0-0": 1, "node-0-1": 2}
    assert job.go("node-0-1=5").verdict == (False, "BackoffLimitExceeded")
    assert job.code == 5


def test_a_pod_failure_policy_goes_by_the_exit_code() -> None:
    rules = (
        "backoffLimit: 1, podFailurePolicy: {rules: [{action: FailJob, onExitCodes: {containerName: node, "
        "operator: In, values: [2, 30]}}, {action: Ignore, onExitCodes: {operator: In, values: [143]}}]}"
    )
    job = train(rjob("node", rules, NEVER)).go("node-0-0=143 +60 " * 3)  # more often than the limit
    assert job.verdict is None
    assert job.go("node-0-0=30").verdict == (False, "PodFailurePolicy")


@pytest.mark.parametrize("policy", ["", "maxRestarts: 3"])
def test_neither_a_new_pod_nor_a_new_jobset_helps_a_program_that_cannot_be_run(policy: str) -> None:
    limit = "backoffLimit: 0" if policy else "backoffLimit: 3"
    assert train(rjob("node", limit, NEVER), policy).go("node-0-0=127").verdict == (False, "ContainerCannotRun")


# -- rules of the failurePolicy ---------------------------------------------------------------


def test_without_a_rule_that_fits_the_jobset_restarts_within_its_limit() -> None:
    rule = "{name: a, action: FailJobSet, onJobFailureReasons: [PodFailurePolicy]}"
    job = train(policy=f"maxRestarts: 1, rules: [{rule}]")
    assert "stop job-node-0-0/node" in fails(job, "node-0-1")
    assert starts(job) == {"node-0-0": 2, "node-0-1": 2, "side-0-0": 2}
    assert "the controller restarts all pods (1 of 1)" in job.said[-1]
    fails(job, "node-0-0", 7)
    assert (job.verdict, job.code) == ((False, "BackoffLimitExceeded"), 7)
    assert "its maxRestarts allow 1 restart" in job.message


def test_the_first_rule_that_fits_counts() -> None:
    job = train(
        policy="maxRestarts: 3, rules: [{name: a, action: FailJobSet, targetReplicatedJobs: [node]}, "
        "{name: b, action: FailJobSet}, {name: c, action: RestartJobSetAndIgnoreMaxRestarts}]"
    )
    fails(job, "side-0-0", 9)
    assert job.verdict == (False, "BackoffLimitExceeded")
    assert "fails the JobSet" in job.message


@pytest.mark.parametrize("action", ["RestartJobSetAndIgnoreMaxRestarts", "RestartJobAndIgnoreMaxRestarts"])
def test_restarts_may_be_left_out_of_the_count(action: str) -> None:
    job = train(policy=f"maxRestarts: 0, rules: [{{name: a, action: {action}}}]")
    for _ in range(3):
        job.wait(3600)
        fails(job, "node-0-0")
        assert "(does not count)" in job.said[-1]
    assert job.verdict is None
    assert set(starts(job).values()) == {4}


def test_a_job_starts_again_when_its_own_pods_have_ended() -> None:
    job = train(f"{rjob('node', pod=NEVER)}, {rjob('side', pod=NEVER)}", "maxRestarts: 1")
    asked = job.end("job-side-0-0", 1)
    assert {"stop job-node-0-0/node", "start job-side-0-0/node"} <= set(asked)
    asked = job.end("job-node-0-0", 143)
    assert not [word for word in asked if word.startswith("start")], "the other pod of its Job still runs"
    assert job.end("job-node-0-1", 143) == ["start job-node-0-0/node", "start job-node-0-1/node"]


# -- the order of Jobs, and their volumes -----------------------------------------------------


@pytest.mark.parametrize(("status", "at_once"), [("Ready", True), ("Complete", False)])
def test_a_replicated_job_waits_for_the_one_it_depends_on(status: str, at_once: bool) -> None:
    later = rjob("node", more=f"dependsOn: [{{name: first, status: {status}}}]")
    job = train(f"{rjob('first')}, {later}", trainer="{}")
    assert ("start job-node-0-0/node" in job.began) is at_once
    if not at_once:
        assert job.end("job-first-0-0") == ["start job-node-0-0/node"]


def test_a_claim_of_the_jobset_is_one_volume_of_all_its_pods() -> None:
    claims = "volumeClaimPolicies: [{templates: [{metadata: {name: cache}, spec: {}}]}]"
    node = rjob("node", container="{name: node, image: i, volumeMounts: [{name: cache, mountPath: /cache}]}")
    made = job_of(trainjob("{numNodes: 2}"), runtime(jobs=f"{node}, {rjob('side')}", more=claims))
    assert [dict(draft.template.volumes) for draft in made.drafts] == [{"cache": "claim:cache-job"}] * 3


# -- a JobSet and a Job by themselves ----------------------------------------------------------


def a_job(spec: str, pod: str = NEVER) -> str:
    template = f"template: {{spec: {{{pod}, containers: [{CONTAINER}]}}}}"
    return f"apiVersion: batch/v1\nkind: Job\nmetadata: {{name: train}}\nspec: {{{spec}, {template}}}\n"


def a_set(job: str = PAIR, more: str = "", also: str = "") -> str:
    spec = f"replicatedJobs: [{rjob('w', job, NEVER, also)}]{', ' + more if more else ''}"
    return f"apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\nmetadata: {{name: set}}\nspec: {{{spec}}}\n"


def test_the_port_belongs_to_the_pod_that_the_address_names() -> None:
    env = "env: [{name: MASTER_ADDR, value: set-w-1-0.set}, {name: MASTER_PORT, value: '1234'}]"
    text = a_set("backoffLimit: 0", also="replicas: 2").replace("image: i", f"image: i, {env}")
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


def test_a_failed_index_comes_back_until_the_backoff_limit_is_reached() -> None:
    job = Job(a_job(f"{INDEXED}, backoffLimit: 1")).go("1=138 +60")
    assert starts(job) == {"train-0": 1, "train-1": 2}, "nobody else is restarted"
    assert job.go("1=7").verdict == (False, "BackoffLimitExceeded")


# -- what does not fit, and what is left out --------------------------------------------------


def over(jobs: str = TWO, more: str = "") -> tuple[str, ...]:
    return trainjob("{numNodes: 2}"), runtime(jobs=jobs, more=more)


SET_RULE = "failurePolicy: {rules: [{action: %s}]}"


@pytest.mark.parametrize(
    ("texts", "part"),
    [
        (
            over(rjob("node", "podFailurePolicy: {rules: [{action: FailJob}]}", NEVER)),
            "onExitCodes.operator is missing",
        ),
        (over(more=SET_RULE % "Restart"), "one of FailJobSet"),
        (over(more="successPolicy: {operator: All, targetReplicatedJobs: [other]}"), "one of node, side"),
        ((a_job(PAIR),), "completionMode is missing; expected Indexed, so that each of the 2 pods knows which one"),
        ((a_job("completions: 8"),), "spec.completions is the number 8; expected parallelism, which is 1"),
        ((a_job(INDEXED, "restartPolicy: Always"),), "restartPolicy is 'Always'; expected one of OnFailure, Never"),
        ((a_set(more="coordinator: {replicatedJob: x}"),), "spec.coordinator.replicatedJob is"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(texts: tuple[str, ...], part: str) -> None:
    assert part in refusal(lambda: job_of(*texts))


@pytest.mark.parametrize("text", [a_job(INDEXED), a_set()])
def test_other_numbers_are_refused_because_nothing_tells_the_pods(text: str) -> None:
    documents = documents_of(text)
    assert "its pods get no number of nodes" in refusal(lambda: overridden(documents, NodeRange(3, 3)))
    assert "its pods get no number of workers" in refusal(lambda: overridden(documents, nproc="2"))
