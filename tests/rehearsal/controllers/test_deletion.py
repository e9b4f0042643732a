"""What becomes of a pod that somebody deletes, and of a job that is scaled while it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rehearsal.controllers.actors import Job
from tests.rehearsal.controllers.manifests import documents_of, pytorch, replica, runtime, trainjob
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.controllers import scaled, workload_of
from trainer_launch.rehearsal.controllers.job_lifecycle import GIVE_UP
from trainer_launch.rehearsal.kubelet import Kubelet, Setting
from trainer_launch.rehearsal.report import pod_rows

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


def test_a_kill_in_the_middle_of_the_grace_comes_at_once() -> None:
    job = torch()
    job.delete("job-worker-1", grace_s=100)
    assert job.delete("job-worker-1") == ["kill job-worker-1/pytorch"]
    job.end("job-worker-1", 137)
    assert job.wait(1.0) == ["start job-worker-1/pytorch"]
    assert job.state.states["job-worker-1"].deleted == 1


def test_a_pod_that_waits_for_its_next_start_is_made_anew_as_well() -> None:
    job = torch().go("worker-0=1 worker-0=1")
    assert job.delete("job-worker-0", back_s=5.0) == []
    assert job.wait(4.9) == []
    assert job.wait(0.2) == ["start job-worker-0/pytorch"]
    assert job.state.states["job-worker-0"].restart_count == 0


def test_a_pod_that_has_ended_is_left_alone() -> None:
    job = torch().go("worker-0=0")
    assert job.delete("job-worker-0") == []
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


def test_a_worker_of_mpi_operator_comes_back_when_it_was_deleted() -> None:
    body = f"Launcher: {replica('l')}, Worker: {replica('w', spec='replicas: 2')}"
    head = "apiVersion: kubeflow.org/v2beta1\nkind: MPIJob\nmetadata: {name: j}\n"
    job = Job(f"{head}spec: {{mpiReplicaSpecs: {{{body}}}}}\n")
    job.delete("j-worker-1")
    job.end("j-worker-1", 137)
    assert job.wait(1.0) == ["start j-worker-1/w"]


# -- scaled: what new pods are told -------------------------------------------------------------


FIELDS = {"PyTorchJob": "pytorch", "JAXJob": "jax", "PaddleJob": "paddle"}


@pytest.mark.parametrize(
    ("kind", "variable"),
    [("PyTorchJob", "PET_NNODES"), ("JAXJob", "NUM_PROCESSES"), ("PaddleJob", "PADDLE_NNODES")],
)
@pytest.mark.parametrize("more", [-1, 1])
def test_a_pod_that_a_scaled_job_makes_anew_has_the_new_number_and_one_that_runs_on_the_old(
    kind: str, variable: str, more: int
) -> None:
    field = FIELDS[kind]
    worker = replica(field, spec="replicas: 3, restartPolicy: OnFailure")
    job = Job(
        f"apiVersion: kubeflow.org/v1\nkind: {kind}\nmetadata: {{name: j}}\n"
        f"spec: {{{field}ReplicaSpecs: {{Worker: {worker}}}}}\n"
    )
    job.add(more)
    job.end("j-worker-1", 1)
    assert job.state.pods["j-worker-1"].main.env[variable] == "3", "the same pod: its container only restarts"
    job.delete("j-worker-1")
    job.end("j-worker-1", 137)
    assert job.wait(1.0) == [f"start j-worker-1/{field}"]
    assert job.state.pods["j-worker-1"].main.env[variable] == str(3 + more)


def test_a_job_that_shrinks_and_grows_keeps_addresses_and_tells_new_pods_its_present_size(tmp_path: Path) -> None:
    documents = documents_of(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {WORKER % 'Never'}}}}}"))
    kubelet = Kubelet(workload_of(documents), tmp_path, Setting(launchers={}, path="/bin"))
    sizes = []
    for more in (0, 2, -1, 1):
        made = kubelet.scale(workload_of(scaled(documents, more)))
        assert [pod.address for pod in made] == [f"127.0.0.{2 + number}" for number in range(2 + more)]
        sizes.append([kubelet.process(pod, "pytorch", 1).env["PET_NNODES"] for pod in made])
    assert sizes == [["2"] * 2, ["4"] * 4, ["1"], ["3"] * 3]


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
    lost = pod_rows.results(job.state, {"job-worker-0": "", "job-worker-1": ""}, lambda pod: "step 4")[1]
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


def test_a_jobset_that_restarts_does_not_get_it_back_either() -> None:
    job = train()
    job.delete("job-node-0-1", back_s=None)
    assert job.go("node-0-1=137 node-0-0=1").state.counted == 1
    assert (job.phase("job-node-0-0"), job.phase("job-node-0-1")) == ("Running", "Terminated")


def test_the_end_of_the_job_gives_a_deleted_pod_no_further_life_and_no_more_time() -> None:
    job = torch(spec="runPolicy: {cleanPodPolicy: All, activeDeadlineSeconds: 50}")
    job.delete("job-worker-1", grace_s=1000)
    assert job.go("+50").verdict == (False, "DeadlineExceeded")
    assert "kill job-worker-1/pytorch" in job.wait(30)
    job.go("worker-1=137").finish()
    assert (job.phase("job-worker-1"), job.state.is_done) == ("Terminated", True)


def test_ctrl_c_shortens_the_grace_of_a_deleted_pod() -> None:
    job = torch()
    job.delete("job-worker-1", grace_s=1000)
    job.stop(grace_s=5)
    assert "kill job-worker-1/pytorch" in job.wait(5)


# -- scaled -----------------------------------------------------------------------------------


def test_an_added_pod_is_what_the_controller_makes_of_the_scaled_job_and_lives_like_the_others() -> None:
    job = elastic()
    assert job.add() == ["start job-worker-2/pytorch"]
    env = job.state.pods["job-worker-2"].main.env
    assert (env["PET_NNODES"], env["PET_RDZV_ENDPOINT"]) == ("1:3", "job-worker-0:23456")
    assert job.add() == ["start job-worker-3/pytorch"]
    job.delete("job-worker-2")
    job.end("job-worker-2", 137)
    assert job.wait(1.0) == ["start job-worker-2/pytorch"]


def test_the_rules_are_those_of_the_scaled_job() -> None:
    job = elastic()
    job.add()
    assert job.go("worker-2=0").verdict == (True, "PyTorchJobSucceeded"), "the first worker that is done ends it"
    job = torch()
    job.add()
    assert job.go("worker-0=0 worker-1=0").verdict is None, "in a fixed job all have to be done"


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
    assert job.go("worker-1=0").verdict is None
    assert job.go("worker-0=0").verdict == (True, "PyTorchJobSucceeded"), "the other one is not waited for"


def test_scaled_up_again_a_pod_starts_as_soon_as_its_old_one_has_ended() -> None:
    job = elastic()
    job.add(-1)
    assert job.add() == []
    assert job.end("job-worker-1", 143) == ["start job-worker-1/pytorch"]
    job.add(-1)
    job.end("job-worker-1", 143)
    assert job.add() == ["start job-worker-1/pytorch"]
    assert job.state.states["job-worker-1"].starts == 3


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_deleted_pod_does_not_come_back_when_the_job_is_scaled_down(is_gone: bool) -> None:
    job = elastic()
    job.delete("job-worker-1", grace_s=20, back_s=5)
    if is_gone:
        job.end("job-worker-1", 143)
    job.add(-1)
    if not is_gone:
        job.end("job-worker-1", 143)
    assert (job.phase("job-worker-1"), job.wait(60)) == ("Terminated", [])


def test_neither_the_size_that_it_has_nor_scaling_after_the_end_changes_anything() -> None:
    job = elastic()
    assert (job.add(0), len(job.state.there)) == ([], 2)
    assert job.go("worker-0=0").add() == []


def test_a_job_with_a_fixed_number_of_nodes_cannot_be_scaled() -> None:
    with pytest.raises(UsageError, match="Worker replicas"):
        scaled(documents_of(trainjob(), runtime()), 1)


def test_scaling_leaves_the_manifest_as_it_was() -> None:
    documents = documents_of(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {WORKER % 'Never'}}}}}"))
    place = ("spec", "pytorchReplicaSpecs", "Worker", "replicas")
    assert scaled(documents, 2)[0].get(*place).value == 4
    assert documents[0].get(*place).value == 2
