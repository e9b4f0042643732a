"""What a container's limits do to a job, and what its termination message says of that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.containers import jobs
from tests.containers.images import MAKING_S, image
from tests.containers.podman import Cluster

pytestmark = [pytest.mark.containers, pytest.mark.process, pytest.mark.timeout(MAKING_S)]

EATER = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
kept = []
while True:
    kept.append(torch.ones(8 << 20))  # 32 MiB
    print("step", len(kept), flush=True)
"""
LOADER = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.ones(int(sys.argv[1]) << 18)  # argument: MiB
if __name__ == "__main__":
    for number, batch in enumerate(DataLoader(Data(), batch_size=4, num_workers=2)):
        print(f"step {number}\\n", end="", flush=True)  # whole: two workers write
"""
# What a container with the restricted profile may not do, from inside.
LOOK = """
import os
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print("uid", os.getuid(), "caps", int(status["CapEff"], 16) | int(status["CapBnd"], 16) | int(status["CapPrm"], 16))
print("no new privileges", status["NoNewPrivs"], "seccomp", status["Seccomp"])
for path in ("/etc/x", "/usr/x", "/home/x", "/var/tmp/x", "/run/x", "/code/x"):
    try:
        open(path, "w")
        print("could write", path)
    except OSError:
        pass
"""


def alone(
    cluster: Cluster, tmp_path: Path, text: str, *more: str, words: Sequence[str] = (), workers: int = 1
) -> tuple[int, str, str]:
    """One pod that runs this script: exit code, output, termination message."""
    (tmp_path / "code").mkdir(exist_ok=True)
    (tmp_path / "code" / "train.py").write_text(text)
    options = ["-v", f"{tmp_path}/code:/code:ro", "-w", "/code", *more]
    env = {**jobs.env_of(0, pods=1), "PET_NPROC_PER_NODE": str(workers)}
    pod = cluster.start("job-node-0-0", image("torch"), ["train.py", *words], env=env, options=options)
    return pod.code(), pod.logs(), pod.last_words()


def test_pods_of_these_tests_are_restricted(cluster: Cluster, tmp_path: Path) -> None:
    code, said, words = alone(cluster, tmp_path, LOOK)
    assert code == 0, said
    assert "uid 1000 caps 0\n" in said
    assert "no new privileges 1 seccomp 2\n" in said
    assert "could write" not in said
    assert words.startswith("reason=Succeeded")
    host = cluster.pods["job-node-0-0"].facts()["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["Memory"] > 0
    assert host["PidsLimit"] > 0


def test_an_out_of_memory_kill_is_called_that(cluster: Cluster, tmp_path: Path) -> None:
    code, said, words = alone(cluster, tmp_path, EATER, "--memory", "700m", "--memory-swap", "700m")
    assert code == 137, said
    assert words.startswith("reason=OutOfMemory"), words
    assert "700" in words, "the limit"


def test_a_shared_memory_of_64_mb_is_told_when_data_loaders_fill_it_and_what_is_told_helps(
    cluster: Cluster, tmp_path: Path
) -> None:
    code, said, words = alone(cluster, tmp_path, LOADER, "--shm-size", "64m", words=["16"])
    assert code != 0
    assert words.startswith("reason=SharedMemoryFull"), f"{words}\n{said}"
    assert "medium: Memory" in words, "what to write into the manifest"
    assert "fewer data-loader workers" in words
    # An emptyDir with medium: Memory, as the kubelet mounts it.
    larger = ("--tmpfs", "/dev/shm:size=1g,mode=1777")
    code, said, _ = alone(cluster, tmp_path, LOADER, *larger, words=["16"])
    assert code == 0, said
    assert "step 15" in said


def test_a_pod_whose_workers_may_need_more_shared_memory_says_so_and_trains(
    cluster: Cluster, tmp_path: Path
) -> None:
    code, said, _ = alone(cluster, tmp_path, LOADER, "--shm-size", "64m", words=["1"], workers=2)
    assert code == 0, said  # what these data loaders share fits
    assert said.count("step 15") == 2
    assert "/dev/shm has 64 MiB free of 64 MiB" in said
    assert "emptyDir: {medium: Memory, sizeLimit: 1Gi}" in said


def test_workers_of_torch_train_in_a_pod_with_hardly_any_shared_memory(cluster: Cluster) -> None:
    options = jobs.options(cluster, more=["--shm-size", "64k"])
    env = {**jobs.env_of(0, pods=1), "PET_NPROC_PER_NODE": "2"}
    pod = cluster.start("job-node-0-0", image("torch"), jobs.train(5), env=env, options=options)
    assert pod.code() == 0, pod.logs()
    assert jobs.steps_in(pod.logs())[-1] == 5
