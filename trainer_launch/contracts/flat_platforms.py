"""Platforms that tell a job in a few flat variables: ranks of a running job, and one row for each platform.

JobSet, Flyte 2, LeaderWorkerSet, Slurm, clouds, Volcano.

Comments name where each platform documents its variables. One of these is enough to tell the platform.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.contracts import names
from trainer_launch.contracts.rows import Row, json_list, several
from trainer_launch.contracts.source import Contract, Marks, ReplicaTask, Source, Word
from trainer_launch.contracts.torchrun_env import STATIC, shows_others
from trainer_launch.model import Endpoint, Job, NodeRange, Rendezvous, hostfile
from trainer_launch.model.errors import ContractError
from trainer_launch.model.value_parsers import parse_endpoint, parse_host

_BY_HAND = ("PET_NNODES", "TORCHELASTIC_RUN_ID")  # whoever sets torchrun's variables says it all
_INDEX = "JOB_COMPLETION_INDEX"

# A process that torchrun or an MPI runtime has started: one rank of a job that runs already.


def _read_rank(_source: Source) -> Job:
    """A rank: its program has all it needs in variables of its own, and runs as it is."""
    return Job(role="rank", engine="plain")


_OF_TORCHRUN = ("LOCAL_RANK", "TORCHELASTIC_RUN_ID")  # LOCAL_RANK alone may be of a whole node


def is_mpi_rank(env: Mapping[str, str]) -> bool:
    """Whether an MPI runtime started this process.

    `srun --mpi=pmi2` sets PMI_RANK in each task, even in the only task of a node, which is the launcher. A Hydra
    that srun starts on each node also sets MPI_LOCALRANKID.
    """
    tasks, nodes = env.get("SLURM_STEP_NUM_TASKS"), env.get("SLURM_STEP_NUM_NODES")
    is_node = "SLURM_STEP_ID" in env and tasks in (None, nodes) and "MPI_LOCALRANKID" not in env
    return "OMPI_COMM_WORLD_RANK" in env or ("PMI_RANK" in env and not is_node)


def is_worker(env: Mapping[str, str]) -> bool:
    """Whether this process is a worker of torchrun or a rank of MPI, where nothing else is to be launched."""
    return is_mpi_rank(env) or all(name in env for name in _OF_TORCHRUN)


TORCHRUN_CHILD = Contract("torchrun-child", Marks(all_of=_OF_TORCHRUN), _read_rank)
MPI_RANK = Contract(
    "mpi-rank",
    Marks(any_of=("OMPI_COMM_WORLD_RANK", "PMI_RANK"), when=lambda source: is_mpi_rank(source.pod.env)),
    _read_rank,
)


# docs.skypilot.co, "Distributed Jobs on Many Nodes"
_SKYPILOT = Row(
    nodes="SKYPILOT_NUM_NODES",
    rank="SKYPILOT_NODE_RANK",
    hosts="SKYPILOT_NODE_IPS",
    workers="SKYPILOT_NUM_GPUS_PER_NODE",
)
SKYPILOT = Contract("skypilot", Marks(any_of=_SKYPILOT.shown, none_of=_BY_HAND), _SKYPILOT.read)

# dstack.ai/docs, "Distributed tasks"
_DSTACK = Row(
    nodes="DSTACK_NODES_NUM",
    rank="DSTACK_NODE_RANK",
    hosts="DSTACK_MASTER_NODE_IP",
    workers="DSTACK_GPUS_PER_NODE",
)
DSTACK = Contract("dstack", Marks(any_of=_DSTACK.shown, none_of=_BY_HAND), _DSTACK.read)

# sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md
_SAGEMAKER = Row(hosts="SM_HOSTS", list_hosts=json_list, own="SM_CURRENT_HOST", workers="SM_NUM_GPUS")
SAGEMAKER = Contract("sagemaker", Marks(any_of=_SAGEMAKER.shown, none_of=_BY_HAND), _SAGEMAKER.read)


def _names_like(source: Source, name: str) -> Sequence[str]:
    """The leader's name, and those of its workers, which begin with it."""
    leader = source.host(name, "master_addr", default=None)
    size = source.count("LWS_GROUP_SIZE", "nodes", default=1)
    if leader is None or size > names.MAX_MEMBERS:
        return [] if leader is None else [leader]
    label, dot, domain = leader.partition(".")
    return [leader, *(f"{label}-{index}{dot}{domain}" for index in range(1, size))]


# lws.sigs.k8s.io, "Labels, Annotations and Environment Variables"
_LWS = Row(nodes="LWS_GROUP_SIZE", rank="LWS_WORKER_INDEX", hosts="LWS_LEADER_ADDRESS", list_hosts=_names_like)
LEADER_WORKER_SET = Contract("leaderworkerset", Marks(any_of=_LWS.shown, none_of=_BY_HAND), _LWS.read)


# Flyte 2: flyte-sdk, flyte/_bin/clustered.py and its backend's plug-in `clustered`, a JobSet.


def _pods_of_set(source: Source, name: str) -> Sequence[str]:
    """The pods of the JobSet's only replicatedJob."""
    jobset, space = source.text(name, "hosts"), source.text("POD_NAMESPACE", "hosts")
    hosts = (f"{jobset}-{_REPLICATED}-0-{index}.{jobset}.{space}.svc.cluster.local" for index in itertools.count())
    if parse_host(first := next(hosts)) is None:
        raise source.error(name, jobset, f"a name of which {first[:80]!r} becomes a host")
    return [first, *itertools.islice(hosts, min(source.count("NNODES", "nodes"), names.MAX_MEMBERS) - 1)]


_REPLICATED = "workers"
_FLYTE_2 = Row(nodes="NNODES", rank=_INDEX, hosts="JOBSET_NAME", list_hosts=_pods_of_set, workers="NPROC_PER_NODE")


def _is_flyte_2(source: Source) -> bool:
    """By names alone a JobSet of the user's own could look like it; a pod's name shows its replicatedJob."""
    own = names.split_v2(source.pod.hostname)
    return own is None or own.group == f"{source.peek('JOBSET_NAME')}-{_REPLICATED}"


def _read_flyte_2(source: Source) -> Job:
    """Read what Flyte's own entry point makes a torchrun of: its rendezvous is another in each attempt."""
    job, attempt = _FLYTE_2.read(source), source.index("JOBSET_RESTART_ATTEMPT", default=0)
    backend = source.text("RDZV_BACKEND", "rdzv_backend", default=STATIC)
    rendezvous = Rendezvous(
        kind=STATIC if backend == STATIC else "dynamic",
        backend=backend,
        endpoint=job.coordinator,
        run_id=f"{source.peek('JOBSET_NAME')}-{attempt}",
    )
    return replace(job, rendezvous=rendezvous, engine="torchrun")


FLYTE_2 = Contract(
    "flyte-clustered",
    Marks(
        all_of=("JOBSET_NAME", "POD_NAMESPACE", "JOBSET_RESTART_ATTEMPT", "NNODES", "NPROC_PER_NODE", _INDEX),
        none_of=_BY_HAND,
        when=_is_flyte_2,
    ),
    _read_flyte_2,
)


# Slurm: slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES".


def _hostlist(source: Source, name: str) -> Sequence[str]:
    return hostfile.expand_hostlist(source.text(name, "hosts"), name, source.contract)


_STEP = Row(
    nodes="SLURM_STEP_NUM_NODES",
    rank="SLURM_NODEID",
    hosts="SLURM_STEP_NODELIST",
    list_hosts=_hostlist,
    workers="SLURM_GPUS_ON_NODE",
)


_MPIRUN = re.compile(r"(?:.*/)?(?:mpirun|mpiexec)")  # it starts its ranks on all nodes of the job itself


def _read_slurm(source: Source) -> Job:
    """Read a task of srun: one on each node is a launcher's; of several on a node each one is a rank."""
    if not source.has("SLURM_STEP_ID"):
        nodes = source.count("SLURM_JOB_NUM_NODES", "nodes")
        if nodes > 1 and not _MPIRUN.match("".join(source.pod.command[:1])):
            raise source.missing(
                "SLURM_STEP_ID",
                f"one launcher on each of the {nodes} nodes: start it with srun --ntasks-per-node=1",
            )
        gpus = source.index(_STEP.workers, "nproc_per_node", default=None)
        return Job(role="node", nodes=NodeRange(1, 1), node_rank=0, nproc_per_node=gpus or None)
    nodes = source.count(_STEP.nodes, "nodes")
    tasks = source.count("SLURM_STEP_NUM_TASKS", "world_size", default=nodes)
    if tasks > nodes:
        return _read_rank(source)
    source.index(_STEP.rank, "node_rank", below=nodes)  # needed here
    return _STEP.read(source)


SLURM = Contract("slurm", Marks(all_of=("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"), none_of=_BY_HAND), _read_slurm)


# Azure ML: learn.microsoft.com, "Distributed GPU training guide (SDK v2)".

_AZURE_ML = ("WORLD_SIZE", "AZUREML_NODE_COUNT", "NODE_RANK", "MASTER_ADDR")


def _read_azureml(source: Source) -> Job:
    """Read one process on each node: WORLD_SIZE counts processes, which are nodes then.

    AZUREML_NODE_COUNT is set, too, but on no page of the documentation, so it only confirms or replaces WORLD_SIZE.
    """
    count = source.count("AZUREML_NODE_COUNT", "nodes", default=None)
    nodes = source.count("WORLD_SIZE", "nodes", default=count)
    rank = source.index("NODE_RANK", "node_rank", below=nodes, default=None)
    several_workers = "set process_count_per_instance to 1, the launcher starts the workers"
    if count is not None and nodes != count:
        raise source.error("WORLD_SIZE", str(nodes), f"AZUREML_NODE_COUNT, which is {count}: {several_workers}")
    process = source.index("RANK", "rank", default=rank)
    if rank is not None and process != rank:
        raise source.error("RANK", str(process), f"NODE_RANK, which is {rank}: {several_workers}")
    for name, alone in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        if source.index(name, default=alone) != alone:
            raise source.error(name, source.peek(name), f"{alone}: {several_workers}")
    return replace(several(source, nodes, rank, (), _AZURE_ML), worker_for_each_gpu=True)


def _is_distributed(source: Source) -> bool:
    """Every run of Azure ML has an id; only a distributed one tells of nodes."""
    others = source.has("MASTER_ADDR") and shows_others(source)
    return others or source.has("NODE_RANK") or source.peek("AZUREML_NODE_COUNT") not in ("", "1")


AZURE_ML = Contract(
    "azureml",
    Marks(all_of=("AZUREML_RUN_ID",), none_of=(*_BY_HAND, "TF_CONFIG"), when=_is_distributed),
    _read_azureml,
)


# Vertex AI: cloud.google.com/vertex-ai/docs/training/distributed-training.

_POOLS = ("workerpool0", "workerpool1")


class _ClusterSpec(Struct, frozen=True):
    cluster: dict[Word, list[str]]
    task: ReplicaTask


def _read_vertex(source: Source) -> Job:
    """Read the first two worker pools: the primary replica, and the workers. Others hold no ranks of torch.

    TF_CONFIG is there for every framework, the ranks of processes only in Google's images for PyTorch.
    """
    spec = source.json("CLUSTER_SPEC", _ClusterSpec, "hosts")
    pool, index = spec.task.type, spec.task.index
    pools = {name: [_host(source, text) for text in spec.cluster.get(name, ())] for name in (*_POOLS, pool)}
    may_be_tensorflow = source.has("TF_CONFIG") and not source.has("RANK")
    if pool not in _POOLS and not may_be_tensorflow:
        expected = "workerpool0 or workerpool1: replicas of other pools hold no ranks"
        raise source.error("CLUSTER_SPEC at task.type", pool, expected)
    if index >= len(pools[pool]):
        expected = f"an index below {len(pools[pool])}, the size of {pool}"
        raise source.error("CLUSTER_SPEC at task.index", str(index), expected)
    hosts = [host for name in _POOLS for host in pools[name]]
    before = 0 if pool == _POOLS[0] else len(pools[_POOLS[0]])
    rank = before + index if pool in _POOLS else None
    job = several(source, len(hosts), rank, hosts, ("CLUSTER_SPEC",))
    if not may_be_tensorflow:
        return replace(job, worker_for_each_gpu=True)
    source.warn(
        "TF_CONFIG is set and RANK is not: a program runs once on each replica, as TensorFlow needs it; "
        "a script of torch needs torchrun or --engine torch"
    )
    return replace(job, engine="plain")


def _host(source: Source, text: str) -> str:
    address = parse_endpoint(text, None, least_port=1)
    if address is None:
        raise source.error("CLUSTER_SPEC at cluster", text, "HOST:PORT")
    return address.host


VERTEX_AI = Contract("vertex-ai", Marks(all_of=("CLUSTER_SPEC",), none_of=_BY_HAND), _read_vertex)


# Volcano: its plug-ins svc and env; its plug-in pytorch writes what a PyTorchJob has.

_HOSTS = re.compile(r"VC_(\w+)_HOSTS")
_TASKS = ("MASTER", "WORKER")


def _volcano_tasks(source: Source) -> dict[str, str]:
    return {match[1]: name for name in sorted(source.pod.env) if (match := _HOSTS.fullmatch(name))}


def _read_volcano(source: Source) -> Job:
    """Read the hosts of each task; where there are a master and workers, the master is node 0."""
    tasks = _volcano_tasks(source)
    if not tasks:
        raise source.missing("VC_WORKER_HOSTS", "the host names of all pods: add the plug-in svc to the job")
    order = [task for task in _TASKS if task in tasks] or list(tasks)
    hosts = [host for task in order for host in source.hosts(tasks[task], "hosts")]
    own = next((at for at, host in enumerate(hosts) if names.first_label(host) == source.pod.hostname), None)
    if len(tasks) > 1 and not set(tasks) <= set(_TASKS):
        return several(source, None, None, (), list(tasks.values()))  # nobody says which tasks train together
    return several(source, len(hosts), own, hosts, [tasks[task] for task in order])


VOLCANO = Contract(
    "volcano",
    Marks(
        none_of=(*_BY_HAND, "RANK", "TF_CONFIG", "OMPI_MCA_orte_default_hostfile"),
        when=lambda source: bool(_volcano_tasks(source)),
    ),
    _read_volcano,
)


# Plain JobSet and Indexed Job: jobset.sigs.k8s.io, "PyTorch Example".


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
        completion_index=index,
        several_nodes_shown_by="MASTER_ADDR",
    )


INDEXED_JOB = Contract(
    "indexed-job",
    Marks(all_of=(_INDEX, "MASTER_ADDR", "MASTER_PORT"), none_of=("PET_MASTER_ADDR", *_BY_HAND), when=shows_others),
    _read_indexed,
)


# Ray: docs.ray.io, KubeRay.


def _refuse_ray(_source: Source) -> Job:
    """Ray starts and restarts the processes of its pods itself."""
    raise ContractError(
        "KUBERAY_GEN_RAY_START_CMD: this pod belongs to a Ray cluster, and Ray starts its training workers itself; "
        "use the Ray image's own command, or run the job without Ray; "
        "--contract unknown ignores these variables"
    )


KUBERAY = Contract("kuberay", Marks(all_of=("KUBERAY_GEN_RAY_START_CMD",)), _refuse_ray)
