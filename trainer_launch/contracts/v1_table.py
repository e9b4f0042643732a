"""The kinds of the v1 operator, one row each: contracts read a pod by it, a rehearsal writes the pod by it.

kubeflow/trainer release-1.9: pkg/controller.v1 and pkg/apis/kubeflow.org/v1; MXJob: v1.8.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter

from msgspec import Struct

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
    fields=("successPolicy", "enableDynamicWorker"),
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
MXNET = V1Kind(
    name="MXJob",
    specs="mxReplicaSpecs",
    roles=("Scheduler", "Server", "Worker"),
    leaders=("scheduler",),
    needs_leader=True,
    container=("mxnet", "mxjob-port", 9091),
    restart="Never",
    env={
        "MX_CONFIG": "{config}",
        "DMLC_PS_ROOT_PORT": "{port}",
        "DMLC_PS_ROOT_URI": "{host}",
        "DMLC_NUM_SERVER": "{servers}",
        "DMLC_NUM_WORKER": "{workers}",
        "DMLC_ROLE": "{role}",
        "DMLC_USE_KUBERNETES": "1",
        "DMLC_WORKER_ID": "{worker_index}",
    },
    fields=("jobMode",),
)

KINDS = {kind.name: kind for kind in (PYTORCH, TENSORFLOW, XGBOOST, PADDLE, JAX, MXNET)}
