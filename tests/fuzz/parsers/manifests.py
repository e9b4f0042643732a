"""Manifests of all kinds, and faults."""

from __future__ import annotations

import json

from tests.fuzz.oracle import Refused, attempt
from tests.fuzz.registry import target
from trainer_launch.contracts.snapshot import pod_from_snapshot
from trainer_launch.model.errors import UsageError
from trainer_launch.model.value_parsers import parse_host
from trainer_launch.rehearsal import controllers, faults
from trainer_launch.rehearsal.controllers import documents, job_lifecycle, local_jobs, pod_values, workload_of
from trainer_launch.rehearsal.controllers.pod_values import Workload


@target(8000)
def manifest(data: bytes) -> None:
    """A job, its pods with addresses, their snapshots, and what of them would lie where on this machine."""
    text = data.decode("utf-8", "replace")
    found = attempt(documents.read_documents, text, "job.yaml", kinds=(UsageError,), names="job.yaml")
    if isinstance(found, Refused):
        return
    job = attempt(workload_of, found, kinds=(UsageError,))
    if not isinstance(job, Refused) and len(job.drafts) <= 8:
        _check(job)


def _check(job: Workload) -> None:
    made = attempt(pod_values.pods, job, kinds=(UsageError,))
    if isinstance(made, Refused):
        return
    for pod in made:
        assert parse_host(pod.name) == pod.name, f"a pod is called {pod.name!r}"
    for name, told in controllers.rendered(made).items():
        assert "/" not in name
        assert name not in (".", "..")
        attempt(pod_from_snapshot, json.loads(json.dumps(told)), kinds=(UsageError,))
    job_lifecycle.begin(job, made, 0.0)
    local = local_jobs.local_network_of(job, made)
    local_jobs.endpoints(local, made)
    for pod in made:
        for container in (*pod.init, *pod.containers):
            here = local_jobs.localised(container, local, lambda volume: f"/scratch/{volume}")
            for path in here.files:
                assert path.startswith("/scratch/"), f"a file would be written to {path}"
                assert ".." not in path.split("/"), f"a file would be written to {path}"
            for mount in container.mounts:
                assert ".." not in f"/scratch/{mount.volume}/{mount.part}".split("/"), mount


@target(2100)
def fault(data: bytes) -> None:
    """A fault in words: what people are shown of it means the same."""
    text = data.decode("utf-8", "replace")
    found = attempt(faults.parse, text, kinds=(UsageError,), names="--fault")
    if not isinstance(found, Refused):
        assert faults.parse(found.text) == found
