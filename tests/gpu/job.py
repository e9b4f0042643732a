"""Ranks of a job on one card, or on the CPU: all-reduces whose every number is compared, step by step.

`job.py ACT LAST`: before the collective of step 60 rank 1 does what ACT says; the job ends after the step LAST.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

DEVICE = os.environ["TORCH_JOB_DEVICE"]
CHECKPOINT = Path(os.environ["TORCH_JOB_FOLDER"]) / "checkpoint"
NUMBERS = 1 << 20
PAUSE_S = 0.1  # so that progress lasts for longer than the timeout before somebody hangs
ACT_STEP = 60
COMPUTING_S = 18


def trains() -> None:
    """Nothing else."""


def hangs_once() -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        read_batch()


def read_batch() -> None:
    threading.Event().wait()


def computes() -> None:
    """On the card, as an evaluation does, with a line each second."""
    size = 8192 if DEVICE == "cuda" else 512
    matrix = torch.ones(size, size, device=DEVICE)
    for batch in range(COMPUTING_S):
        until_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:
            torch.mm(matrix, matrix)
            settle()
        print(f"evaluated batch {batch}", flush=True)


def settle() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def reduce(numbers: torch.Tensor) -> None:
    """On the CPU the host spins as well, as it does when it waits for NCCL."""
    work = dist.all_reduce(numbers, async_op=True)
    while DEVICE == "cpu" and not work.is_completed():
        pass
    work.wait()
    settle()


def save(step: int) -> None:
    new = CHECKPOINT.with_suffix(".new")
    new.write_text(str(step))
    new.rename(CHECKPOINT)


def part(rank: int) -> None:
    """Who left at once would take data along that NCCL has not sent yet."""
    done = [CHECKPOINT.with_name(f"done-{one}") for one in range(2)]
    done[rank].touch()
    while not all(path.exists() for path in done):
        time.sleep(PAUSE_S)


def main(act: str, last: int) -> None:
    rank = int(os.environ["RANK"])
    if DEVICE == "cuda":
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"  # NCCL refuses two ranks of one host on one card
        torch.cuda.set_device(0)
    held = torch.ones(int(os.environ["TORCH_JOB_HELD_BYTES"]) // 4, device=DEVICE)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    step = int(CHECKPOINT.read_text()) if CHECKPOINT.exists() else 0
    while step < last:
        step += 1
        if step == ACT_STEP and rank == 1:
            globals()[act]()
        numbers = torch.full((NUMBERS,), float(rank + 1), device=DEVICE)
        reduce(numbers)
        assert bool((numbers == 3.0).all()), "the sum is wrong"
        if rank == 0:
            save(step)
            print(f"step {step}", flush=True)
        time.sleep(PAUSE_S)
    assert bool((held == 1.0).all()), "the card forgot"
    part(rank)
    print(f"rank {rank} is done", flush=True)
    os._exit(0)  # torch 2.13's gloo may abort while Python shuts down; not what is tested here


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
