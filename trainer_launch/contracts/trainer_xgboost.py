"""Kubeflow Trainer v2, XGBoost runtime: DMLC_TASK_ID counts pods while DMLC_NUM_WORKER counts workers."""

from __future__ import annotations

from trainer_launch.contracts import names
from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Endpoint, Job

NAME = "trainer-v2-xgboost"
# DMLC_NUM_WORKER alone is no mark: an MXJob has it too.
MARKS = Marks(all_of=("DMLC_TRACKER_URI",), shows=("DMLC_TRACKER_PORT", "DMLC_TASK_ID", "DMLC_NUM_WORKER"))


def read(source: Source) -> Job:
    """Read the four DMLC_* variables; how many nodes there are nobody says."""
    workers = source.count("DMLC_NUM_WORKER", "world_size")
    task_id = source.index("DMLC_TASK_ID", "node_rank", below=workers)
    tracker = Endpoint(
        source.host("DMLC_TRACKER_URI", "tracker_host"),
        source.port("DMLC_TRACKER_PORT", "tracker_port"),
    )
    own = names.split_v2(source.pod.hostname)
    return Job(
        contract=NAME,
        role="node",
        node_rank=task_id,
        hostname_index=own.index if own else None,
        world_size=workers,
        coordinator=tracker,
        is_coordinator=task_id == 0,
        engine="plain",
        details={
            "num_worker": workers,
            "task_id": task_id,
            "tracker_host": tracker.host,
            "tracker_port": tracker.port,
            "runs_tracker": task_id == 0,
        },
    )
