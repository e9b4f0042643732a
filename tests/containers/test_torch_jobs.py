"""A torch job in containers with the restricted profile: read-only, user 1000, no capabilities, limits."""

from __future__ import annotations

import re

import pytest

from tests.containers import jobs
from tests.containers.images import MAKING_S, image, podman
from tests.containers.podman import ANY_UID, DEADLINE_S, Cluster, Container
from tests.waiting import eventually

pytestmark = [pytest.mark.containers, pytest.mark.process, pytest.mark.timeout(MAKING_S)]
LONG = 400  # steps: more than a test waits for


def test_preflight_as_init_containers_then_training_on_three_pods(cluster: Cluster) -> None:
    words = [*jobs.train(20)]
    for node in range(jobs.PODS):
        cluster.start(
            f"job-node-0-{node}",
            image("preflight"),
            ["--storage", "/checkpoints", "--", *words],
            env=jobs.env_of(node),
            options=jobs.options(cluster),
        )
    checks = list(cluster.pods.values())
    for check in checks:
        assert check.code() == 0, check.logs()
    for check in checks:
        check.remove()
    pods = jobs.start_job(cluster, words)
    assert [pod.code() for pod in pods] == [0, 0, 0], "\n".join(pod.logs()[-1500:] for pod in pods)
    assert jobs.steps_in(pods[0].logs())[-1] == 20
    assert pods[2].last_words().startswith("reason=Succeeded")


@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_pod_comes_back_with_another_address_and_the_others_were_never_restarted(
    cluster: Cluster, node: int
) -> None:
    pods = jobs.start_job(cluster, jobs.train(LONG))
    pods[0].until_it_says("step 8/")
    lost = pods[node]
    before = lost.address(cluster.network)
    others = [pod for pod in pods if pod is not lost]
    lost.remove()
    # Somebody else has its address by now, as on a cluster.
    cluster.start("stranger", image("torch"), ["sleep", "600"], env={}, options=["--ip", before])
    came = jobs.start_pod(cluster, node, jobs.train(LONG))
    assert came.address(cluster.network) != before
    speaker = came if node == 0 else pods[0]
    eventually(
        lambda: _resumed(speaker),
        lambda: "\n".join(pod.logs()[-2000:] for pod in (*others, came)),
        DEADLINE_S,
        pace_s=0.2,
    )
    assert all(pod.is_running for pod in others)


def _resumed(speaker: Container) -> bool:
    """Rank 0 has read a checkpoint, and trains on."""
    _, resumed, after = speaker.logs().partition("resumed at step ")
    return bool(resumed) and len(jobs.steps_in(after)) > 2


def test_a_uid_that_no_file_knows_trains_on_a_read_only_root_and_gets_over_a_killed_worker(
    cluster: Cluster,
) -> None:
    options = jobs.options(cluster, more=ANY_UID)
    pod = cluster.start(
        "job-node-0-0", image("torch"), jobs.train(LONG), env=jobs.env_of(0, pods=1), options=options
    )
    pod.until_it_says("step 8/")
    (worker,) = re.findall(r"started 1 worker \(pid (\d+)\)", pod.logs())
    assert pod.execute("sh", "-c", f"id -u; kill -9 {worker}").stdout == "1000650000\n"
    pod.until_it_says("resumed at step ")
    assert pod.is_running
    assert "its programs get LOGNAME=trainer-launch USER=trainer-launch HOME=/tmp/" in pod.logs()


def test_podman_stop_saves_and_ends_with_143(cluster: Cluster) -> None:
    pods = jobs.start_job(cluster, jobs.train(LONG))
    pods[0].until_it_says("step 8/")
    podman("stop", "-t", "25", pods[1].name)
    assert pods[1].code() == 143, pods[1].logs()
    assert pods[1].last_words().startswith("reason=Stopped")
    assert jobs.checkpoint(cluster).exists()


def test_two_jobs_on_one_network_do_not_touch_each_other(cluster: Cluster) -> None:
    one, two = (jobs.start_job(cluster, jobs.train(20), job) for job in ("one", "two"))
    for pods in (one, two):
        assert [pod.code() for pod in pods] == [0, 0, 0], "\n".join(pod.logs()[-1500:] for pod in pods)
        assert jobs.steps_in(pods[0].logs())[-1] == 20
