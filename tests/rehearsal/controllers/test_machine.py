"""Every rule by which a controller and its kubelets let pods live and die, one test each."""

from __future__ import annotations

import pytest

from tests.rehearsal.controllers.actors import Job
from tests.rehearsal.controllers.manifests import pytorch, replica, runtime, trainjob
from trainer_launch.rehearsal.controllers.job_lifecycle import CAUSE_S, LINGER_S
from trainer_launch.rehearsal.controllers.restart_decisions import GIVE_UP


def v1(kind: str, field: str, container: str, specs: dict[str, str], spec: str = "") -> str:
    body = ", ".join(f"{role}: {replica(container, spec=more)}" for role, more in specs.items())
    return (
        f"apiVersion: kubeflow.org/v1\nkind: {kind}\nmetadata: {{name: j}}\n"
        f"spec: {{{spec + ', ' if spec else ''}{field}: {{{body}}}}}\n"
    )


def torch(master: str | None = "", worker: str | None = "replicas: 2", spec: str = "") -> Job:
    specs = {"Master": master, "Worker": worker}
    given = {role: more for role, more in specs.items() if more is not None}
    return Job(v1("PyTorchJob", "pytorchReplicaSpecs", "pytorch", given, spec))


def tensorflow(specs: dict[str, str], spec: str = "") -> Job:
    return Job(v1("TFJob", "tfReplicaSpecs", "tensorflow", specs, spec))


# -- success ----------------------------------------------------------------------------------


def test_a_pytorchjob_is_done_when_its_master_is() -> None:
    job = torch()
    assert sorted(job.began) == [f"start j-{name}/pytorch" for name in ("master-0", "worker-0", "worker-1")]
    job.end("j-worker-0")
    assert job.verdict is None
    job.end("j-master-0")
    assert job.verdict == (True, "PyTorchJobSucceeded")
    assert not job.state.is_done, "a worker still runs"
    job.end("j-worker-1")
    assert job.state.is_done


def test_without_a_master_all_workers_have_to_be_done() -> None:
    job = torch(master=None)
    job.end("j-worker-0")
    assert job.verdict is None
    job.end("j-worker-1")
    assert job.verdict == (True, "PyTorchJobSucceeded")


def test_an_elastic_job_is_done_with_its_first_worker() -> None:
    job = torch(master=None, spec="elasticPolicy: {minReplicas: 1}")
    job.end("j-worker-1")
    assert job.verdict == (True, "PyTorchJobSucceeded")


@pytest.mark.parametrize(
    ("specs", "spec", "enough"),
    [
        ({"Chief": "", "Worker": "replicas: 2", "PS": ""}, "", ["j-chief-0"]),
        ({"Master": "", "Worker": ""}, "", ["j-master-0"]),
        ({"Worker": "replicas: 2", "PS": ""}, "", ["j-worker-0"]),
        ({"Worker": "replicas: 2", "PS": ""}, "successPolicy: AllWorkers", ["j-worker-1", "j-worker-0"]),
    ],
)
def test_a_tfjob_is_done_by_its_chief_or_first_or_all_workers(
    specs: dict[str, str], spec: str, enough: list[str]
) -> None:
    job = tensorflow(specs, spec)
    for name in enough:
        assert job.verdict is None
        job.end(name)
    assert job.verdict == (True, "TFJobSucceeded")


@pytest.mark.parametrize(
    ("kind", "field", "container", "specs", "enough"),
    [
        ("XGBoostJob", "xgbReplicaSpecs", "xgboost", {"Master": "", "Worker": ""}, ["j-master-0"]),
        ("PaddleJob", "paddleReplicaSpecs", "paddle", {"Master": "", "Worker": ""}, ["j-master-0"]),
        ("PaddleJob", "paddleReplicaSpecs", "paddle", {"Worker": "replicas: 2"}, ["j-worker-0", "j-worker-1"]),
        ("JAXJob", "jaxReplicaSpecs", "jax", {"Worker": "replicas: 2"}, ["j-worker-1", "j-worker-0"]),
    ],
)
def test_who_decides_the_success_of_the_other_kinds(
    kind: str, field: str, container: str, specs: dict[str, str], enough: list[str]
) -> None:
    job = Job(v1(kind, field, container, specs))
    for name in enough:
        assert job.verdict is None
        job.end(name)
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


RULES = "restartPolicy: Never, restartPolicyRules: [{action: %s, exitCodes: {operator: %s, values: [%s]}}]"


def ruled(rules: str, spec: str = "restartPolicy: Never", init: str = "") -> Job:
    """A PyTorchJob with a single worker, whose containers have restartPolicyRules."""
    containers = f"containers: [{{name: pytorch, image: i, {rules}}}, {{name: side, image: i}}]"
    template = f"{{spec: {{{containers}{f', initContainers: [{init}]' if init else ''}}}}}"
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
    job = ruled(RULES % ("Restart", operator, codes), spec)
    assert job.end("job-worker-0", code) == (["start job-worker-0/pytorch"] if restarts else [])


def test_the_first_rule_that_fits_counts_and_then_the_containers_own_policy() -> None:
    rules = "[{action: Restart, exitCodes: {operator: In, values: [3]}}, %s]"
    last = "{action: RestartAllContainers, exitCodes: {operator: In, values: [3, 4]}}"
    job = ruled(f"restartPolicy: OnFailure, restartPolicyRules: {rules % last}")
    assert job.end("job-worker-0", 3) == ["start job-worker-0/pytorch"]
    job.wait(60)
    assert job.end("job-worker-0", 4) == ["kill job-worker-0/side"]
    job.end("job-worker-0", 137, "side")
    job.wait(60)
    job.end("job-worker-0", 5)
    assert job.wait(60) == ["start job-worker-0/pytorch"], "OnFailure"
    assert job.end("job-worker-0", 0) == []


def test_all_containers_start_again_in_the_same_pod_behind_its_init_containers() -> None:
    job = ruled(RULES % ("RestartAllContainers", "In", "137"), init="{name: prepare, image: i}")
    job.end("job-worker-0", 0, "prepare")
    assert job.end("job-worker-0", 137) == ["kill job-worker-0/side"], "without a grace period"
    assert job.end("job-worker-0", 137, "side") == ["start job-worker-0/prepare"]
    asked = job.end("job-worker-0", 0, "prepare")
    assert asked == ["start job-worker-0/pytorch", "start job-worker-0/side"]
    state = job.state.states["job-worker-0"]
    assert (state.starts, dict(state.restarts)) == (1, {"prepare": 1, "pytorch": 1, "side": 1})
    job.end("job-worker-0", 137)
    job.end("job-worker-0", 137, "side")
    assert job.wait(0.9) == []
    assert job.wait(0.2) == ["start job-worker-0/prepare"], "with back-off"


def test_a_sidecar_may_restart_them_all_and_an_init_container_may_fail_by_its_own_policy() -> None:
    rules = (RULES % ("RestartAllContainers", "In", "88")).replace("Never", "Always")
    sidecar = f"{{name: watch, image: i, {rules}}}"
    job = ruled("restartPolicy: OnFailure", init=sidecar)
    assert job.end("job-worker-0", 88, "watch") == ["kill job-worker-0/pytorch", "kill job-worker-0/side"]
    job = ruled("restartPolicy: Always", "restartPolicy: OnFailure", "{name: p, image: i, restartPolicy: Never}")
    assert job.end("job-worker-0", 1, "p") == ["start job-worker-0/p"], "the operator makes the failed pod anew"
    assert job.state.states["job-worker-0"].starts == 2


def test_containers_that_restart_all_for_ever_are_given_up() -> None:
    job = ruled(RULES % ("RestartAllContainers", "NotIn", "0"))
    for _ in range(GIVE_UP):
        job.end("job-worker-0", 137)
        if job.verdict is None:
            job.end("job-worker-0", 137, "side")
            job.wait(30)
    assert job.verdict == (False, "CrashLoopBackOff")


def test_always_restarts_what_ended_well_too() -> None:
    job = torch(worker="restartPolicy: Always")
    assert job.end("j-worker-0", 0) == ["start j-worker-0/pytorch"]


def test_never_fails_the_job_with_the_pods_code() -> None:
    job = torch(worker="restartPolicy: Never, replicas: 2")
    job.end("j-worker-1", 7)
    assert job.verdict == (False, "PyTorchJobFailed")
    assert job.state.condition is not None
    assert job.state.condition.exit_code == 7
    assert "j-worker-1" in job.state.condition.message


@pytest.mark.parametrize("code", [126, 127])
def test_a_program_that_cannot_be_run_ends_the_rehearsal_at_once_where_a_cluster_would_retry(code: int) -> None:
    kubelet = torch()
    assert kubelet.end("j-worker-1", code) == ["stop j-master-0/pytorch", "stop j-worker-0/pytorch"]
    assert kubelet.verdict == (False, "ContainerCannotRun")
    assert kubelet.state.condition is not None
    assert kubelet.state.condition.exit_code == code
    assert f"container pytorch of j-worker-1 ended with {code} (program not" in kubelet.state.condition.message
    assert "a cluster would retry, the rehearsal stops" in kubelet.state.condition.message
    job = train(rjob("node", "backoffLimit: 3", "restartPolicy: Never", trainer=True))
    job.end("job-node-0-0", code)
    assert job.verdict == (False, "ContainerCannotRun")
    jobset = train(
        rjob("node", "backoffLimit: 0", "restartPolicy: Never", trainer=True), "failurePolicy: {maxRestarts: 3}"
    )
    jobset.end("job-node-0-0", code)
    assert jobset.verdict == (False, "ContainerCannotRun")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_who_only_lost_its_peer_is_not_the_cause(order: tuple[int, int]) -> None:
    job = torch(worker="restartPolicy: Never, replicas: 3", spec="runPolicy: {cleanPodPolicy: Running}")
    job.end(f"j-worker-{order[0]}", 138)
    assert job.verdict is None, "nobody else is stopped before the cause has had the time to end"
    assert job.end(f"j-worker-{order[1]}", 33) == ["stop j-master-0/pytorch", "stop j-worker-2/pytorch"]
    assert job.state.condition is not None
    assert job.state.condition.exit_code == 33


def test_who_lost_its_peer_is_the_cause_when_no_other_comes() -> None:
    job = torch(worker="restartPolicy: Never, replicas: 3")
    job.end("j-worker-0", 138)
    assert job.state.due_s() == job.now_s + CAUSE_S
    job.wait(CAUSE_S)
    assert job.verdict == (False, "PyTorchJobFailed")
    alone = torch(master=None, worker="restartPolicy: Never")
    alone.end("j-worker-0", 138)
    assert alone.verdict is not None


@pytest.mark.parametrize("code", [128, 130, 137, 138, 139, 143, 255])
def test_exit_code_makes_the_pod_anew_from_128_on(code: int) -> None:
    job = torch(worker="restartPolicy: ExitCode")
    assert job.end("j-worker-0", code) == ["start j-worker-0/pytorch"]
    assert job.state.states["j-worker-0"].starts == 2, "another pod of the same name"
    assert job.state.states["j-worker-0"].restart_count == 0
    assert job.said == [f"j-worker-0 failed (exit code {code}): the controller recreates it"]


@pytest.mark.parametrize("code", [1, 2, 126, 127])
def test_exit_code_takes_1_to_127_as_permanent(code: int) -> None:
    job = torch(worker="restartPolicy: ExitCode")
    job.end("j-worker-0", code)
    assert job.verdict == (False, "PyTorchJobFailed")


def test_workers_of_a_dynamic_tfjob_may_fail() -> None:
    job = tensorflow({"Chief": "", "Worker": "replicas: 2"}, "enableDynamicWorker: true")
    job.end("j-worker-0", 1)
    assert job.verdict is None
    assert job.phase("j-worker-0") == "Failed"
    job.end("j-chief-0", 1)
    assert job.verdict == (False, "TFJobFailed")


def test_what_would_be_started_for_ever_is_given_up() -> None:
    job = torch()
    for _ in range(GIVE_UP):
        assert job.verdict is None
        job.end("j-worker-0", 3)
        job.wait(40)
    assert job.verdict == (False, "CrashLoopBackOff")
    assert job.state.condition is not None
    assert job.state.condition.exit_code == 3


def test_what_lives_for_an_hour_each_time_is_started_again_for_ever() -> None:
    job = torch(worker="restartPolicy: ExitCode")
    for _ in range(3 * GIVE_UP):
        job.wait(3600)
        job.end("j-worker-0", 137)
    assert job.verdict is None


# -- runPolicy --------------------------------------------------------------------------------


def test_the_backoff_limit_counts_restarts_of_all_pods() -> None:
    job = torch(spec="runPolicy: {backoffLimit: 2}")
    job.end("j-worker-0", 1)
    assert job.verdict is None
    job.end("j-worker-1", 1)
    assert job.verdict == (False, "BackoffLimitExceeded")


def test_restarts_of_init_containers_count_once_the_pod_runs() -> None:
    spec = f"{{runPolicy: {{backoffLimit: 1}}, pytorchReplicaSpecs: {{Worker: {INIT % ''}}}}}"
    job = Job(pytorch(spec))
    job.end("job-worker-0", 1, "first")
    assert job.verdict is None, "a pod that is not Running does not count"
    job.end("job-worker-0", 0, "first")
    job.end("job-worker-0", 0, "second")
    job.wait(0)
    assert job.verdict == (False, "BackoffLimitExceeded")


def test_the_deadline_fails_the_job() -> None:
    job = torch(spec="runPolicy: {activeDeadlineSeconds: 60, cleanPodPolicy: All}")
    assert job.state.due_s() == job.now_s + 60
    assert len([word for word in job.wait(60) if word.startswith("stop ")]) == 3
    assert job.verdict == (False, "DeadlineExceeded")
    job.finish()
    assert job.state.is_done


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


# -- a pod ------------------------------------------------------------------------------------


INIT = (
    "{template: {spec: {initContainers: [{name: first, image: i}, {name: side, image: i, restartPolicy: Always}, "
    "{name: second, image: i}], containers: [{name: pytorch, image: i}, {name: log, image: i}]}}%s}"
)


def with_init(spec: str = "") -> Job:
    return Job(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {INIT % spec}}}}}"))


def test_an_init_container_that_fails_under_never_fails_the_pod() -> None:
    job = with_init(", restartPolicy: Never")
    job.end("job-worker-0", 20, "first")
    assert job.verdict == (False, "PyTorchJobFailed")
    assert job.state.condition is not None
    assert job.state.condition.exit_code == 20


def test_an_init_container_that_fails_under_exit_code_is_retried_as_nobody_knows_the_main_ones_code() -> None:
    job = with_init(", restartPolicy: ExitCode")
    assert job.end("job-worker-0", 20, "first") == ["start job-worker-0/first"]
    assert job.state.states["job-worker-0"].starts == 2


def test_what_the_platform_adds_for_itself_is_not_run() -> None:
    job = torch()
    assert [one.name for one in job.state.pods["j-worker-0"].init] == ["init-pytorch"]
    assert "start j-worker-0/pytorch" in job.began


# -- Jobs of a JobSet -------------------------------------------------------------------------


def rjob(name: str, spec: str = "", pod: str = "", more: str = "", trainer: bool = False) -> str:
    label = "metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}, " if trainer else ""
    template = f"{{spec: {{containers: [{{name: node, image: i}}]{', ' + pod if pod else ''}}}}}"
    body = f"{{{label}spec: {{template: {template}{', ' + spec if spec else ''}}}}}"
    return f"{{name: {name}, template: {body}{', ' + more if more else ''}}}"


def train(jobs: str, more: str = "", trainer: str = "{numNodes: 2}", spec: str = "") -> Job:
    return Job(trainjob(trainer, more=spec), runtime(jobs=jobs, more=more))


def test_a_trainjob_is_done_when_all_its_jobs_are() -> None:
    job = train(f"{rjob('node', trainer=True)}, {rjob('other')}")
    job.end("job-node-0-0")
    job.end("job-node-0-1")
    assert job.verdict is None
    job.end("job-other-0-0")
    assert job.verdict == (True, "TrainJobSucceeded")


def test_a_success_policy_narrows_it_to_some_jobs_and_the_others_are_stopped() -> None:
    policy = "successPolicy: {operator: All, targetReplicatedJobs: [node]}"
    job = train(f"{rjob('node', trainer=True)}, {rjob('other')}", policy)
    job.end("job-node-0-0")
    assert job.end("job-node-0-1") == ["stop job-other-0-0/node"]
    assert job.verdict == (True, "TrainJobSucceeded")


def test_any_job_will_do_where_the_success_policy_says_so() -> None:
    job = train(f"{rjob('node', trainer=True)}, {rjob('other')}", "successPolicy: {operator: Any}")
    job.end("job-other-0-0")
    assert job.verdict == (True, "TrainJobSucceeded")


def test_a_job_gives_up_at_its_backoff_limit_of_restarts() -> None:
    job = train(rjob("node", "backoffLimit: 2", trainer=True))
    job.end("job-node-0-1", 1)
    assert job.verdict is None
    job.end("job-node-0-1", 4)
    assert job.verdict == (False, "BackoffLimitExceeded")


def test_under_never_a_failed_pod_is_made_anew_until_the_limit() -> None:
    job = train(rjob("node", "backoffLimit: 1", "restartPolicy: Never", trainer=True))
    assert job.end("job-node-0-1", 5) == []
    assert job.wait(1) == ["start job-node-0-1/node"]
    assert job.state.states["job-node-0-1"].starts == 2
    job.end("job-node-0-1", 5)
    assert job.verdict == (False, "BackoffLimitExceeded")
    assert job.state.condition is not None
    assert job.state.condition.exit_code == 5


def test_a_pod_failure_policy_goes_by_the_exit_code() -> None:
    rules = (
        "backoffLimit: 1, podFailurePolicy: {rules: [{action: FailJob, onExitCodes: {containerName: node, "
        "operator: In, values: [2, 30]}}, {action: Ignore, onExitCodes: {operator: In, values: [143]}}]}"
    )
    job = train(rjob("node", rules, "restartPolicy: Never", trainer=True))
    for _ in range(3):  # more often than the limit
        job.end("job-node-0-0", 143)
        job.wait(60)
    assert job.verdict is None
    job.end("job-node-0-0", 30)
    assert job.verdict == (False, "PodFailurePolicy")


def test_a_failure_policy_restarts_the_whole_jobset() -> None:
    job = train(rjob("node", "backoffLimit: 0", trainer=True), "failurePolicy: {maxRestarts: 1}")
    asked = job.end("job-node-0-1", 1)
    assert "stop job-node-0-0/node" in asked
    job.finish()
    assert job.verdict is None
    assert [job.state.states[f"job-node-0-{index}"].starts for index in (0, 1)] == [2, 2]
    job.end("job-node-0-0", 1)
    assert job.verdict == (False, "BackoffLimitExceeded")


@pytest.mark.parametrize(("status", "at_once"), [("Ready", True), ("Complete", False)])
def test_a_replicated_job_waits_for_the_one_it_depends_on(status: str, at_once: bool) -> None:
    later = rjob("node", more=f"dependsOn: [{{name: first, status: {status}}}]", trainer=True)
    job = train(f"{rjob('first')}, {later}", trainer="{}")
    assert ("start job-node-0-0/node" in job.began) is at_once
    if not at_once:
        assert job.end("job-first-0-0") == ["start job-node-0-0/node"]


def test_the_deadline_of_a_trainjob() -> None:
    job = train(rjob("node", trainer=True), spec="activeDeadlineSeconds: 5")
    job.wait(5)
    assert job.verdict == (False, "DeadlineExceeded")


# -- mpi-operator -----------------------------------------------------------------------------


def mpi(spec: str = "", launcher: str = "") -> Job:
    body = f"Launcher: {replica('l', spec=launcher)}, Worker: {replica('w', spec='replicas: 2')}"
    return Job(
        "apiVersion: kubeflow.org/v2beta1\nkind: MPIJob\nmetadata: {name: j}\n"
        f"spec: {{{spec + ', ' if spec else ''}mpiReplicaSpecs: {{{body}}}}}\n"
    )


def test_workers_of_mpi_operator_are_not_made_again_and_fail_nothing() -> None:
    job = mpi()
    job.end("j-worker-0", 137)
    job.wait(100)
    assert job.verdict is None
    assert job.phase("j-worker-0") == "Failed"
    job.end("j-launcher")
    assert job.verdict == (True, "MPIJobSucceeded")


def test_the_launcher_of_mpi_operator_has_a_jobs_backoff_limit() -> None:
    job = mpi("runPolicy: {backoffLimit: 1, cleanPodPolicy: Running}")
    asked = job.end("j-launcher", 1)
    assert job.verdict == (False, "BackoffLimitExceeded")
    assert asked.count("stop j-worker-0/w") == 1


def test_a_launcher_may_wait_for_its_workers() -> None:
    assert mpi("launcherCreationPolicy: WaitForWorkersReady").began[-1] == "start j-launcher/l"


# -- asked to stop ----------------------------------------------------------------------------


def test_asked_a_second_time_everybody_is_killed() -> None:
    job = torch(master=None, worker="replicas: 1")
    assert job.stop() == ["stop j-worker-0/pytorch"]
    assert job.stop() == ["kill j-worker-0/pytorch"]
