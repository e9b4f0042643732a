"""Torch jobs of Kubeflow Trainer on a real cluster: what the kubelet does to pods, and what it says of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.containers.images import MAKING_S
from tests.containers.jobs import steps_in, train
from tests.containers.test_limits import EATER
from tests.kubelet.cluster import Cluster
from tests.kubelet.jobs import Change, Json, Running, again_if_the_kubelet_forgets, no_change, submit
from tests.kubernetes import published

pytestmark = [
    pytest.mark.kubelet,
    pytest.mark.process,
    pytest.mark.timeout(MAKING_S),
    pytest.mark.filterwarnings("default:begun again"),
]
LONG = 5000  # steps: more than a test waits for
HOSTS = ("job-node-0-0", "job-node-0-1")


def trainjob(words: Sequence[str], runtime: str = "torch-distributed-launch", nodes: int = 2) -> list[Json]:
    """A TrainJob over one of the runtimes that this project publishes."""
    trainer = {"numNodes": nodes, "numProcPerNode": 1, "args": list(words)}
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "job"},
        "spec": {"runtimeRef": {"name": runtime}, "trainer": trainer},
    }
    return [*published.documents(published.KUBERNETES / "runtimes" / f"{runtime}.yaml"), job]


def training(
    cluster: Cluster, namespace: str, folder: Path, change: Change = no_change, nodes: int = len(HOSTS)
) -> Running:
    """A job that has saved a checkpoint, and trains for longer than a test waits."""
    job = submit(cluster, namespace, folder, trainjob(train(LONG), nodes=nodes), change)
    job.until_it_says(HOSTS[0], "step 8/")
    return job


def test_preflight_in_init_containers_then_training_in_the_restricted_profile(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    job = submit(cluster, namespace, tmp_path, trainjob(train(20), "torch-distributed-preflight"))
    for host in HOSTS:
        ended = job.ended(host, "node")
        assert ended["exitCode"] == 0, job.told()
        assert ended["message"].startswith("reason=Succeeded")
        assert job.ended(host, "preflight-check")["exitCode"] == 0
        assert "Preflight" in job.logs(host, "-c", "preflight-check")
    assert steps_in(job.logs(HOSTS[0]))[-1] == 20


def test_a_failed_preflight_is_an_error_of_the_init_container_with_its_reason(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    def change(host: str, spec: Json) -> None:
        if host == HOSTS[1]:
            (init,) = spec["initContainers"]
            init["command"] += ["--storage", "/code"]  # a ConfigMap: read-only

    job = submit(cluster, namespace, tmp_path, trainjob(train(20), "torch-distributed-preflight"), change)
    for name in [job.name(host) for host in HOSTS]:  # whatever the Jobs make after them
        ended = job.ended_as(name, "preflight-check")
        assert ended["exitCode"] in (20, 30), job.told()
        assert "storage" in ended["message"], "every node says what is wrong with one"
        assert "/code" in ended["message"]
        assert HOSTS[1] in ended["message"]
        job.until_status(name, "Init:Error")


@again_if_the_kubelet_forgets
def test_a_deleted_pod_saves_within_its_grace_and_the_job_resumes_in_another_pod(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    job = training(cluster, namespace, tmp_path)
    with job.kept(HOSTS[1]) as (name,):
        job.kubectl("delete", "pod", name, "--wait=false")
        ended = job.ended_as(name)
        assert ended["exitCode"] == 143, job.told()
        assert ended["message"].startswith("reason=Stopped")
    assert (job.checkpoints / "model.pt").exists()
    job.until_it_resumes(HOSTS[0])
    assert job.container(HOSTS[0])["restartCount"] == 0
    assert job.name(HOSTS[1]) != name


def test_a_pod_that_is_lost_comes_back_with_another_address_and_the_others_go_on(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    job = training(cluster, namespace, tmp_path)
    job.until_it_says(HOSTS[1], "started 1 worker")
    before, other = job.pod(HOSTS[0]), job.name(HOSTS[1])
    job.kubectl("delete", "pod", before["metadata"]["name"], "--grace-period=0", "--force")
    cluster.eventually(lambda: job.pod(HOSTS[0])["status"].get("podIP"), job.told)
    assert job.pod(HOSTS[0])["status"]["podIP"] != before["status"]["podIP"]
    job.until_it_resumes(HOSTS[0])
    assert job.name(HOSTS[1]) == other
    assert job.container(HOSTS[1])["restartCount"] == 0


def test_a_killed_container_is_restarted_by_the_kubelet_and_the_job_resumes(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    def change(_host: str, spec: Json) -> None:
        spec["restartPolicy"] = "OnFailure"

    job = training(cluster, namespace, tmp_path, change)
    name = job.name(HOSTS[1])
    identity = job.container(HOSTS[1])["containerID"].removeprefix("containerd://")
    assert cluster.ctr("tasks", "kill", "--signal", "SIGKILL", identity).returncode == 0
    cluster.eventually(lambda: job.container(HOSTS[1])["restartCount"] == 1, job.told)
    assert job.container(HOSTS[1])["lastState"]["terminated"]["exitCode"] == 137
    job.until_it_resumes(HOSTS[0])
    assert job.name(HOSTS[1]) == name
    assert job.container(HOSTS[0])["restartCount"] == 0


def test_a_worker_that_the_kernel_kills_for_memory_is_called_that(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    def change(_host: str, spec: Json) -> None:
        spec["containers"][0]["resources"] = {"limits": {"memory": "700Mi"}}

    job = submit(cluster, namespace, tmp_path, trainjob(["train.py"], nodes=1), change, script=EATER)
    ended = job.ended(HOSTS[0])
    assert ended["exitCode"] == 137, job.told()
    assert ended["message"].startswith("reason=OutOfMemory"), ended
    assert "700" in ended["message"], "the limit"


def test_a_pod_that_the_kubelet_evicts_is_made_anew_and_its_job_resumes(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    def change(_host: str, spec: Json) -> None:
        spec["volumes"].append({"name": "scratch", "emptyDir": {"sizeLimit": "1Mi"}})
        spec["containers"][0]["volumeMounts"].append({"name": "scratch", "mountPath": "/scratch"})

    job = training(cluster, namespace, tmp_path, change)
    name = job.name(HOSTS[1])
    filled = job.execute(HOSTS[1], "dd", "if=/dev/zero", "of=/scratch/full", "bs=1M", "count=8")
    assert filled.returncode == 0, filled.stderr
    job.until_status(name, "Evicted")
    assert "scratch" in cluster.get("pod", name, "-n", namespace)["status"]["message"]
    job.until_it_resumes(HOSTS[0])
    assert job.container(HOSTS[0])["restartCount"] == 0
    assert job.name(HOSTS[1]) != name


def test_exec_and_logs_show_a_running_job(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    job = training(cluster, namespace, tmp_path)
    told = job.execute(HOSTS[1], "trainer-launch", "status")
    assert told.returncode == 0, told.stderr
    for host in HOSTS:
        assert host in told.stdout
    read = json.loads(job.execute(HOSTS[0], "trainer-launch", "status", "--json").stdout)
    assert len(read["job"]["nodes"]) == len(HOSTS)


@again_if_the_kubelet_forgets
def test_probes_pass_while_it_trains_and_a_pre_stop_hook_runs_before_the_signal(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    def change(_host: str, spec: Json) -> None:
        (container,) = spec["containers"]
        container["env"].append({"name": "TRAINER_LAUNCH_METRICS_PORT", "value": "9400"})
        metrics = {"httpGet": {"path": "/metrics", "port": 9400}, "periodSeconds": 1}
        status = {"exec": {"command": ["trainer-launch", "status"]}, "periodSeconds": 5, "timeoutSeconds": 60}
        container |= {"startupProbe": {**metrics, "failureThreshold": 100}, "readinessProbe": metrics}
        container["livenessProbe"] = {**status, "failureThreshold": 1}
        hook = ["sh", "-c", "trainer-launch status >/checkpoints/when-stopped"]
        container["lifecycle"] = {"preStop": {"exec": {"command": hook}}}

    job = training(cluster, namespace, tmp_path, change, nodes=1)
    cluster.eventually(lambda: job.container(HOSTS[0])["ready"], job.told)
    job.kubectl("wait", "--for=condition=Ready", f"pod/{job.name(HOSTS[0])}", "--timeout=60s")
    with job.kept(HOSTS[0]) as (name,):
        job.kubectl("delete", "pod", name, "--wait=false")
        ended = job.ended_as(name)
    assert ended["exitCode"] == 143, job.told()
    assert ended["message"].startswith("reason=Stopped")
    assert HOSTS[0] in (job.checkpoints / "when-stopped").read_text(), "the job still ran"
    unhealthy = job.kubectl("get", "events", "--field-selector", "reason=Killing", "-o", "name").stdout
    assert unhealthy.count("event/") == 1, job.told()


def test_a_job_waits_for_names_that_dns_learns_late(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    with cluster.lagging_dns():
        job = submit(cluster, namespace, tmp_path, trainjob(train(20)))
        for host in HOSTS:
            job.until_it_says(host, f"no address for {HOSTS[0]}.job yet")
    assert [job.ended(host)["exitCode"] for host in HOSTS] == [0, 0], job.told()
    assert steps_in(job.logs(HOSTS[0]))[-1] == 20


@again_if_the_kubelet_forgets
def test_a_pod_of_lower_priority_makes_room_and_its_job_resumes_when_there_is_room_again(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    cores = int(cluster.get("node", "node")["status"]["allocatable"]["cpu"])

    def change(_host: str, spec: Json) -> None:
        spec["containers"][0]["resources"] = {"requests": {"cpu": f"{cores * 400}m"}}

    job = training(cluster, namespace, tmp_path, change)
    with job.kept(*HOSTS) as names:
        cluster.apply(urgent(namespace, f"{cores * 400}m", job.container(HOSTS[0])["image"]))
        victim, host = cluster.eventually(
            lambda: next(
                ((name, host) for name, host in zip(names, HOSTS, strict=True) if job.is_deleted(name)), None
            ),
            job.told,
        )
        ended = job.ended_as(victim)
        assert ended["exitCode"] == 143, job.told()
        assert ended["message"].startswith("reason=Stopped")
    other = next(one for one in HOSTS if one != host)
    assert job.container(other)["restartCount"] == 0
    cluster.eventually(lambda: job.pod(host)["status"].get("phase") == "Pending", job.told)
    job.kubectl("delete", "pod", "urgent", "--grace-period=0", "--force")
    job.until_it_resumes(HOSTS[0])


def urgent(namespace: str, cpu: str, image: str) -> list[Json]:
    """A pod that goes before others."""
    about = {"name": namespace}
    container = {"name": "it", "image": image, "command": ["sleep", "1000"]}
    spec = {
        "priorityClassName": namespace,
        "terminationGracePeriodSeconds": 1,
        "containers": [{**container, "resources": {"requests": {"cpu": cpu}}}],
    }
    return [
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": about, "value": 1000},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "urgent", "namespace": namespace}, "spec": spec},
    ]


@again_if_the_kubelet_forgets
def test_pods_of_a_drained_node_save_and_the_job_resumes_when_the_node_is_back(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    job = training(cluster, namespace, tmp_path)
    with cluster.without_node(), job.kept(*HOSTS) as names:
        options = ["--pod-selector=job=job", "--delete-emptydir-data", "--skip-wait-for-delete-timeout=1"]
        cluster.kubectl("drain", "node", *options)
        ends = [job.ended_as(name) for name in names]
        assert [ended["exitCode"] for ended in ends] == [143, 143], job.told()
        assert all(ended["message"].startswith("reason=Stopped") for ended in ends)
    assert (job.checkpoints / "model.pt").exists()
    job.until_it_resumes(HOSTS[0])
