"""MPI over ssh in containers: user 1000, read-only roots, a key that the kubelet mounts as it does with fsGroup."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.containers.images import MAKING_S, ROOT, image
from tests.containers.podman import ANY_UID, Cluster, Container

pytestmark = [pytest.mark.containers, pytest.mark.process, pytest.mark.timeout(MAKING_S)]

NODES = ("job-node-0-0", "job-node-0-1")
SSH = "/home/mpiuser/.ssh"  # sshAuthMountPath of the runtimes that Kubeflow Trainer ships
ENV = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # two cores for all of them
TRAIN = ["mpirun", "python3", "train_mpi.py", "--steps", "20", "--checkpoint", "/checkpoints/model.npz"]


def secret(folder: Path) -> Path:
    """A job's Secret: root's, readable for the group of the pod, as fsGroup makes it."""
    folder.mkdir()
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", folder / "id_rsa"], check=True
    )
    (folder / "authorized_keys").write_bytes((folder / "id_rsa.pub").read_bytes())
    for path in folder.iterdir():
        os.chown(path, 0, 1000)
        path.chmod(0o640)
    folder.chmod(0o755)
    return folder


def options(cluster: Cluster, keys: Path, more: Sequence[str] = ()) -> list[str]:
    code = ["-v", f"{ROOT}/docker/examples:/code:ro", "-w", "/code", "-v", f"{cluster.volume('job')}:/checkpoints"]
    return [*code, "-v", f"{keys}:{SSH}:ro", *more]


def start_node(
    cluster: Cluster, name: str, keys: Path, *more: str, words: Sequence[str] = ("trainer-launch", "sshd")
) -> Container:
    env = {"JOB_COMPLETION_INDEX": name[-1], **ENV}
    return cluster.start(name, image("mpi"), words, env=env, options=options(cluster, keys, more), entrypoint=False)


def start_launcher(
    cluster: Cluster,
    keys: Path,
    tmp_path: Path,
    *user: str,
    slots: int = 1,
    more: Mapping[str, str] | None = None,
) -> Container:
    (tmp_path / "hostfile").write_text("".join(f"{name} slots={slots}\n" for name in NODES))
    env = {  # kubeflow/trainer pkg/runtime/framework/plugins/mpi/mpi.go
        "JOB_COMPLETION_INDEX": "0",
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_set_default_slots": str(slots),
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        **ENV,
        **(more or {}),
    }
    mounts = options(cluster, keys, ["-v", f"{tmp_path}/hostfile:/etc/mpi/hostfile:ro", *user])
    return cluster.start("job-launcher-0-0", image("mpi"), TRAIN, env=env, options=mounts)


def test_ranks_train_over_ssh_with_a_key_of_roots_that_only_the_group_may_read(
    cluster: Cluster, tmp_path: Path
) -> None:
    keys = secret(tmp_path / "keys")
    launcher = start_launcher(cluster, keys, tmp_path)  # before any sshd listens
    for name in NODES:
        start_node(cluster, name, keys)
    assert launcher.code() == 0, launcher.logs()
    assert "step 20" in launcher.logs()
    assert launcher.last_words().startswith("reason=Succeeded")


def test_a_uid_that_no_file_knows_trains_on_two_hosts_with_read_only_roots(
    cluster: Cluster, tmp_path: Path
) -> None:
    keys = secret(tmp_path / "keys")
    for name in NODES:
        start_node(cluster, name, keys, *ANY_UID)
    launcher = start_launcher(cluster, keys, tmp_path, *ANY_UID)
    assert launcher.code() == 0, launcher.logs()
    assert "step 20" in launcher.logs()
    assert "uid 1000650000 has no entry in /etc/passwd" in launcher.logs()


def test_a_host_with_another_key_is_refused_and_named(cluster: Cluster, tmp_path: Path) -> None:
    keys, others = secret(tmp_path / "keys"), secret(tmp_path / "others")
    start_node(cluster, NODES[0], keys)
    start_node(cluster, NODES[1], others)
    launcher = start_launcher(cluster, keys, tmp_path)
    launcher.until_it_says(f"{NODES[1]}")
    launcher.until_it_says("key")
    assert "step 1" not in launcher.logs()
    assert launcher.is_running, "it waits for the right one"


def test_a_runtime_that_starts_sshd_itself_finds_its_configuration(cluster: Cluster, tmp_path: Path) -> None:
    """kubeflow/trainer manifests/base/runtimes/deepspeed_distributed.yaml, with this image in place of its own."""
    keys = secret(tmp_path / "keys")
    command = ["/usr/sbin/sshd", "-De", "-f", "/home/mpiuser/.sshd_config"]
    nodes = [start_node(cluster, name, keys, words=command) for name in NODES]
    launcher = start_launcher(cluster, keys, tmp_path)
    assert launcher.code() == 0, launcher.logs()
    assert "step 20" in launcher.logs()
    entry = nodes[0].execute("sh", "-c", "id -un; getent passwd 1000; grep ^Port /home/mpiuser/.sshd_config")
    assert entry.stdout.split() == ["mpiuser", "mpiuser:x:1000:1000:mpiuser:/home/mpiuser:/bin/sh", "Port", "2222"]


@pytest.mark.parametrize(("size", "is_short"), [("64m", False), ("4m", True)])
def test_four_ranks_of_a_node_train_where_shared_memory_is_small_for_open_mpi(
    cluster: Cluster, tmp_path: Path, size: str, is_short: bool
) -> None:
    keys = secret(tmp_path / "keys")
    nodes = [start_node(cluster, name, keys, "--shm-size", size) for name in NODES]
    launcher = start_launcher(cluster, keys, tmp_path, slots=4)
    assert launcher.code() == 0, launcher.logs()
    assert "step 20" in launcher.logs()
    for node in nodes:
        assert ("emptyDir: {medium: Memory, sizeLimit: 1Gi}" in node.logs()) is is_short, "the remedy"
        # Open MPI found no room and fell back to sockets, if nobody told it to put its files elsewhere.
        assert "there is not enough space for" not in launcher.logs()
