"""Pods that carry only the general names MASTER_ADDR, RANK and WORLD_SIZE: old PyTorchJobs and XGBoostJobs.

PyTorchJob up to 1.6 and an XGBoostJob with one replica write the very same names.
"""

from __future__ import annotations

from trainer_launch.contracts.rows import Row
from trainer_launch.contracts.source import Source
from trainer_launch.contracts.v1_table import XGBOOST
from trainer_launch.model import Endpoint

NAMES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "PYTHONUNBUFFERED")
# WORLD_SIZE counts pods here, whatever runs in them.
ROW = Row(
    nodes=XGBOOST.variable("nodes"),
    rank=XGBOOST.variable("rank"),
    coordinator=XGBOOST.variable("host"),
    port=XGBOOST.variable("port"),
    v1_roles=("master", "worker"),
    words=(("env_world_size", "nodes"), ("env_rank", "node_rank")),
)

_PYTORCH_PORT = "23456"
_XGBOOST_PORT = "9999"
# Whoever has one of these made the pod; the general names are then the user's own.
_OWNED = (
    "JOB_COMPLETION_INDEX",
    "TF_CONFIG",
    "MX_CONFIG",
    "DMLC_TRACKER_URI",
    "JAX_COORDINATOR_ADDRESS",
    "COORDINATOR_ADDRESS",
    "PADDLE_MASTER",
    "K_MPI_JOB_ROLE",
    "OMPI_MCA_plm_rsh_agent",
    "OMPI_MCA_orte_default_hostfile",
)


def master(source: Source) -> Endpoint:
    """MASTER_ADDR and MASTER_PORT, both needed."""
    return Endpoint(source.host("MASTER_ADDR", "master_addr"), source.port("MASTER_PORT", "master_port"))


def derive_ranks(source: Source, env_world_size: int, env_rank: int) -> None:
    """Keep RANK and WORLD_SIZE as they are, which count pods here."""
    source.derive(env_world_size=env_world_size, env_rank=env_rank, env_rank_means="node")


def is_owned(source: Source) -> bool:
    """Whether a variable names another kind of job as the pod's maker."""
    return source.has_any(*_OWNED)


def shows_others(source: Source) -> bool:
    """Whether MASTER_ADDR is another pod's; on loopback, or in a job of one pod, it says nothing of others.

    127.0.0.2 and up are pods of a rehearsal.
    """
    return source.peek("MASTER_ADDR") not in ("127.0.0.1", "localhost", "::1") and source.peek("WORLD_SIZE") != "1"


def several_nodes_shown_by(source: Source) -> str | None:
    """Which of the variables that a manifest of one's own sets shows several nodes."""
    named = [name for name in ("NODE_RANK", "WORLD_SIZE") if source.peek(name)]
    if named and source.peek("MASTER_ADDR") and shows_others(source):
        return named[0]
    return "NODE_RANK" if source.peek("NODE_RANK") not in ("", "0") else None


def _is_general(source: Source) -> bool:
    trio = all(map(source.has, ("MASTER_ADDR", "RANK", "WORLD_SIZE")))
    return trio and not is_owned(source) and not source.has_prefix("PET_")


def may_be_pytorch(source: Source) -> bool:
    """Whether an old PyTorchJob may have made the pod."""
    if not _is_general(source) or source.has("WORKER_ADDRS"):
        return False
    return not _is_one_replica(source) or not _hints_at_xgboost(source)


def may_be_xgboost(source: Source) -> bool:
    """Whether an XGBoostJob may have made the pod."""
    if not _is_general(source):
        return False
    if source.has("WORKER_ADDRS"):
        return True
    if not _is_one_replica(source):  # an XGBoostJob with more than one replica always writes WORKER_ADDRS
        return False
    return _hints_at_xgboost(source) or not _hints_at_pytorch(source)


def _is_one_replica(source: Source) -> bool:
    return source.peek("WORLD_SIZE") == "1"


def _hints_at_xgboost(source: Source) -> bool:
    # Old XGBoostJobs wrote PYTHONUNBUFFERED=0 too, so their default port counts for more. No PyTorchJob without
    # PET_* ever wrote 1.
    return source.peek("MASTER_PORT") == _XGBOOST_PORT or source.peek("PYTHONUNBUFFERED") == "1"


def _hints_at_pytorch(source: Source) -> bool:
    return source.peek("MASTER_PORT") == _PYTORCH_PORT or source.peek("PYTHONUNBUFFERED") == "0"
