"""Each row of the table of the v1 operator: a rehearsal writes the pods of a small job, and contracts read them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainer_launch.contracts import CONTRACTS, read_job, v1_table
from trainer_launch.contracts.snapshot import flat, pod_from_snapshot
from trainer_launch.model import Job
from trainer_launch.rehearsal.controllers import snapshot_of, workload_of
from trainer_launch.rehearsal.controllers.documents import Field
from trainer_launch.rehearsal.controllers.pod_values import pods

# Kind, replicas by type, more of its spec, and what all pods read: contract, where all meet (named by what all but
# the pod itself are told), ranks that the pods read in order (None: the kind tells no rank).
JOBS: list[tuple[str, dict[str, int], dict[str, Any], str, str | None, list[int | None]]] = [
    ("PyTorchJob", {"Master": 1, "Worker": 2}, {}, "pytorchjob-v1", "j-master-0:4321", [0, 1, 2]),
    ("PyTorchJob", {"Worker": 2}, {}, "pytorchjob-v1", None, [None, None]),
    ("PyTorchJob", {"Worker": 2}, {"elasticPolicy": {}}, "pytorchjob-v1-elastic", "j-worker-0:4321", [None, None]),
    ("TFJob", {"Chief": 1, "PS": 1, "Worker": 2}, {}, "tfjob-v1", "j-chief-0.ns.svc:4321", [None] * 4),
    ("XGBoostJob", {"Master": 1, "Worker": 2}, {}, "xgboostjob-v1", "j-master-0:4321", [0, 1, 2]),
    ("PaddleJob", {"Worker": 2}, {}, "paddlejob-v1", "j-worker-0:4321", [None, None]),
    ("PaddleJob", {"Master": 1, "Worker": 1}, {}, "paddlejob-v1", "j-master-0:4321", [None, None]),
    ("JAXJob", {"Worker": 3}, {}, "jaxjob-v1", "j-worker-0:4321", [0, 1, 2]),
]


def jobs_of(kind: str, replicas: dict[str, int], more: dict[str, Any]) -> dict[str, Job]:
    """What each pod of the job reads, by the pod's name."""
    row = v1_table.KINDS[kind]
    name, port_name, _ = row.container
    container = {"name": name, "ports": [{"name": port_name, "containerPort": 4321}]}
    template = {"spec": {"containers": [container]}}
    specs = {role: {"replicas": count, "template": template} for role, count in replicas.items()}
    manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": kind,
        "metadata": {"name": "j", "namespace": "ns"},
        "spec": {row.specs: specs, **more},
    }
    made = pods(workload_of((Field(manifest, "", "the test"),)))
    snapshots = {pod.name: json.loads(json.dumps(snapshot_of(pod, pod.main))) for pod in made}
    return {name: read_job(pod_from_snapshot(snapshot)) for name, snapshot in snapshots.items()}


def test_every_row_has_a_job_here_and_a_contract() -> None:
    assert {kind for kind, *_ in JOBS} == set(v1_table.KINDS)
    assert {contract.kind for contract in CONTRACTS} >= set(v1_table.KINDS)


@pytest.mark.parametrize(("kind", "replicas", "more", "contract", "meeting", "ranks"), JOBS)
def test_what_a_rehearsal_writes_by_a_row_is_read_by_it(
    kind: str,
    replicas: dict[str, int],
    more: dict[str, Any],
    contract: str,
    meeting: str | None,
    ranks: list[int | None],
) -> None:
    jobs = jobs_of(kind, replicas, more)
    expected = [f"j-{role.lower()}-{index}" for role, count in replicas.items() for index in range(count)]
    assert list(jobs) == expected
    assert {job.contract for job in jobs.values()} == {contract}
    assert {job.nodes.fixed for job in jobs.values() if job.nodes} == {len(expected)}
    assert [job.node_rank for job in jobs.values()] == ranks
    assert [(job.role, job.warnings) for job in jobs.values() if job.warnings and meeting] == []
    for name, job in jobs.items():
        role, _, index = name.removeprefix("j-").rpartition("-")
        assert job.role == role
        assert flat(job).get("task_index", job.hostname_index) == int(index)
    leader = None if meeting is None else meeting.partition(":")[0].partition(".")[0]
    assert [name for name, job in jobs.items() if job.is_coordinator] == [leader or "j-worker-0"]
    others = {str(job.coordinator) for name, job in jobs.items() if name != leader}
    assert others == {meeting or "None"}


def test_a_job_of_one_replica_is_read_as_one_node() -> None:
    alone = jobs_of("XGBoostJob", {"Master": 1}, {})["j-master-0"]
    assert (alone.contract, alone.world_size, alone.node_rank) == ("xgboostjob-v1", 1, 0)
    assert jobs_of("TFJob", {"Worker": 1}, {})["j-worker-0"].contract == "unknown"  # the operator sets nothing
