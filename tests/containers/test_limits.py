"""What a container's limits do to a job, and what its last words say of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.containers import jobs
from tests.containers.podman import MAKING_S, Cluster, image

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
import torch
from torch.utils.data import DataLoader, Dataset
class Big(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.ones(4 << 20)  # 16 MiB
if __name__ == "__main__":
    for number, batch in enumerate(DataLoader(Big(), batch_size=4, num_workers=2)):
        print("step", number, flush=True)
"""


def alone(cluster: Cluster, tmp_path: Path, text: str, *more: str) -> tuple[int, str, str]:
    """One pod that runs this script: exit code, output, last words."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(text)
    options = ["-v", f"{tmp_path}/code:/code:ro", "-w", "/code", *more]
    pod = cluster.start("job-node-0-0", image("torch"), ["train.py"], env=jobs.env_of(0, pods=1), options=options)
    return pod.code(), pod.logs(), pod.last_words()


def test_an_out_of_memory_kill_is_called_that(cluster: Cluster, tmp_path: Path) -> None:
    code, said, words = alone(cluster, tmp_path, EATER, "--memory", "700m", "--memory-swap", "700m")
    assert code == 137, said
    assert words.startswith("reason=OutOfMemory"), words
    assert "700" in words, "the limit"


def test_a_shared_memory_of_64_mb_is_told_when_data_loaders_fill_it(cluster: Cluster, tmp_path: Path) -> None:
    code, said, words = alone(cluster, tmp_path, LOADER, "--memory", "2g", "--shm-size", "64m")
    assert code != 0
    assert words.startswith("reason=SharedMemoryFull"), f"{words}\n{said}"
    assert "medium: Memory" in words + said, "what to write into the manifest"
