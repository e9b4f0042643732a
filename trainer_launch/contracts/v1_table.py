"""The kinds of the v1 operator, one row each: contracts read a pod by it, a rehearsal writes the pod by it.

kubeflow/trainer release-1.9: pkg/controller.v1 and pkg/apis/kubeflow.org/v1.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter

from msgspec import Struct

from trainer_launch.contracts.rows import Row
from trainer_launch.contracts.source import Source
from trainer_launch.model import Endpoint

POD_IP = "{pod_ip}"  # what the kubelet puts in place of a field of the pod


class V1Kind(Struct, frozen=True, kw_only=True):
    """A kind of job: its replica types, and the variables that its controller writes.

    A variable's text names values of a pod in braces, and a variable is left out where it has not all of these:
    `job`, `role` and `index`, of the pod; `nodes`, how many pods the job has; `rank`, of the pod among them;
    `host`, `port` and `address` (both), where all meet; and what is only in one row.
    """

    name: str  # as `kind` in a manifest
    specs: str  # the field with the replica specs
    roles: tuple[str, ...]  # replica types as a manifest writes them
    leaders: tuple[str, ...]  # of those that the job has, pod 0 of the first is where all meet
    container: tuple[str, str, int]  # that counts: its name, its port's name, and the port where it names none
    restart: str  # restartPolicy, where the manifest has none
    env: Mapping[str, str]  # variable -> text
    needs_leader: bool = False  # there is a replica of the first of `leaders`, and one only
    fields: tuple[str, ...] = ()  # of its spec, besides the replica specs and the run policy

    def variables(self, value: str) -> tuple[str, ...]:
        """The variables that hold just this value."""
        return tuple(name for name, text in self.env.items() if text == f"{{{value}}}")

    def variable(self, value: str) -> str:
        """The first of them."""
        return self.variables(value)[0]

    def written(self, values: Mapping[str, object]) -> dict[str, str]:
        """The variables of a pod with these values; None: it has not this one."""
        return {
            name: text.format_map(values)
            for name, text in self.env.items()
            if all(key is None or values.get(key) is not None for _, key, _, _ in Formatter().parse(text))
        }


_UNBUFFERED = {"PYTHONUNBUFFERED": "1"}

PYTORCH = V1Kind(
    name="PyTorchJob",
    specs="pytorchReplicaSpecs",
    roles=("Master", "Worker"),
    leaders=("master", "worker"),
    container=("pytorch", "pytorchjob-port", 23456),
    restart="OnFailure",
    env={
        **_UNBUFFERED,
        "MASTER_PORT": "{port}",
        "PET_MASTER_PORT": "{port}",
        "MASTER_ADDR": "{host}",
        "PET_MASTER_ADDR": "{host}",
        "WORLD_SIZE": "{world_size}",
        "RANK": "{rank}",
        "PET_NODE_RANK": "{rank}",
        "PET_NPROC_PER_NODE": "{nproc}",
        "PET_NNODES": "{nodes}",
        "PET_RDZV_ENDPOINT": "{rdzv_endpoint}",
        "PET_RDZV_BACKEND": "{rdzv_backend}",
        "PET_RDZV_ID": "{rdzv_id}",
        "PET_RDZV_CONF": "{rdzv_conf}",
        "PET_MAX_RESTARTS": "{max_restarts}",
        "PET_STANDALONE": "{standalone}",
    },
    fields=("elasticPolicy", "nprocPerNode"),
)
TENSORFLOW = V1Kind(
    name="TFJob",
    specs="tfReplicaSpecs",
    roles=("Chief", "Master", "PS", "Worker", "Evaluator"),
    leaders=("chief", "master", "worker"),
    container=("tensorflow", "tfjob-port", 2222),
    restart="Never",
    env={"TF_CONFIG": "{config}"},
    fields=("successPolicy",),
)
XGBOOST = V1Kind(
    name="XGBoostJob",
    specs="xgbReplicaSpecs",
    roles=("Master", "Worker"),
    leaders=("master",),
    needs_leader=True,
    container=("xgboost", "xgboostjob-port", 9999),
    restart="Never",
    env={
        "MASTER_PORT": "{port}",
        "MASTER_ADDR": "{host}",
        "WORLD_SIZE": "{nodes}",
        "RANK": "{rank}",
        **_UNBUFFERED,
        "WORKER_PORT": "{worker_port}",
        "WORKER_ADDRS": "{workers}",
    },
)
PADDLE = V1Kind(
    name="PaddleJob",
    specs="paddleReplicaSpecs",
    roles=("Master", "Worker"),
    leaders=("master", "worker"),
    container=("paddle", "master", 36543),
    restart="OnFailure",
    env={
        **_UNBUFFERED,
        "PADDLE_JOB_ID": "{job}",
        "PADDLE_NNODES": "{nodes}",
        "POD_IP_DUMMY": POD_IP,  # of the pod where all meet: its own name is not published before it is ready
        "PADDLE_MASTER": "{address}",
        "PADDLE_SERVER_NUM": "{server_num}",
        "PADDLE_TRAINER_NUM": "{trainer_num}",
    },
)
JAX = V1Kind(
    name="JAXJob",
    specs="jaxReplicaSpecs",
    roles=("Worker",),
    leaders=("worker",),
    container=("jax", "jaxjob-port", 6666),
    restart="Never",
    env={
        **_UNBUFFERED,
        "COORDINATOR_PORT": "{port}",
        "COORDINATOR_ADDRESS": "{host}",
        "NUM_PROCESSES": "{nodes}",
        "PROCESS_ID": "{rank}",
    },
)

KINDS = {kind.name: kind for kind in (PYTORCH, TENSORFLOW, XGBOOST, PADDLE, JAX)}

# Pods that carry only the general names MASTER_ADDR, RANK and WORLD_SIZE: PyTorchJob up to 1.6, and XGBoostJob.
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
    "DMLC_TRACKER_URI",
    "JAX_COORDINATOR_ADDRESS",
    "COORDINATOR_ADDRESS",
    "PADDLE_MASTER",
    "K_MPI_JOB_ROLE",
    "OMPI_MCA_plm_rsh_agent",
    "OMPI_MCA_orte_default_hostfile",
)


def plain_master(source: Source) -> Endpoint:
    """MASTER_ADDR and MASTER_PORT, both needed."""
    return Endpoint(source.host("MASTER_ADDR", "master_addr"), source.port("MASTER_PORT", "master_port"))


def derive_ranks(source: Source, env_world_size: int, env_rank: int) -> None:
    """Keep RANK and WORLD_SIZE as they are, which count pods here."""
    source.derive(env_world_size=env_world_size, env_rank=env_rank, env_rank_means="node")


def is_owned(source: Source) -> bool:
    """Whether a variable names another kind of job as the pod's maker."""
    return source.has_any(*_OWNED)


def _is_general(source: Source) -> bool:
    trio = all(map(source.has, ("MASTER_ADDR", "RANK", "WORLD_SIZE")))
    return trio and not is_owned(source) and not source.has_prefix("PET_")


def may_be_pytorch(source: Source) -> bool:
    """Whether an old PyTorchJob may have made the pod."""
    if not _is_general(source) or source.has("WORKER_ADDRS"):
        return False
    return not _has_single_replica(source) or not _hints_at_xgboost(source)


def may_be_xgboost(source: Source) -> bool:
    """Whether an XGBoostJob may have made the pod."""
    if not _is_general(source):
        return False
    if source.has("WORKER_ADDRS"):
        return True
    if not _has_single_replica(source):  # an XGBoostJob with more than one replica always writes WORKER_ADDRS
        return False
    return _hints_at_xgboost(source) or not _hints_at_pytorch(source)


def _has_single_replica(source: Source) -> bool:
    return source.peek("WORLD_SIZE") == "1"


def _hints_at_xgboost(source: Source) -> bool:
    # Old XGBoostJobs wrote PYTHONUNBUFFERED=0 too, so their default port counts for more. No PyTorchJob without
    # PET_* ever wrote 1.
    return source.peek("MASTER_PORT") == _XGBOOST_PORT or source.peek("PYTHONUNBUFFERED") == "1"


def _hints_at_pytorch(source: Source) -> bool:
    return source.peek("MASTER_PORT") == _PYTORCH_PORT or source.peek("PYTHONUNBUFFERED") == "0"
