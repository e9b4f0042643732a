"""Pods for tests: from keywords, and the cases of `cases/CONTRACT.json`, each of which has a name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_launch.contracts.snapshot import SnapshotFiles
from trainer_launch.contracts.source import PodInput

V2_TORCH = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "1",
}
V1_GENERAL = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "8080", "RANK": "0", "WORLD_SIZE": "1"}

CASES: dict[str, dict[str, Any]] = {
    f"{path.stem}/{case['name']}": case
    for path in sorted((Path(__file__).parent / "cases").glob("*.json"))
    for case in json.loads(path.read_text(encoding="utf-8"))
}


def pod_of(
    env: Mapping[str, str],
    files: Mapping[str, str] | None = None,
    hostname: str = "",
    command: tuple[str, ...] = (),
) -> PodInput:
    return PodInput(env=env, files=SnapshotFiles(files or {}), hostname=hostname, command=command)
