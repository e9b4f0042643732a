"""Stands in for preflight/children/gpu_bench.py: the file that FAKE_NVML names says what a card does."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

NODE = json.loads(Path(os.environ["FAKE_NVML"]).read_text())
SHOWN = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[0]
SIZE = int(sys.argv[sys.argv.index("--peers") + 1].split(":")[1])
STAGES = ("import torch", "device", "gemm", "repeats", "memory", "pcie", "peers" if SIZE > 1 else "nccl")
CARD = {**NODE["bench"], **next((gpu["bench"] for gpu in NODE["gpus"] if gpu["uuid"] == SHOWN), {})}


FOUND: dict[str, Any] = {"figures": []}


def say(**values):
    FOUND.update(values)
    print(json.dumps(FOUND), flush=True)


def measured(name, value, unit):
    say(figures=[*FOUND["figures"], [name, value, unit]])


assert os.environ["NCCL_DEBUG"] == "INFO"
print("what a library prints is no word of ours", flush=True)
for stage in STAGES:
    say(stage=stage)
    if CARD.get("hangs") == stage:
        time.sleep(600)
    if CARD.get("dies") == stage:
        os.kill(os.getpid(), 11)
    if CARD.get("fails", [""])[0] == stage:
        say(ending="import" if stage == STAGES[0] else "failed", why=CARD["fails"][1])
        sys.exit()
    if stage == "device":
        say(facts={"torch": "2.11.0", "cuda": "13.0", "model": "NVIDIA H200", "nccl": CARD["nccl"]})
    elif stage == "gemm":
        measured("gemm", CARD["gemm"], "TFLOP/s")
        if float(sys.argv[sys.argv.index("--burn") + 1]):
            measured("gemm-burn", CARD.get("burn", CARD["gemm"]), "TFLOP/s")
    elif stage == "repeats":
        say(repeats=20, different=CARD["different"])
    elif stage == "memory":
        measured("hbm-copy", CARD["hbm"], "GB/s")
    elif stage == "pcie":
        measured("h2d", CARD["h2d"], "GB/s")
        measured("d2h", 55.1, "GB/s")
    elif stage in ("nccl", "peers"):
        say(network=CARD["network"], gpudirect=CARD["gpudirect"])
        say(peers={"good": CARD["adds_together"], "rate": CARD["rate"], "why": CARD["alone"]})
time.sleep(CARD.get("works_s", 0.3))  # long enough to be watched
say(ending="done")
