"""A JobSet's failurePolicy and the policies of its Jobs: who is restarted, what counts, and what is left out."""

from __future__ import annotations

import pytest

from tests.rehearsal.controllers.actors import Job
from tests.rehearsal.controllers.manifests import job_of, runtime, trainjob
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.controllers.pod_values import pods as pods


def rjob(name: str, spec: str = "backoffLimit: 0", pod: str = "", more: str = "") -> str:
    label = "metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}, " if name == "node" else ""
    template = f"{{spec: {{containers: [{{name: node, image: i}}]{', ' + pod if pod else ''}}}}}"
    body = f"{{{label}spec: {{template: {template}{', ' + spec if spec else ''}}}}}"
    return f"{{name: {name}, template: {body}{', ' + more if more else ''}}}"


TWO = f"{rjob('node')}, {rjob('side')}"
NEVER = "restartPolicy: Never"
BOUNDLESS = "backoffLimit: 2147483647, podReplacementPolicy: Failed"


def train(jobs: str = TWO, policy: str = "", trainer: str = "{numNodes: 2}", more: str = "") -> Job:
    given = f"failurePolicy: {{{policy}}}" if policy else ""
    return Job(trainjob(trainer), runtime(jobs=jobs, more=", ".join(filter(None, [given, more]))))


def starts(job: Job) -> dict[str, int]:
    return {name.removeprefix("job-"): state.starts for name, state in job.state.states.items()}


def fails(job: Job, pod: str, code: int = 1) -> list[str]:
    asked = job.end(f"job-{pod}", code)
    job.finish()
    return asked


# -- rules of the failurePolicy ---------------------------------------------------------------


def test_without_a_rule_that_fits_the_jobset_restarts_within_its_limit() -> None:
    job = train(policy="maxRestarts: 1, rules: [{name: a, action: FailJobSet, targetReplicatedJobs: [side]}]")
    fails(job, "node-0-1")
    assert starts(job) == {"node-0-0": 2, "node-0-1": 2, "side-0-0": 2}
    assert "the controller restarts all pods (1 of 1)" in job.said[-1]
    fails(job, "node-0-0", 7)
    assert job.verdict == (False, "BackoffLimitExceeded")
    assert job.state.condition is not None
    assert job.state.condition.exit_code == 7
    assert "its maxRestarts allow 1 restart" in job.state.condition.message


def test_the_first_rule_that_fits_counts() -> None:
    rules = (
        "maxRestarts: 3, rules: [{name: a, action: FailJobSet, targetReplicatedJobs: [side]}, "
        "{name: b, action: RestartJobSetAndIgnoreMaxRestarts}]"
    )
    job = train(policy=rules)
    fails(job, "side-0-0", 9)
    assert job.verdict == (False, "BackoffLimitExceeded")
    assert job.state.condition is not None
    assert "fails the JobSet" in job.state.condition.message


def test_restarts_may_be_left_out_of_the_count() -> None:
    job = train(policy="maxRestarts: 0, rules: [{name: a, action: RestartJobSetAndIgnoreMaxRestarts}]")
    for _ in range(3):
        job.wait(3600)
        fails(job, "node-0-0")
        assert "(does not count)" in job.said[-1]
    assert job.verdict is None
    assert set(starts(job).values()) == {4}


def test_a_rule_may_be_for_one_reason_only() -> None:
    spec = (
        "backoffLimit: 0, podFailurePolicy: {rules: [{action: FailJob, onExitCodes: {operator: In, values: [3]}}]}"
    )
    rules = "maxRestarts: 5, rules: [{name: a, action: FailJobSet, onJobFailureReasons: [PodFailurePolicy]}]"
    job = train(rjob("node", spec, NEVER), rules)
    fails(job, "node-0-0", 4)
    assert job.verdict is None, "BackoffLimitExceeded is no such reason"
    fails(job, "node-0-0", 3)
    assert job.verdict == (False, "PodFailurePolicy")


@pytest.mark.parametrize(("action", "limit"), [("RestartJob", 2), ("RestartJobAndIgnoreMaxRestarts", 0)])
def test_one_job_alone_may_be_restarted(action: str, limit: int) -> None:
    job = train(policy=f"maxRestarts: {limit}, rules: [{{name: a, action: {action}}}]")
    for _ in range(2):
        job.wait(3600)
        fails(job, "side-0-0")
    assert starts(job) == {"node-0-0": 1, "node-0-1": 1, "side-0-0": 3}
    assert "the controller restarts all pods of Job job-side-0" in job.said[-1]
    job.wait(3600)
    fails(job, "side-0-0")
    assert (job.verdict is None) is (limit == 0)


@pytest.mark.parametrize(("strategy", "at_once"), [("Recreate", True), ("BlockingRecreate", False)])
def test_a_job_starts_again_when_its_own_pods_have_ended_or_when_all_have(strategy: str, at_once: bool) -> None:
    jobs = f"{rjob('node', pod=NEVER)}, {rjob('side', pod=NEVER)}"
    job = train(jobs, f"maxRestarts: 1, restartStrategy: {strategy}")
    asked = job.end("job-side-0-0", 1)
    assert "stop job-node-0-0/node" in asked
    assert ("start job-side-0-0/node" in asked) is at_once
    asked = job.end("job-node-0-0", 143)
    assert not [word for word in asked if word.startswith("start")], "the other pod of its Job still runs"
    asked = job.end("job-node-0-1", 143)
    assert {"start job-node-0-0/node", "start job-node-0-1/node"} <= set(asked)
    assert ("start job-side-0-0/node" in asked) is not at_once


def test_what_would_restart_for_ever_is_given_up() -> None:
    job = train(policy="rules: [{name: a, action: RestartJobSetAndIgnoreMaxRestarts}]")
    for _ in range(6):
        fails(job, "node-0-0", 5)
    assert job.verdict == (False, "CrashLoopBackOff")


def test_as_many_quick_restarts_as_the_limit_allows_are_made() -> None:
    job = train(policy="maxRestarts: 9")
    for _ in range(9):
        fails(job, "node-0-0")
    assert job.verdict is None
    fails(job, "node-0-0")
    assert job.verdict == (False, "BackoffLimitExceeded")


# -- Jobs -------------------------------------------------------------------------------------


def test_the_deadline_of_a_job_fails_that_job() -> None:
    job = train(f"{rjob('node', 'activeDeadlineSeconds: 10')}, {rjob('side')}", "maxRestarts: 1")
    assert job.state.due_s() == job.now_s + 10
    job.wait(10)
    job.finish()
    assert starts(job) == {"node-0-0": 2, "node-0-1": 2, "side-0-0": 2}
    job.wait(9)
    assert job.verdict is None, "the time begins anew"
    job.wait(1)
    assert job.verdict == (False, "DeadlineExceeded")


@pytest.mark.parametrize(("action", "verdict"), [("FailJob", (False, "PodFailurePolicy")), ("Ignore", None)])
def test_a_pod_that_somebody_deletes_may_fail_the_job(action: str, verdict: tuple[bool, str] | None) -> None:
    rules = f"podFailurePolicy: {{rules: [{{action: {action}, onPodConditions: [{{type: DisruptionTarget}}]}}]}}"
    job = train(rjob("node", rules, NEVER))
    job.delete("job-node-0-1", back_s=1.0)
    assert job.verdict == verdict


def test_the_success_policy_names_jobs_that_are_there() -> None:
    with pytest.raises(UsageError, match="one of node, side"):
        train(more="successPolicy: {operator: All, targetReplicatedJobs: [other]}")


def test_jobs_may_start_in_order() -> None:
    job = train(f"{rjob('side')}, {rjob('node')}", more="startupPolicy: {startupPolicyOrder: InOrder}")
    assert job.began[0] == "start job-side-0-0/node"
    assert len(job.began) == 3, "a pod that runs is ready here"


def test_a_claim_of_the_jobset_is_one_volume_of_all_its_pods() -> None:
    claims = "volumeClaimPolicies: [{templates: [{metadata: {name: cache}, spec: {}}, {metadata: {name: other}}]}]"
    container = "{name: node, image: i, volumeMounts: [{name: cache, mountPath: /cache}]}"
    label = "metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}"
    node = f"{{name: node, template: {{{label}, spec: {{template: {{spec: {{containers: [{container}]}}}}}}}}}}"
    made = job_of(trainjob("{numNodes: 2}"), runtime(jobs=f"{node}, {rjob('side')}", more=claims))
    volumes = {draft.hostname: dict(draft.template.volumes) for draft in made.drafts}
    assert volumes["job-node-0-0"] == volumes["job-node-0-1"] == {"cache": "claim:cache-job"}
    assert volumes["job-side-0-0"] == {}


# -- what does not fit, and what is left out --------------------------------------------------


@pytest.mark.parametrize(
    ("jobs", "more", "part"),
    [
        (
            rjob("node", "podFailurePolicy: {rules: [{action: FailJob}]}", NEVER),
            "",
            "onExitCodes or onPodConditions",
        ),
        (TWO, "failurePolicy: {rules: [{action: Restart}]}", "one of FailJobSet"),
        (TWO, "failurePolicy: {rules: [{action: FailJobSet, targetReplicatedJobs: [x]}]}", "one of node, side"),
        (TWO, "failurePolicy: {rules: [{action: FailJobSet, onJobFailureReasons: [x]}]}", "one of BackoffLimit"),
        (TWO, "startupPolicy: {startupPolicyOrder: Backwards}", "one of AnyOrder, InOrder"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(jobs: str, more: str, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        train(jobs, more=more)
    assert part in str(caught.value)


def test_what_a_rehearsal_does_not_do_is_named_once() -> None:
    jobs = (
        f"{rjob('node', f'{BOUNDLESS}, ttlSecondsAfterFinished: 5, successPolicy: {{rules: []}}')}, "
        f"{rjob('side', f'{BOUNDLESS}, backoffLimitPerIndex: 1')}"
    )
    more = "coordinator: {replicatedJob: node}, suspend: true, failurePolicy: {restartStrategy: InPlaceRestart}"
    made = job_of(trainjob(more="suspend: true, managedBy: x.io/y"), runtime(jobs=jobs, more=more))
    assert made.ignored == (
        "suspend: the rehearsal runs anyway",
        "managedBy",
        "restartStrategy InPlaceRestart: failed pods are recreated",
        "ttlSecondsAfterFinished of a Job",
        "successPolicy of a Job",
        "podReplacementPolicy of a Job",
        "backoffLimitPerIndex of a Job",
    )


def test_what_a_rehearsal_does_not_restart_by_is_named() -> None:
    """Nor is it refused: restarts in place, limits of each index, rules by message."""
    rules = "rules: [{name: a, action: FailJobSet, onJobFailureMessagePatterns: ['.*']}]"
    more = f"failurePolicy: {{maxRestarts: 1, restartStrategy: InPlaceRestart, {rules}}}"
    job = train(rjob("node", "backoffLimit: 0, backoffLimitPerIndex: 1, maxFailedIndexes: 2", NEVER), more=more)
    fails(job, "node-0-1")
    assert set(starts(job).values()) == {2}, "the rule by message fails nothing"


ABOUT = "[{name: JOBSET_NAME, value: j}, {name: POD_NAME, value: p}]"
SIDECAR = f"{{name: agent, image: a, restartPolicy: Always, env: {ABOUT}}}"


def test_jobsets_agent_for_restarts_in_place_is_left_out() -> None:
    made = job_of(trainjob("{numNodes: 1}"), runtime(jobs=rjob("node", pod=f"initContainers: [{SIDECAR}]")))
    assert [container.platforms for container in made.drafts[0].template.init] == [True]
    assert "container agent (JobSet's agent)" in made.ignored


def test_what_of_a_run_policy_means_nothing_here_is_named_once() -> None:
    policy = "{suspend: true, schedulingPolicy: {queue: q}, ttlSecondsAfterFinished: 5, managedBy: x.io/y}"
    pod = "{template: {spec: {hostAliases: [], containers: [{name: l, image: i, lifecycle: {preStop: {}}}]}}}"
    made = job_of(
        f"apiVersion: kubeflow.org/v2beta1\nkind: MPIJob\nmetadata: {{name: j}}\n"
        f"spec: {{runPolicy: {policy}, mpiReplicaSpecs: {{Launcher: {pod}, Worker: {pod}}}}}"
    )
    wanted = ("suspend: the rehearsal runs anyway", "schedulingPolicy", "managedBy", "ttlSecondsAfterFinished")
    assert made.ignored[:6] == (*wanted, "hostAliases", "lifecycle.preStop")


def test_annotations_of_a_template_can_be_variables() -> None:
    variable = "env: [{name: A, valueFrom: {fieldRef: {fieldPath: \"metadata.annotations['a.io/b']\"}}}]"
    template = (
        f"{{metadata: {{annotations: {{a.io/b: told}}}}, spec: {{containers: [{{name: node, {variable}}}]}}}}"
    )
    label = "metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}"
    made = job_of(
        trainjob(), runtime(jobs=f"{{name: node, template: {{{label}, spec: {{template: {template}}}}}}}")
    )
    assert pods(made)[0].main.env["A"] == "told"
