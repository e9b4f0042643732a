"""A machine with four healthy H200 cards, as a file that the played library and the played bench read."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.preflight.world import HEALTHY
from trainer_launch.model import Gpus
from trainer_launch.model.findings import Finding, Status
from trainer_launch.preflight import check, registry
from trainer_launch.preflight.check import Subject, Where
from trainer_launch.preflight.gpu_collect import Cards, collect

FAKES = Path(__file__).parent / "fakes"
BENCH = str(FAKES / "bench.py")
GIB = 1 << 30
GPUS = 4
Change = Callable[[dict[str, Any]], object]

_CARD: dict[str, Any] = {
    "name": "NVIDIA H200", "recovery": 0, "uncorrected": 0, "remapped": [0, 0, 0, 0],
    "retired_pending": {"error": 3}, "mig": 0, "mig_parts": 0,
    "memory_total": 143_771 << 20, "memory_used": 500 << 20,
    "pcie_gen": 1, "pcie_gen_max": 5, "pcie_width": 16, "pcie_width_max": 16,
    "power_limit": 700_000, "power_default": 700_000,
    "nvlinks": [1] * 18, "nvlink_errors": 0, "fabric": [3, 0, 0xAA, 7],  # joined, well, and in clique 7
    "sram_threshold": 0, "spent_banks": 0,
    "reasons": 1, "old_reasons": 1, "xids": [],
}  # fmt: skip
_LOAD = {"pcie_gen": 5, "reasons": 4}
_BENCH = {
    "gemm": 690.0, "hbm": 4170.0, "h2d": 55.1, "different": 0,
    "adds_together": True, "rate": 460.0, "alone": "", "network": "IB", "gpudirect": "all", "nccl": "2.28.9",
}  # fmt: skip


def healthy(gpus: int = GPUS) -> dict[str, Any]:
    """A machine as NVIDIA's library tells it."""
    return {
        "driver": "580.159.04",
        "bench": dict(_BENCH),
        "gpus": [
            copy.deepcopy(_CARD) | {"uuid": f"GPU-{number:04d}"} | {"load": dict(_LOAD), "bench": {}}
            for number in range(gpus)
        ],
    }


def environment(folder: Path, change: Change | None = None, gpus: int = GPUS) -> dict[str, str]:
    """The variables with which children see the machine."""
    machine = healthy(gpus)
    if change is not None:
        change(machine)
    path = folder / "machine.json"
    path.write_text(json.dumps(machine))
    own = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "CUDA_"))}
    return own | {"FAKE_NVML": str(path), "PYTHONPATH": os.pathsep.join((str(FAKES), *filter(None, sys.path)))}


def subject(
    env: Mapping[str, str], level: str = "standard", gpus: int = GPUS, workers: int | None = None, **changes: Any
) -> Subject:
    """A container with these GPUs."""
    host = replace(HEALTHY.host, gpus=Gpus(count=gpus, reason=f"{gpus} in /dev"))
    topology = replace(HEALTHY.topology, local_world_size=gpus if workers is None else workers)
    cards = Cards(lambda: collect(env, sys.executable, level, gpus), level)
    return replace(HEALTHY, host=host, topology=topology, env=env, cards=cards, **changes)


CHECKS = registry.at(Where.GPU)


def findings(made: Subject) -> tuple[Finding, ...]:
    """What the checks of GPUs find."""
    return check.run(made, CHECKS).findings


def loud(found: tuple[Finding, ...]) -> list[tuple[str, str, str]]:
    """Those that are not good: check, status and fault, subject."""
    return [
        (one.check, one.status.value if one.fault is None else f"{one.status.value} {one.fault.value}", one.subject)
        for one in found
        if one.status not in (Status.PASS, Status.SKIPPED)
    ]
