"""Platforms that tell a job in a few flat variables: one row each. JobSet, LeaderWorkerSet, Slurm, clouds, Volcano.

Each row's docstring or comment names where the platform documents its variables. One of them is enough to tell the
platform. A pod that shows several nodes and does not say enough never runs as a job of one node: what is missing
stays unknown in the job, and the plan is refused unless flags say it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.contracts import names
from trainer_launch.contracts.generic_env import shows_others
from trainer_launch.contracts.source import Contract, JsonView, Marks, Source
from trainer_launch.model import Endpoint, Job, Member, NodeRange, hostfile
from trainer_launch.model.errors import ContractError
from trainer_launch.model.value_parsers import parse_host

_PORT = 29500  # torchrun's own: most of these platforms name none
_BY_HAND = ("PET_NNODES", "TORCHELASTIC_RUN_ID")  # whoever sets torchrun's variables says it all
_INDEX = "JOB_COMPLETION_INDEX"


def _job(
    source: Source,
    nodes: int | None,
    rank: int | None,
    hosts: Sequence[str],
    shown_by: Sequence[str],
    *,
    nproc: int | None = None,
) -> Job:
    """A job of that many nodes, which meet at the first host unless MASTER_ADDR and MASTER_PORT say otherwise.

    `shown_by` are the variables that show several nodes.
    """
    shown = next(filter(source.has, shown_by), None)
    if shown is None:
        raise source.missing(shown_by[0], "the number of nodes")
    host = source.host("MASTER_ADDR", "master_addr", default=hosts[0] if hosts else None)
    port = source.port("MASTER_PORT", "master_port", default=_PORT)
    return Job(
        role="node",
        nodes=None if nodes is None else NodeRange(nodes, nodes),
        nproc_per_node=nproc,
        node_rank=rank,
        world_size=None if nproc is None or nodes is None else nodes * nproc,
        coordinator=None if host is None else Endpoint(host, port),
        is_coordinator=None if rank is None else rank == 0,
        members=tuple(map(Member, hosts)) if hosts and len(hosts) == nodes else None,
        engine="torchrun" if nodes is None else None,
        details={"several_nodes_shown_by": shown},
    )


def _with_each_gpu(job: Job) -> Job:
    """The job with a worker for each GPU of this machine, where the platform counts none."""
    return replace(job, details={**job.details, "worker_for_each_gpu": True})


def _gpus(source: Source, name: str) -> int | None:
    """Workers as the platform counts GPUs; None where it counts none."""
    return source.index(name, "nproc_per_node", default=None) or None


class Flat(Struct, frozen=True, kw_only=True):
    """One platform's variables: how many nodes, which one this is, where all are, and how many GPUs each has."""

    nodes: str
    rank: str
    hosts: str  # one host a line, or the first one only
    gpus: str

    def read(self, source: Source) -> Job:
        """Read those that are there."""
        count = source.count(self.nodes, "nodes", default=None)
        rank = source.index(self.rank, "node_rank", below=count, default=None)
        hosts = source.text(self.hosts, "hosts", default="").split()
        if bad := next((host for host in hosts if parse_host(host) is None), None):
            raise source.error(self.hosts, bad, "host names or IP addresses, one a line")
        return _job(source, count, rank, hosts, (self.nodes, self.hosts, self.rank), nproc=_gpus(source, self.gpus))


# docs.skypilot.co, "Distributed Jobs on Many Nodes"
SKYPILOT = Contract(
    "skypilot",
    Marks(any_of=("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"), none_of=_BY_HAND),
    Flat(
        nodes="SKYPILOT_NUM_NODES",
        rank="SKYPILOT_NODE_RANK",
        hosts="SKYPILOT_NODE_IPS",
        gpus="SKYPILOT_NUM_GPUS_PER_NODE",
    ).read,
)

# dstack.ai/docs, "Distributed tasks"
DSTACK = Contract(
    "dstack",
    Marks(any_of=("DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP"), none_of=_BY_HAND),
    Flat(
        nodes="DSTACK_NODES_NUM",
        rank="DSTACK_NODE_RANK",
        hosts="DSTACK_MASTER_NODE_IP",
        gpus="DSTACK_GPUS_PER_NODE",
    ).read,
)


# -- LeaderWorkerSet: lws.sigs.k8s.io, "Labels, Annotations and Environment Variables" ---------------------

_LWS = ("LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX")


def _read_lws(source: Source) -> Job:
    """Read the group's size, the index in it, and the leader's name, which workers' names begin with."""
    size = source.count("LWS_GROUP_SIZE", "nodes", default=None)
    rank = source.index("LWS_WORKER_INDEX", "node_rank", below=size, default=None)
    leader = source.host("LWS_LEADER_ADDRESS", "master_addr", default=None)
    hosts = [] if leader is None else [leader]
    if leader is not None and size is not None and size <= names.MAX_MEMBERS:
        label, dot, domain = leader.partition(".")
        hosts += [f"{label}-{index}{dot}{domain}" for index in range(1, size)]
    return _job(source, size, rank, hosts, _LWS)


LEADER_WORKER_SET = Contract("leaderworkerset", Marks(any_of=_LWS, none_of=_BY_HAND), _read_lws)


# -- Slurm: slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES" ------------------------------------


def _read_slurm(source: Source) -> Job:
    """Read a task of srun: one on each node is a launcher's; of several on a node each one is a rank."""
    if not source.has("SLURM_STEP_ID"):
        nodes = source.count("SLURM_JOB_NUM_NODES", "nodes")
        if nodes > 1:
            raise source.missing(
                "SLURM_STEP_ID",
                f"one launcher on each of the {nodes} nodes: start it with srun --ntasks-per-node=1",
            )
        return Job(
            role="node", nodes=NodeRange(1, 1), node_rank=0, nproc_per_node=_gpus(source, "SLURM_GPUS_ON_NODE")
        )
    nodes = source.count("SLURM_STEP_NUM_NODES", "nodes")
    tasks = source.count("SLURM_STEP_NUM_TASKS", "world_size", default=nodes)
    if tasks > nodes:
        rank = source.index("SLURM_PROCID", "rank", below=tasks)
        details = {"rank": rank, "local_rank": source.index("SLURM_LOCALID", "local_rank")}
        return Job(role="rank", world_size=tasks, engine="plain", details=details)
    rank = source.index("SLURM_NODEID", "node_rank", below=nodes)
    text = source.text("SLURM_STEP_NODELIST", "hosts")
    hosts = hostfile.expand_hostlist(text, "SLURM_STEP_NODELIST", source.contract)
    return _job(source, nodes, rank, hosts, ("SLURM_STEP_NUM_NODES",), nproc=_gpus(source, "SLURM_GPUS_ON_NODE"))


SLURM = Contract("slurm", Marks(all_of=("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"), none_of=_BY_HAND), _read_slurm)


# -- SageMaker: sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md ---------------------------------------

_SAGEMAKER = ("SM_HOSTS", "SM_CURRENT_HOST")


def _read_sagemaker(source: Source) -> Job:
    """Read the list of hosts, and this one's place in it."""
    hosts = _json_hosts(source, "SM_HOSTS") if source.has("SM_HOSTS") else []
    own = source.host("SM_CURRENT_HOST", "node_rank", default=None)
    if own is not None and hosts and own not in hosts:
        raise source.error("SM_CURRENT_HOST", own, f"one of SM_HOSTS, which are {', '.join(hosts[:8])}")
    rank = hosts.index(own) if own is not None and hosts else None
    return _job(source, len(hosts) or None, rank, hosts, _SAGEMAKER, nproc=_gpus(source, "SM_NUM_GPUS"))


def _json_hosts(source: Source, name: str) -> list[str]:
    text = source.text(name, "hosts")
    try:
        hosts = json.loads(text)
    except (ValueError, RecursionError):
        hosts = None
    if (
        not isinstance(hosts, list)
        or not hosts
        or not all(isinstance(one, str) and parse_host(one) for one in hosts)
    ):
        raise source.error(name, text, "a JSON list of host names")
    return hosts


SAGEMAKER = Contract("sagemaker", Marks(any_of=_SAGEMAKER, none_of=_BY_HAND), _read_sagemaker)


# -- Azure ML: learn.microsoft.com, "Distributed GPU training guide (SDK v2)" ------------------------------

_AZURE_ML = ("WORLD_SIZE", "AZUREML_NODE_COUNT", "NODE_RANK", "MASTER_ADDR")


def _read_azureml(source: Source) -> Job:
    """Read one process on each node: WORLD_SIZE counts processes, which are nodes then.

    AZUREML_NODE_COUNT is set, too, but on no page of the documentation, so it only confirms or replaces WORLD_SIZE.
    """
    count = source.count("AZUREML_NODE_COUNT", "nodes", default=None)
    nodes = source.count("WORLD_SIZE", "nodes", default=count)
    rank = source.index("NODE_RANK", "node_rank", below=nodes, default=None)
    several = "set process_count_per_instance to 1, the launcher starts the workers"
    if count is not None and nodes != count:
        raise source.error("WORLD_SIZE", str(nodes), f"AZUREML_NODE_COUNT, which is {count}: {several}")
    process = source.index("RANK", "rank", default=rank)
    if rank is not None and process != rank:
        raise source.error("RANK", str(process), f"NODE_RANK, which is {rank}: {several}")
    for name, alone in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        if source.index(name, default=alone) != alone:
            raise source.error(name, source.peek(name), f"{alone}: {several}")
    return _with_each_gpu(_job(source, nodes, rank, (), _AZURE_ML))


def _is_distributed(source: Source) -> bool:
    """Every run of Azure ML has an id; only a distributed one tells of nodes."""
    others = source.has("MASTER_ADDR") and shows_others(source)
    return others or source.has("NODE_RANK") or source.peek("AZUREML_NODE_COUNT") not in ("", "1")


AZURE_ML = Contract(
    "azureml",
    Marks(all_of=("AZUREML_RUN_ID",), none_of=(*_BY_HAND, "TF_CONFIG"), when=_is_distributed, shows=_AZURE_ML),
    _read_azureml,
)


# -- Vertex AI: cloud.google.com/vertex-ai/docs/training/distributed-training ------------------------------

_POOLS = ("workerpool0", "workerpool1")


def _read_vertex(source: Source) -> Job:
    """Read the first two worker pools: the primary replica, and the workers. Others hold no ranks of torch.

    TF_CONFIG is there for every framework, the ranks of processes only in Google's images for PyTorch.
    """
    spec = JsonView.of(source, "CLUSTER_SPEC", "hosts")
    task = spec.get("task")
    pool, index = task.get("type").word(), task.get("index").index()
    pools = {name: [item.address().host for item in entry.list()] for name, entry in spec.get("cluster").items()}
    may_be_tensorflow = source.has("TF_CONFIG") and not source.has("RANK")
    if pool not in _POOLS and not may_be_tensorflow:
        raise task.get("type").error("workerpool0 or workerpool1: replicas of other pools hold no ranks")
    if index >= len(pools.get(pool, ())):
        raise task.get("index").error(f"an index below {len(pools.get(pool, ()))}, the size of {pool}")
    hosts = [host for name in _POOLS for host in pools.get(name, ())]
    before = 0 if pool == _POOLS[0] else len(pools.get(_POOLS[0], ()))
    rank = before + index if pool in _POOLS else None
    job = _job(source, len(hosts), rank, hosts, ("CLUSTER_SPEC",))
    if not may_be_tensorflow:
        return _with_each_gpu(job)
    source.warn(
        "TF_CONFIG is set and RANK is not: a program runs once on each replica, as TensorFlow needs it; "
        "a script of torch needs torchrun or --engine torch"
    )
    return replace(job, engine="plain")


VERTEX_AI = Contract("vertex-ai", Marks(all_of=("CLUSTER_SPEC",), none_of=_BY_HAND), _read_vertex)


# -- Volcano: its plug-ins svc and env; its plug-in pytorch writes what a PyTorchJob has --------------------

_HOSTS = re.compile(r"VC_(\w+)_HOSTS")
_TASKS = ("MASTER", "WORKER")


def _volcano_tasks(source: Source) -> dict[str, str]:
    return {found[1]: name for name in sorted(source.pod.env) if (found := _HOSTS.fullmatch(name))}


def _read_volcano(source: Source) -> Job:
    """Read the hosts of each task; where there are a master and workers, the master is node 0."""
    tasks = _volcano_tasks(source)
    if not tasks:
        raise source.missing("VC_WORKER_HOSTS", "the host names of all pods: add the plug-in svc to the job")
    order = [task for task in _TASKS if task in tasks] or list(tasks)
    hosts = [host for task in order for host in source.hosts(tasks[task], "hosts")]
    own = next((at for at, host in enumerate(hosts) if host.partition(".")[0] == source.pod.hostname), None)
    if len(tasks) > 1 and not set(tasks) <= set(_TASKS):
        return _job(source, None, None, (), list(tasks.values()))  # nobody says which tasks train together
    return _job(source, len(hosts), own, hosts, [tasks[task] for task in order])


VOLCANO = Contract(
    "volcano",
    Marks(
        none_of=(*_BY_HAND, "RANK", "TF_CONFIG", "OMPI_MCA_orte_default_hostfile"),
        when=lambda source: bool(_volcano_tasks(source)),
    ),
    _read_volcano,
)


# -- plain JobSet and Indexed Job: jobset.sigs.k8s.io, "PyTorch Example" -----------------------------------


def _read_indexed(source: Source) -> Job:
    """Read where node 0 is, and this pod's index; how many nodes there are only WORLD_SIZE may say, beside RANK."""
    index = source.index(_INDEX, "node_rank")
    host = source.host("MASTER_ADDR", "master_addr")
    port = source.port("MASTER_PORT", "master_port")
    counts_pods = source.has("WORLD_SIZE") and source.index("RANK", "node_rank", default=None) == index
    nodes = source.count("WORLD_SIZE", "nodes") if counts_pods else None
    return Job(
        role="node",
        nodes=None if nodes is None else NodeRange(nodes, nodes),
        node_rank=index,
        coordinator=Endpoint(host, port),
        is_coordinator=index == 0,
        engine="torchrun",
        details={"completion_index": index, "several_nodes_shown_by": "MASTER_ADDR"},
    )


INDEXED_JOB = Contract(
    "indexed-job",
    Marks(all_of=(_INDEX, "MASTER_ADDR", "MASTER_PORT"), none_of=("PET_MASTER_ADDR", *_BY_HAND), when=shows_others),
    _read_indexed,
)


# -- Ray: docs.ray.io, KubeRay -----------------------------------------------------------------------------


def _refuse_ray(_source: Source) -> Job:
    """Ray starts and restarts the processes of its pods itself."""
    raise ContractError(
        "KUBERAY_GEN_RAY_START_CMD: this pod belongs to a Ray cluster, and Ray starts its training workers itself; "
        "use the Ray image's own command, or run the job without Ray; "
        "--contract unknown ignores these variables"
    )


KUBERAY = Contract("kuberay", Marks(all_of=("KUBERAY_GEN_RAY_START_CMD",)), _refuse_ray)

# The first that fits is it: each has variables that no other platform writes.
CONTRACTS: tuple[Contract, ...] = (
    KUBERAY,
    LEADER_WORKER_SET,
    SKYPILOT,
    DSTACK,
    SAGEMAKER,
    AZURE_ML,
    VERTEX_AI,
    VOLCANO,
    SLURM,
)
