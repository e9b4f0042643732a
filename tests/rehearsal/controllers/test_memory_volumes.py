"""How large a pod's /dev/shm is: that of the memory volume that it mounts there."""

from __future__ import annotations

import pytest

from tests.rehearsal.controllers.manifests import job_of, pytorch
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal import pod_isolation
from trainer_launch.rehearsal.controllers.pod_values import pods as pods

GIB = 1 << 30


def shm_of(volume: str, mount: str = "/dev/shm") -> int | None:
    container = f"{{name: pytorch, image: i, volumeMounts: [{{name: v, mountPath: {mount}}}]}}"
    spec = f"{{containers: [{container}], volumes: [{{name: v, {volume}}}]}}"
    workload = job_of(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {{template: {{spec: {spec}}}}}}}}}"))
    return pods(workload, pod_isolation.address_of)[0].shm_bytes


@pytest.mark.parametrize(
    ("volume", "mount", "size", "mounted"),
    [
        ("emptyDir: {medium: Memory, sizeLimit: 8Gi}", "/dev/shm", 8 * GIB, str(8 * GIB)),
        ("emptyDir: {medium: Memory, sizeLimit: 1000000}", "/dev/shm/", 1_000_000, "1000000"),
        ("emptyDir: {medium: Memory}", "/dev/shm", 0, "50%"),
        ("emptyDir: {medium: Memory, sizeLimit: 8Gi}", "/data", None, str(64 << 20)),
        ("emptyDir: {}", "/dev/shm", None, str(64 << 20)),
        ("emptyDir: {sizeLimit: 8Gi}", "/dev/shm", None, str(64 << 20)),
    ],
)
def test_a_volume_in_memory_gives_shm_its_size(volume: str, mount: str, size: int | None, mounted: str) -> None:
    assert shm_of(volume, mount) == size
    assert pod_isolation.size_of_shm(size) == mounted


@pytest.mark.parametrize("limit", ["much", "-1Gi", "[]"])
def test_a_size_that_is_none_is_refused(limit: str) -> None:
    with pytest.raises(UsageError, match=r"emptyDir.sizeLimit is .*; expected"):
        shm_of(f"emptyDir: {{medium: Memory, sizeLimit: {limit}}}")
