"""What becomes of a pod that somebody deletes, and of one that is added while the job runs."""

from __future__ import annotations

import pytest

from tests.rehearsal.controllers.actors import Job
from tests.rehearsal.controllers.manifests import documents_of, pytorch, replica, runtime, trainjob
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.controllers import scaled
from trainer_launch.rehearsal.controllers.restart_decisions import GIVE_UP

WORKER = replica("pytorch", spec="replicas: 2, restartPolicy: %s")
TWO = "{containers: [{name: pytorch, image: i}, {name: log, image: i}]}"


def torch(policy: str = "OnFailure", spec: str = "") -> Job:
    return Job(pytorch(f"{{{spec + ', ' if spec else ''}pytorchReplicaSpecs: {{Worker: {WORKER % policy}}}}}"))


def elastic() -> Job:
    return torch(spec="elasticPolicy: {minReplicas: 1, maxReplicas: 3}")


def train(more: str = "", jobset: str = "") -> Job:
    label = "metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}"
    pod = "{spec: {template: {spec: {restartPolicy: Never, containers: [{name: node, image: i}]}}%s}}"
    job = f"{{name: node, template: {{{label}, {(pod % more)[1:-1]}}}}}"
    return Job(trainjob("{numNodes: 2}"), runtime(jobs=job, more=jobset))


# -- deleted ----------------------------------------------------------------------------------


def test_without_grace_all_containers_are_killed_and_the_pod_comes_back_after_its_time() -> None:
    job = Job(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {{template: {{spec: {TWO}}}}}}}}}"))
    asked = job.delete("job-worker-0", back_s=3.0)
    assert [word for word in asked if word.startswith("kill")] == [
        "kill job-worker-0/log",
        "kill job-worker-0/pytorch",
    ]
    assert job.end("job-worker-0", 137) == []
    job.wait(1.0)
    assert job.end("job-worker-0", 137, "log") == [], "the pod is gone now"
    assert job.state.due_s() == job.now_s + 3
    assert job.wait(2.9) == []
    assert job.wait(0.2) == ["start job-worker-0/pytorch", "start job-worker-0/log"]
    assert job.state.states["job-worker-0"].starts == 2
    assert job.phase("job-worker-0") == "Running"


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
    job.end("job-worker-1", 0)
    job.end("job-worker-0", 0)
    assert job.verdict is None
    assert job.wait(1.0) == ["start job-worker-1/pytorch"]
    job.end("job-worker-1", 0)
    assert job.verdict == (True, "PyTorchJobSucceeded")


def test_a_kill_in_the_middle_of_the_grace_comes_at_once() -> None:
    job = torch()
    job.delete("job-worker-1", grace_s=100)
    assert job.delete("job-worker-1") == ["kill job-worker-1/pytorch"]
    job.end("job-worker-1", 137)
    assert job.wait(1.0) == ["start job-worker-1/pytorch"]
    assert job.state.states["job-worker-1"].deleted == 1


def test_a_pod_that_waits_for_its_next_start_is_made_anew_as_well() -> None:
    job = torch()
    for _ in range(2):
        job.end("job-worker-0", 1)
    assert job.delete("job-worker-0", back_s=5.0) == []
    assert job.wait(4.9) == []
    assert job.wait(0.2) == ["start job-worker-0/pytorch"]
    assert job.state.states["job-worker-0"].restart_count == 0


def test_a_pod_that_has_ended_is_left_alone() -> None:
    job = torch()
    job.end("job-worker-0", 0)
    assert job.delete("job-worker-0") == []
    job.end("job-worker-1", 0)
    assert job.verdict == (True, "PyTorchJobSucceeded")


@pytest.mark.parametrize("policy", ["Never", "ExitCode", "OnFailure"])
def test_deletions_count_towards_no_limit_of_the_v1_operator(policy: str) -> None:
    job = torch(policy, "runPolicy: {backoffLimit: 0}")
    for life in range(2, 3 * GIVE_UP):
        job.delete("job-worker-0")
        job.end("job-worker-0", 137)
        job.wait(1.0)
        assert job.verdict is None
        assert job.state.states["job-worker-0"].starts == life
    if policy != "ExitCode":
        job.end("job-worker-0", 1)
        assert job.verdict is not None, "a failure still counts"


def test_deletions_count_towards_no_limit_of_a_jobset() -> None:
    job = train(", backoffLimit: 0", "failurePolicy: {maxRestarts: 1}")
    for _ in range(3):
        job.delete("job-node-0-1")
        job.end("job-node-0-1", 137)
        job.wait(1.0)
    assert (job.verdict, job.state.counted) == (None, 0)
    job.end("job-node-0-1", 1)
    assert job.state.counted == 1


def test_a_worker_of_mpi_operator_comes_back_when_it_was_deleted() -> None:
    body = f"Launcher: {replica('l')}, Worker: {replica('w', spec='replicas: 2')}"
    job = Job(
        "apiVersion: kubeflow.org/v2beta1\nkind: MPIJob\nmetadata: {name: j}\n"
        f"spec: {{mpiReplicaSpecs: {{{body}}}}}\n"
    )
    job.delete("j-worker-1")
    job.end("j-worker-1", 137)
    assert job.wait(1.0) == ["start j-worker-1/w"]


# -- never back -------------------------------------------------------------------------------


def test_an_elastic_job_goes_on_without_a_pod_that_never_comes_back() -> None:
    job = elastic()
    job.delete("job-worker-1", back_s=None)
    job.end("job-worker-1", 137)
    assert job.wait(1000) == []
    assert job.phase("job-worker-1") == "Terminated"
    job.end("job-worker-0", 0)
    assert job.verdict == (True, "PyTorchJobSucceeded")
    assert job.state.is_done


def test_a_job_that_cannot_complete_without_it_has_failed_when_nothing_runs_any_more() -> None:
    job = torch()
    job.delete("job-worker-1", back_s=None)
    job.end("job-worker-1", 137)
    assert job.verdict is None, "the other one still runs"
    job.end("job-worker-0", 0)
    assert job.verdict == (False, "PodLost")
    assert job.state.condition is not None
    assert "job-worker-1" in job.state.condition.message
    assert job.state.condition.exit_code == 138


def test_a_jobset_that_restarts_does_not_get_it_back_either() -> None:
    job = train(", backoffLimit: 0", "failurePolicy: {maxRestarts: 1}")
    job.delete("job-node-0-1", back_s=None)
    job.end("job-node-0-1", 137)
    job.end("job-node-0-0", 1)
    assert job.state.counted == 1
    assert (job.phase("job-node-0-0"), job.phase("job-node-0-1")) == ("Running", "Terminated")


# -- deleted, then the end --------------------------------------------------------------------


def test_the_end_of_the_job_gives_a_deleted_pod_no_further_life_and_no_more_time() -> None:
    job = torch(spec="runPolicy: {cleanPodPolicy: All, activeDeadlineSeconds: 50}")
    job.delete("job-worker-1", grace_s=1000)
    job.wait(50)
    assert job.verdict == (False, "DeadlineExceeded")
    assert "kill job-worker-1/pytorch" in job.wait(30)
    job.end("job-worker-1", 137)
    job.finish()
    assert job.phase("job-worker-1") == "Terminated"
    assert job.state.is_done


def test_ctrl_c_shortens_the_grace_of_a_deleted_pod() -> None:
    job = torch()
    job.delete("job-worker-1", grace_s=1000)
    job.stop(grace_s=5)
    assert "kill job-worker-1/pytorch" in job.wait(5)


# -- added ------------------------------------------------------------------------------------


def test_an_added_pod_is_what_the_controller_makes_of_the_scaled_job() -> None:
    job = elastic()
    assert job.add() == ["start job-worker-2/pytorch"]
    env = job.state.pods["job-worker-2"].main.env
    assert env["PET_NNODES"] == "1:3"
    assert env["PET_RDZV_ENDPOINT"] == "job-worker-0:23456"
    assert job.add() == ["start job-worker-3/pytorch"]


def test_its_rules_are_those_of_the_scaled_job() -> None:
    job = elastic()
    job.add()
    job.end("job-worker-2", 0)
    assert job.verdict == (True, "PyTorchJobSucceeded"), "in an elastic job the first worker that is done ends it"
    job = torch()
    job.add()
    job.end("job-worker-0", 0)
    job.end("job-worker-1", 0)
    assert job.verdict is None, "in a fixed one all have to be done"


def test_it_lives_like_the_others() -> None:
    job = elastic()
    job.add()
    job.delete("job-worker-2")
    job.end("job-worker-2", 137)
    assert job.wait(1.0) == ["start job-worker-2/pytorch"]


def test_scaled_down_the_highest_indexes_end_with_their_own_grace_period() -> None:
    job = elastic()
    job.add(2)
    assert job.add(-3) == [f"stop job-worker-{index}/pytorch" for index in (1, 2, 3)]
    job.end("job-worker-3", 143)
    assert job.phase("job-worker-3") == "Terminated"
    assert job.wait(29) == []
    assert job.wait(2) == ["kill job-worker-1/pytorch", "kill job-worker-2/pytorch"]
    assert [*job.state.there] == ["job-worker-0"]


def test_what_is_scaled_down_neither_fails_the_job_nor_completes_it() -> None:
    job = torch()
    job.add(-1)
    job.end("job-worker-1", 0)
    assert job.verdict is None
    job.end("job-worker-0", 0)
    assert job.verdict == (True, "PyTorchJobSucceeded"), "the other one is not waited for"


def test_scaled_up_again_a_pod_starts_as_soon_as_its_old_one_has_ended() -> None:
    job = elastic()
    job.add(-1)
    assert job.add() == []
    assert job.end("job-worker-1", 143) == ["start job-worker-1/pytorch"]
    job.add(-1)
    job.end("job-worker-1", 143)
    assert job.add() == ["start job-worker-1/pytorch"]
    assert job.state.states["job-worker-1"].starts == 3


def test_a_pod_that_waits_for_its_next_life_does_not_get_it_when_the_job_is_scaled_down() -> None:
    job = elastic()
    job.delete("job-worker-1", back_s=5)
    job.end("job-worker-1", 137)
    job.add(-1)
    assert job.phase("job-worker-1") == "Terminated"
    assert job.wait(60) == []


def test_a_pod_that_is_being_deleted_does_not_come_back_when_the_job_is_scaled_down() -> None:
    job = elastic()
    job.delete("job-worker-1", grace_s=20, back_s=5)
    job.add(-1)
    job.end("job-worker-1", 143)
    assert (job.phase("job-worker-1"), job.wait(60)) == ("Terminated", [])


def test_scaling_to_the_size_it_has_changes_nothing() -> None:
    job = elastic()
    assert job.add(0) == []
    assert len(job.state.there) == 2


def test_nothing_is_added_after_the_end() -> None:
    job = elastic()
    job.end("job-worker-0", 0)
    assert job.add() == []


def test_a_job_with_a_fixed_number_of_nodes_cannot_be_scaled() -> None:
    with pytest.raises(UsageError, match="Worker replicas"):
        scaled(documents_of(trainjob(), runtime()), 1)


def test_scaling_leaves_the_manifest_as_it_was() -> None:
    documents = documents_of(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {WORKER % 'Never'}}}}}"))
    assert scaled(documents, 2)[0].get("spec", "pytorchReplicaSpecs", "Worker", "replicas").value == 4
    assert documents[0].get("spec", "pytorchReplicaSpecs", "Worker", "replicas").value == 2
