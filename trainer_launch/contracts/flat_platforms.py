"""Platforms that tell a job in a few flat variables: one row each. JobSet, LeaderWorkerSet, Slurm, clouds, Volcano.

Each row's docstring or comment names where the platform documents its variables. A pod that shows several nodes
and does not say enough is refused with the variable's name: it never runs as a job of one node.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from trainer_launch.contracts import names
from trainer_launch.contracts.source import Contract, JsonView, Marks, Source
from trainer_launch.model import Endpoint, Job, Member, NodeRange, hostfile
from trainer_launch.model.errors import ContractError
from trainer_launch.model.frozen import dataclass
from trainer_launch.model.value_parsers import parse_host

_PORT = 29500  # torchrun's own: most of these platforms name none
_BY_HAND = ("PET_NNODES", "TORCHELASTIC_RUN_ID")  # whoever sets torchrun's variables says it all
_INDEX = "JOB_COMPLETION_INDEX"


def _job(source: Source, nodes: int, rank: int, hosts: Sequence[str], *, nproc: int | None = None) -> Job:
    """A job of that many nodes, which meet at the first host unless MASTER_ADDR and MASTER_PORT say otherwise."""
    host = source.host("MASTER_ADDR", "master_addr", default=hosts[0])
    port = source.port("MASTER_PORT", "master_port", default=_PORT)
    return Job(
        role="node",
        nodes=NodeRange(nodes, nodes),
        nproc_per_node=nproc,
        node_rank=rank,
        world_size=None if nproc is None else nodes * nproc,
        coordinator=Endpoint(host, port),
        is_coordinator=rank == 0,
        members=tuple(map(Member, hosts)) if len(hosts) == nodes else None,
    )


def _gpus(source: Source, name: str) -> int | None:
    """Workers as the platform counts GPUs; None where it counts none."""
    return source.index(name, "nproc_per_node", default=None) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """One platform's variables: how many nodes, which one this is, where all are, and how many GPUs each has."""

    nodes: str
    rank: str
    hosts: str  # one host a line, or the first one only
    gpus: str

    def read(self, source: Source) -> Job:
        """Read them all."""
        count = source.count(self.nodes, "nodes")
        rank = source.index(self.rank, "node_rank", below=count)
        hosts = source.text(self.hosts, "hosts").split()
        if bad := next((host for host in hosts if parse_host(host) is None), None):
            raise source.error(self.hosts, bad, "host names or IP addresses, one a line")
        return _job(source, count, rank, hosts, nproc=_gpus(source, self.gpus))


# docs.skypilot.co, "Distributed Jobs on Many Nodes"
SKYPILOT = Contract(
    "skypilot",
    Marks(all_of=("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"), none_of=_BY_HAND, shows=("SKYPILOT_NODE_IPS",)),
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
    Marks(all_of=("DSTACK_NODES_NUM", "DSTACK_NODE_RANK"), none_of=_BY_HAND, shows=("DSTACK_MASTER_NODE_IP",)),
    Flat(
        nodes="DSTACK_NODES_NUM",
        rank="DSTACK_NODE_RANK",
        hosts="DSTACK_MASTER_NODE_IP",
        gpus="DSTACK_GPUS_PER_NODE",
    ).read,
)


# -- LeaderWorkerSet: lws.sigs.k8s.io, "Labels, Annotations and Environment Variables" ---------------------


def _read_lws(source: Source) -> Job:
    """Read the group's size, the index in it, and the leader's name, which workers' names begin with."""
    size = source.count("LWS_GROUP_SIZE", "nodes")
    rank = source.index("LWS_WORKER_INDEX", "node_rank", below=size)
    leader = source.host("LWS_LEADER_ADDRESS", "master_addr")
    label, dot, domain = leader.partition(".")
    workers = [f"{label}-{index}{dot}{domain}" for index in range(1, size)] if size <= names.MAX_MEMBERS else ()
    return _job(source, size, rank, [leader, *workers])


LEADER_WORKER_SET = Contract(
    "leaderworkerset",
    Marks(all_of=("LWS_LEADER_ADDRESS",), none_of=_BY_HAND, shows=("LWS_GROUP_SIZE", "LWS_WORKER_INDEX")),
    _read_lws,
)


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
    return _job(source, nodes, rank, hosts, nproc=_gpus(source, "SLURM_GPUS_ON_NODE"))


SLURM = Contract("slurm", Marks(all_of=("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"), none_of=_BY_HAND), _read_slurm)


# -- SageMaker: sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md ---------------------------------------


def _read_sagemaker(source: Source) -> Job:
    """Read the list of hosts, and this one's place in it."""
    hosts = _json_hosts(source, "SM_HOSTS")
    own = source.host("SM_CURRENT_HOST", "node_rank")
    if own not in hosts:
        raise source.error("SM_CURRENT_HOST", own, f"one of SM_HOSTS, which are {', '.join(hosts[:8])}")
    return _job(source, len(hosts), hosts.index(own), hosts, nproc=_gpus(source, "SM_NUM_GPUS"))


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


SAGEMAKER = Contract("sagemaker", Marks(all_of=("SM_HOSTS", "SM_CURRENT_HOST"), none_of=_BY_HAND), _read_sagemaker)


# -- Azure ML: learn.microsoft.com, "Distributed GPU training guide (SDK v2)" ------------------------------


def _read_azureml(source: Source) -> Job:
    """Read one process on each node: WORLD_SIZE counts processes, which are nodes then."""
    rank = source.index("NODE_RANK", "node_rank")
    process = source.index("RANK", "rank", default=rank)
    if process != rank or source.index("LOCAL_RANK", "local_rank", default=0) != 0:
        expected = (
            f"NODE_RANK, which is {rank}: set process_count_per_instance to 1, the launcher starts the workers"
        )
        raise source.error("RANK", str(process), expected)
    nodes = source.count("WORLD_SIZE", "nodes")
    if rank >= nodes:
        raise source.error("NODE_RANK", str(rank), f"a whole number from 0 to {nodes - 1}")
    return _job(source, nodes, rank, [source.host("MASTER_ADDR", "master_addr")])


AZURE_ML = Contract(
    "azureml",
    Marks(all_of=("AZUREML_RUN_ID", "NODE_RANK", "MASTER_ADDR", "WORLD_SIZE"), none_of=_BY_HAND),
    _read_azureml,
)


# -- Vertex AI: cloud.google.com/vertex-ai/docs/training/distributed-training ------------------------------

_POOLS = ("workerpool0", "workerpool1")


def _read_vertex(source: Source) -> Job:
    """Read the first two worker pools: the primary replica, and the workers. Others hold no ranks."""
    spec = JsonView.of(source, "CLUSTER_SPEC", "hosts")
    task = spec.get("task")
    pool, index = task.get("type").word(), task.get("index").index()
    pools = {name: [item.address().host for item in entry.list()] for name, entry in spec.get("cluster").items()}
    if pool not in _POOLS:
        raise task.get("type").error("workerpool0 or workerpool1: replicas of other pools hold no ranks")
    if index >= len(pools.get(pool, ())):
        raise task.get("index").error(f"an index below {len(pools.get(pool, ()))}, the size of {pool}")
    hosts = [host for name in _POOLS for host in pools.get(name, ())]
    rank = index if pool == _POOLS[0] else len(pools.get(_POOLS[0], ())) + index
    return _job(source, len(hosts), rank, hosts)


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
    if len(tasks) > 1 and not set(tasks) <= set(_TASKS):
        names = ", ".join(tasks.values())
        raise ContractError(
            f"{names}: the tasks of this Volcano job are not only a master and workers, so nobody says which nodes "
            f"train together; set --nodes, --node-rank and --master-addr, and --contract unknown (contract volcano)"
        )
    order = [task for task in _TASKS if task in tasks] or list(tasks)
    hosts = [host for task in order for host in source.hosts(tasks[task], "hosts")]
    own = next((at for at, host in enumerate(hosts) if host.partition(".")[0] == source.pod.hostname), None)
    if own is None:
        raise source.error(tasks[order[0]], source.pod.hostname, "this pod's host name among the hosts")
    return _job(source, len(hosts), own, hosts)


VOLCANO = Contract(
    "volcano",
    Marks(
        all_of=("VC_TASK_INDEX",),
        none_of=(*_BY_HAND, "RANK", "TF_CONFIG", "OMPI_MCA_orte_default_hostfile"),
        when=lambda source: bool(_volcano_tasks(source)),
    ),
    _read_volcano,
)


# -- plain JobSet and Indexed Job: jobset.sigs.k8s.io, "PyTorch Example" -----------------------------------


def _shows_others(source: Source) -> bool:
    """Whether the address is another pod's; on loopback, or of a job of one pod, it says nothing of others.

    127.0.0.2 and up are pods of a rehearsal.
    """
    return source.peek("MASTER_ADDR") not in ("127.0.0.1", "localhost", "::1") and source.peek("WORLD_SIZE") != "1"


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
    Marks(
        all_of=(_INDEX, "MASTER_ADDR", "MASTER_PORT"), none_of=("PET_MASTER_ADDR", *_BY_HAND), when=_shows_others
    ),
    _read_indexed,
)


# -- Ray: docs.ray.io, KubeRay -----------------------------------------------------------------------------


def _refuse_ray(_source: Source) -> Job:
    """Ray starts and restarts the processes of its pods itself."""
    raise ContractError(
        "KUBERAY_GEN_RAY_START_CMD: this pod belongs to a Ray cluster, and Ray starts its training workers itself; "
        "use the Ray image's own command, or run the job without Ray; "
        "--contract unknown runs this pod as if nobody had said anything"
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
