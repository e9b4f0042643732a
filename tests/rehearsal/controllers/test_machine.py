"""Every rule by which a controller and its kubelets let pods live and die."""

from __future__ import annotations

import pytest

from tests.rehearsal.controllers.actors import Job
from tests.rehearsal.controllers.manifests import pytorch, replica
from trainer_launch.rehearsal.controllers.job_lifecycle import CAUSE_S, GIVE_UP, LINGER_S

FIELDS = {
    "PyTorchJob": ("pytorchReplicaSpecs", "pytorch"),
    "TFJob": ("tfReplicaSpecs", "tensorflow"),
    "XGBoostJob": ("xgbReplicaSpecs", "xgboost"),
    "PaddleJob": ("paddleReplicaSpecs", "paddle"),
    "JAXJob": ("jaxReplicaSpecs", "jax"),
}
TWO = "replicas: 2"


def v1(kind: str, specs: dict[str, str], spec: str = "") -> Job:
    field, container = FIELDS[kind]
    body = ", ".join(f"{role}: {replica(container, spec=more)}" for role, more in specs.items())
    return Job(
        f"apiVersion: kubeflow.org/v1\nkind: {kind}\nmetadata: {{name: j}}\n"
        f"spec: {{{spec + ', ' if spec else ''}{field}: {{{body}}}}}\n"
    )


def torch(master: str | None = "", worker: str = TWO, spec: str = "") -> Job:
    return v1("PyTorchJob", {**({} if master is None else {"Master": master}), "Worker": worker}, spec)


def mpi(spec: str = "") -> Job:
    body = f"Launcher: {replica('l')}, Worker: {replica('w', spec=TWO)}"
    return Job(
        "apiVersion: kubeflow.org/v2beta1\nkind: MPIJob\nmetadata: {name: j}\n"
        f"spec: {{{spec + ', ' if spec else ''}mpiReplicaSpecs: {{{body}}}}}\n"
    )


# -- success ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "specs", "spec", "steps"),
    [
        ("PyTorchJob", {"Master": "", "Worker": TWO}, "", "worker-0=0 master-0=0"),
        ("PyTorchJob", {"Worker": TWO}, "", "worker-0=0 worker-1=0"),
        ("PyTorchJob", {"Worker": TWO}, "elasticPolicy: {minReplicas: 1}", "worker-1=0"),
        ("TFJob", {"Chief": "", "Worker": TWO, "PS": ""}, "", "chief-0=0"),
        ("TFJob", {"Master": "", "Worker": ""}, "", "master-0=0"),
        ("TFJob", {"Worker": TWO, "PS": ""}, "", "worker-0=0"),
        ("TFJob", {"Worker": TWO, "PS": ""}, "successPolicy: AllWorkers", "worker-1=0 worker-0=0"),
        ("XGBoostJob", {"Master": "", "Worker": ""}, "", "master-0=0"),
        ("PaddleJob", {"Master": "", "Worker": ""}, "", "master-0=0"),
        ("PaddleJob", {"Worker": TWO}, "", "worker-0=0 worker-1=0"),
        ("JAXJob", {"Worker": TWO}, "", "worker-1=0 worker-0=0"),
    ],
)
def test_who_decides_the_success_of_a_job(kind: str, specs: dict[str, str], spec: str, steps: str) -> None:
    job = v1(kind, specs, spec)
    for step in steps.split():
        assert job.verdict is None
        job.go(step)
    assert job.verdict == (True, f"{kind}Succeeded")


# -- restartPolicy ----------------------------------------------------------------------------


def test_on_failure_restarts_the_container_in_its_pod_at_once_and_then_with_back_off() -> None:
    job = torch()
    assert job.end("j-worker-0", 1) == ["start j-worker-0/pytorch"]
    assert job.end("j-worker-0", 1) == []
    assert job.state.due_s() == job.now_s + 1
    assert job.wait(0.9) == []
    assert job.wait(0.2) == ["start j-worker-0/pytorch"]
    assert job.end("j-worker-0", 1) == []
    assert job.state.due_s() == job.now_s + 2
    assert job.state.states["j-worker-0"].starts == 1, "the same pod"
    assert job.state.states["j-worker-0"].restart_count == 3


def ruled(rules: str, spec: str = "restartPolicy: Never") -> Job:
    """A PyTorchJob with a single worker, whose containers have restartPolicyRules."""
    template = f"{{spec: {{containers: [{{name: pytorch, image: i, {rules}}}, {{name: side, image: i}}]}}}}"
    return Job(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {{{spec}, template: {template}}}}}}}"))


@pytest.mark.parametrize("spec", ["restartPolicy: Never", "restartPolicy: ExitCode"])
@pytest.mark.parametrize(
    ("operator", "codes", "code", "restarts"),
    [
        ("In", "137, 138", 138, True),
        ("In", "137, 138", 1, False),
        ("NotIn", "0, 1", 137, True),
        ("NotIn", "0, 1", 1, False),
        ("In", "", 137, False),
        ("NotIn", "", 0, True),
    ],
)
def test_a_containers_rules_decide_by_its_exit_code_whatever_the_pod_says(
    spec: str, operator: str, codes: str, code: int, restarts: bool
) -> None:
    exits = f"exitCodes: {{operator: {operator}, values: [{codes}]}}"
    job = ruled(f"restartPolicy: Never, restartPolicyRules: [{{action: Restart, {exits}}}]", spec)
    assert job.end("job-worker-0", code) == (["start job-worker-0/pytorch"] if restarts else [])


def test_never_fails_the_job_with_the_pods_code() -> None:
    job = torch(worker="restartPolicy: Never, replicas: 2").go("worker-1=7")
    assert job.verdict == (False, "PyTorchJobFailed")
    assert job.code == 7
    assert "j-worker-1" in job.message


@pytest.mark.parametrize("code", [126, 127])
def test_a_program_that_cannot_be_run_ends_the_rehearsal_at_once_where_a_cluster_would_retry(code: int) -> None:
    job = torch()
    assert job.end("j-worker-1", code) == ["stop j-master-0/pytorch", "stop j-worker-0/pytorch"]
    assert (job.verdict, job.code) == ((False, "ContainerCannotRun"), code)
    assert f"container pytorch of j-worker-1 ended with {code} (program not" in job.message
    assert "a cluster would retry, the rehearsal stops" in job.message


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_who_only_lost_its_peer_is_not_the_cause(order: tuple[int, int]) -> None:
    job = torch(worker="restartPolicy: Never, replicas: 3", spec="runPolicy: {cleanPodPolicy: Running}")
    job.end(f"j-worker-{order[0]}", 138)
    assert job.verdict is None, "nobody else is stopped before the cause has had the time to end"
    assert job.end(f"j-worker-{order[1]}", 33) == ["stop j-master-0/pytorch", "stop j-worker-2/pytorch"]
    assert job.code == 33


def test_who_lost_its_peer_is_the_cause_when_no_other_comes() -> None:
    job = torch(worker="restartPolicy: Never, replicas: 3").go("worker-0=138")
    assert job.state.due_s() == job.now_s + CAUSE_S
    job.wait(CAUSE_S)
    assert job.verdict == (False, "PyTorchJobFailed")
    assert torch(master=None, worker="restartPolicy: Never").go("worker-0=138").verdict is not None


def test_a_pod_that_has_trained_says_which_other_container_it_waits_for() -> None:
    two = "{containers: [{name: pytorch, image: i}, {name: log, image: i}]}"
    job = Job(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {{template: {{spec: {two}}}}}}}}}"))
    assert job.go("worker-0=0").verdict is None
    (sentence,) = job.said
    assert "job-worker-0: pytorch has ended with exit code 0, and the pod waits for log; an init con" in sentence
    assert job.go("worker-0/log=0").verdict == (True, "PyTorchJobSucceeded")
    assert len(job.said) == 1
    other = Job(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {{template: {{spec: {two}}}}}}}}}"))
    assert other.go("worker-0/log=0 worker-0=0").said == []


@pytest.mark.parametrize("code", [128, 138, 255])
def test_exit_code_makes_the_pod_anew_from_128_on(code: int) -> None:
    job = torch(worker="restartPolicy: ExitCode")
    assert job.end("j-worker-0", code) == ["start j-worker-0/pytorch"]
    assert job.state.states["j-worker-0"].starts == 2, "another pod of the same name"
    assert job.state.states["j-worker-0"].restart_count == 0
    assert job.said == [f"j-worker-0 failed (exit code {code}): the controller recreates it"]


@pytest.mark.parametrize("code", [1, 127])
def test_exit_code_takes_1_to_127_as_permanent(code: int) -> None:
    assert torch(worker="restartPolicy: ExitCode").go(f"worker-0={code}").verdict == (False, "PyTorchJobFailed")


def test_what_would_be_started_for_ever_is_given_up() -> None:
    job = torch()
    for _ in range(GIVE_UP):
        assert job.verdict is None
        job.go("worker-0=3 +40")
    assert (job.verdict, job.code) == ((False, "CrashLoopBackOff"), 3)


# -- runPolicy --------------------------------------------------------------------------------


def test_the_backoff_limit_counts_restarts_of_all_pods() -> None:
    job = torch(spec="runPolicy: {backoffLimit: 2}").go("worker-0=1")
    assert job.verdict is None
    assert job.go("worker-1=1").verdict == (False, "BackoffLimitExceeded")


@pytest.mark.parametrize("policy", ["Running", "All"])
def test_clean_pod_policy_stops_what_runs_at_the_end(policy: str) -> None:
    job = torch(spec=f"runPolicy: {{cleanPodPolicy: {policy}}}")
    assert job.end("j-master-0") == ["stop j-worker-0/pytorch", "stop j-worker-1/pytorch"]
    assert job.wait(29) == []
    assert job.wait(2) == ["kill j-worker-0/pytorch", "kill j-worker-1/pytorch"]


def test_clean_pod_policy_none_leaves_them_alone_for_a_while() -> None:
    job = torch()
    assert job.end("j-master-0") == []
    assert job.end("j-worker-0") == []
    assert job.wait(LINGER_S) == ["stop j-worker-1/pytorch"]
    assert job.said == ["stopped after the end of the job: j-worker-1"]


# -- a pod with init containers ---------------------------------------------------------------


def with_init(spec: str = "") -> Job:
    sidecar = "{name: side, command: [x], restartPolicy: Always}"
    init = f"initContainers: [{{name: first, command: [x]}}, {sidecar}, {{name: second, command: [x]}}]"
    template = f"{{spec: {{{init}, containers: [{{name: pytorch, image: i}}, {{name: log, image: i}}]}}}}"
    return Job(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {{template: {template}{spec}}}}}}}"))


def test_an_init_container_that_fails_under_exit_code_is_retried_as_nobody_knows_the_main_ones_code() -> None:
    job = with_init(", restartPolicy: ExitCode")
    assert job.end("job-worker-0", 20, "first") == ["start job-worker-0/first"]
    assert job.state.states["job-worker-0"].starts == 2


def test_a_pod_is_made_anew_when_its_sidecars_have_ended() -> None:
    job = with_init(", restartPolicy: ExitCode").go("worker-0/first=0 worker-0/second=0 worker-0=137")
    assert job.end("job-worker-0", 137, "log") == ["kill job-worker-0/side", "stop job-worker-0/side"]
    assert job.end("job-worker-0", 137, "side") == ["start job-worker-0/first"]


# -- mpi-operator -----------------------------------------------------------------------------


def test_workers_of_mpi_operator_are_not_made_again_and_fail_nothing() -> None:
    job = mpi().go("worker-0=137 +100")
    assert (job.verdict, job.phase("j-worker-0")) == (None, "Failed")
    assert job.go("launcher=0").verdict == (True, "MPIJobSucceeded")


def test_the_launcher_of_mpi_operator_has_a_jobs_backoff_limit() -> None:
    job = mpi("runPolicy: {backoffLimit: 1, cleanPodPolicy: Running}")
    asked = job.end("j-launcher", 1)
    assert job.verdict == (False, "BackoffLimitExceeded")
    assert asked.count("stop j-worker-0/w") == 1


# -- asked to stop ----------------------------------------------------------------------------


def test_asked_a_second_time_everybody_is_killed() -> None:
    job = torch(master=None, worker="replicas: 1")
    assert job.stop() == ["stop j-worker-0/pytorch"]
    assert job.stop() == ["kill j-worker-0/pytorch"]
