"""What becomes of a pod that somebody deletes."""

from __future__ import annotations

import pytest

from tests.rehearsal.controllers.actors import Job
from tests.rehearsal.controllers.manifests import pytorch, replica, runtime, trainjob
from trainer_launch.rehearsal import reporting
from trainer_launch.rehearsal.controllers.job_lifecycle import GIVE_UP

WORKER = replica("pytorch", spec="replicas: 2, restartPolicy: %s")


def torch(policy: str = "OnFailure", spec: str = "") -> Job:
    return Job(pytorch(f"{{{spec + ', ' if spec else ''}pytorchReplicaSpecs: {{Worker: {WORKER % policy}}}}}"))


def elastic() -> Job:
    return torch(spec="elasticPolicy: {minReplicas: 1, maxReplicas: 3}")


def train() -> Job:
    """A TrainJob of two nodes, whose JobSet restarts once."""
    label = "metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}"
    pod = "spec: {template: {spec: {restartPolicy: Never, containers: [{name: node, image: i}]}}, backoffLimit: 0}"
    job = f"{{name: node, template: {{{label}, {pod}}}}}"
    return Job(trainjob("{numNodes: 2}"), runtime(jobs=job, more="failurePolicy: {maxRestarts: 1}"))


# -- deleted ----------------------------------------------------------------------------------


def test_without_grace_all_containers_are_killed_and_the_pod_comes_back_after_its_time() -> None:
    two = "{containers: [{name: pytorch, image: i}, {name: log, image: i}]}"
    job = Job(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {{template: {{spec: {two}}}}}}}}}"))
    kills = [word for word in job.delete("job-worker-0", back_s=3.0) if word.startswith("kill")]
    assert kills == ["kill job-worker-0/log", "kill job-worker-0/pytorch"]
    job.go("worker-0=137 +1 worker-0/log=137")
    assert job.state.due_s() == job.now_s + 3, "the pod is gone now"
    assert job.wait(2.9) == []
    assert job.wait(0.2) == ["start job-worker-0/pytorch", "start job-worker-0/log"]
    assert (job.state.states["job-worker-0"].starts, job.phase("job-worker-0")) == (2, "Running")


def test_with_grace_it_is_asked_and_killed_when_that_is_over() -> None:
    job = torch()
    assert job.delete("job-worker-1", grace_s=10) == ["stop job-worker-1/pytorch"]
    assert job.wait(9.9) == []
    assert job.wait(0.2) == ["kill job-worker-1/pytorch"]
    job.end("job-worker-1", 137)
    assert job.wait(1.0) == ["start job-worker-1/pytorch"]


def test_what_leaves_with_0_because_it_was_asked_is_no_success_of_the_pod() -> None:
    job = torch()
    job.delete("job-worker-1", grace_s=10)
    assert job.go("worker-1=0 worker-0=0").verdict is None
    assert job.wait(1.0) == ["start job-worker-1/pytorch"]
    assert job.go("worker-1=0").verdict == (True, "PyTorchJobSucceeded")


@pytest.mark.parametrize("policy", ["Never", "ExitCode", "OnFailure"])
def test_deletions_count_towards_no_limit_of_the_v1_operator(policy: str) -> None:
    job = torch(policy, "runPolicy: {backoffLimit: 0}")
    for life in range(2, 3 * GIVE_UP):
        job.delete("job-worker-0")
        assert job.go("worker-0=137 +1").verdict is None
        assert job.state.states["job-worker-0"].starts == life
    if policy != "ExitCode":
        assert job.go("worker-0=1").verdict is not None, "a failure still counts"


def test_deletions_count_towards_no_limit_of_a_jobset() -> None:
    job = train()
    for _ in range(3):
        job.delete("job-node-0-1")
        job.go("node-0-1=137 +1")
    assert (job.verdict, job.state.counted) == (None, 0)
    assert job.go("node-0-1=1").state.counted == 1


# -- never back -------------------------------------------------------------------------------


def test_an_elastic_job_goes_on_without_a_pod_that_never_comes_back() -> None:
    job = elastic()
    job.delete("job-worker-1", back_s=None)
    job.end("job-worker-1", 137)
    assert job.wait(1000) == []
    assert job.phase("job-worker-1") == "Terminated"
    assert job.go("worker-0=0").verdict == (True, "PyTorchJobSucceeded")
    assert job.state.is_done


def test_a_job_that_cannot_complete_without_it_has_failed_when_nothing_runs_any_more() -> None:
    job = torch()
    job.delete("job-worker-1", back_s=None)
    assert job.go("worker-1=137").verdict is None, "the other one still runs"
    assert job.go("worker-0=0").verdict == (False, "PodLost")
    assert "job-worker-1" in job.message
    assert job.code == 138


@pytest.mark.parametrize("never", [True, False])
def test_a_survivor_that_waited_in_vain_is_not_blamed_for_the_pod_that_is_gone(never: bool) -> None:
    job = torch("Never", spec="runPolicy: {cleanPodPolicy: Running}")
    job.delete("job-worker-1", back_s=None if never else 100.0)
    job.end("job-worker-1", 137)
    lost = reporting.results(job.state, {"job-worker-0": "", "job-worker-1": ""}, lambda pod: "step 4")[1]
    assert (lost.message == "the pod was deleted, and not created again") is never
    job.go("worker-0=138 +4")
    assert job.verdict == (False, "PyTorchJobFailed")
    blamed = "job-worker-1: deleted, and not created again; " if never else ""
    assert job.message == f"{blamed}its worker job-worker-0 failed"


def test_a_survivor_that_fails_by_itself_is_blamed_though_another_pod_is_gone() -> None:
    job = torch("Never")
    job.delete("job-worker-1", back_s=None)
    job.go("worker-1=137 worker-0=3")
    assert job.message == "its worker job-worker-0 failed"


def test_the_end_of_the_job_gives_a_deleted_pod_no_further_life_and_no_more_time() -> None:
    job = torch("Never", spec="runPolicy: {cleanPodPolicy: All}")
    job.delete("job-worker-1", grace_s=1000)
    assert job.go("+50 worker-0=3").verdict == (False, "PyTorchJobFailed")
    assert "kill job-worker-1/pytorch" in job.wait(30)
    job.go("worker-1=137").finish()
    assert (job.phase("job-worker-1"), job.state.is_done) == ("Terminated", True)


def test_ctrl_c_shortens_the_grace_of_a_deleted_pod() -> None:
    job = torch()
    job.delete("job-worker-1", grace_s=1000)
    job.stop(grace_s=5)
    assert "kill job-worker-1/pytorch" in job.wait(5)
