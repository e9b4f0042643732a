"""What the steps of the job's machine are called in the chronicle."""

from __future__ import annotations

from tests.rehearsal.controllers.manifests import job_of, pytorch, replica
from trainer_launch.rehearsal import driver
from trainer_launch.rehearsal.controllers import job_lifecycle
from trainer_launch.rehearsal.controllers.pod_values import pods as pods
from trainer_launch.rehearsal.report.history import Entry

INIT = (
    "{template: {spec: {initContainers: [{name: first, image: i}], containers: [{name: pytorch, image: i}]}}, "
    "restartPolicy: ExitCode}"
)


class Story:
    """A job, and what is told of it."""

    def __init__(self, worker: str) -> None:
        workload = job_of(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {worker}}}}}"))
        self.now_s = 100.0
        self.state, actions, _ = job_lifecycle.begin(workload, pods(workload), self.now_s)
        self.told = words(driver.happened(None, self.state, None, actions))

    def take(self, event: job_lifecycle.Event) -> list[str]:
        before = self.state
        self.state, actions, _ = job_lifecycle.step(before, event)
        return words(driver.happened(before, self.state, event, actions))

    def end(self, code: int, container: str = "pytorch", after_s: float = 1.0) -> list[str]:
        self.now_s += after_s
        return self.take(job_lifecycle.Exited(self.now_s, "job-worker-0", container, code))


def words(entries: list[Entry]) -> list[str]:
    found = []
    for one in entries:
        rest = [
            str(value) for value in (one.container, one.attempt, one.code, one.text or None) if value is not None
        ]
        found.append(" ".join([f"{one.at_s:g}", one.what.value, *rest]))
    return found


def test_a_pods_life_from_its_first_container_to_the_jobs_end() -> None:
    story = Story(INIT)
    assert story.told == ["0 pod started 1", "0 container started first 1 init"]
    assert story.end(0, "first") == ["1 container ended first 0", "1 container started pytorch 1"]
    assert story.end(0) == [
        "2 container ended pytorch 0",
        "2 pod ended 1 Succeeded",
        "2 condition 0 Succeeded (PyTorchJobSucceeded): PyTorchJob has completed",
    ]


def test_a_pod_that_failed_and_is_made_anew() -> None:
    story = Story(INIT)
    story.end(0, "first")
    assert story.end(137) == [
        "2 container ended pytorch 137",
        "2 pod ended 1 Failed",
        "2 pod started 2",
        "2 container started first 1 init",
    ]


def test_a_container_that_is_started_again_in_place() -> None:
    story = Story(replica("pytorch"))
    assert story.end(1) == ["1 container ended pytorch 1", "1 container started pytorch 2"]


def test_who_asked_to_stop() -> None:
    story = Story(replica("pytorch"))
    deleted = job_lifecycle.PodDeleted(101.0, "job-worker-0", 10.0, 1.0)
    assert story.take(deleted) == ["1 stop asked pytorch fault"]
    assert story.end(0, after_s=2.0) == ["2 container ended pytorch 0", "2 pod ended 1 Pending"]
    assert story.take(job_lifecycle.Due(103.0)) == ["3 pod started 2", "3 container started pytorch 1"]
    assert story.take(job_lifecycle.StopAsked(104.0, 5.0)) == ["4 stop asked pytorch user"]


def test_a_kill_is_no_request() -> None:
    story = Story(replica("pytorch"))
    assert story.take(job_lifecycle.PodDeleted(101.0, "job-worker-0", 0.0, None)) == []
    assert story.end(137)[:2] == ["1 container ended pytorch 137", "1 pod ended 1 Terminated"]
