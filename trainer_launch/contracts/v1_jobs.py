"""The v1 operator's TFJob, XGBoostJob (LightGBM runs in it, too), PaddleJob, JAXJob and PyTorchJob.

Each is read by the variables of its row in `v1_table`. A PyTorchJob has a Master, or Workers only, or an
elasticPolicy, in which Flyte's multi-node Elastic starts torch elastic itself. Up to 1.6 it has no PET_*, and
writes the same general names as an XGBoostJob with one replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.contracts import names, torchrun_env, v1_table
from trainer_launch.contracts.rows import Row
from trainer_launch.contracts.source import Contract, Marks, ReplicaTask, Source, Word
from trainer_launch.model import Endpoint, Job, Member, NodeRange, Origin, Rendezvous
from trainer_launch.model.errors import ContractError
from trainer_launch.model.value_parsers import parse_endpoint, parse_host

_TF_CONFIG = v1_table.TENSORFLOW.variable("config")
_LEGACY = "sparseCluster"  # the key up to 1.6
_CHIEFS = ("chief", "master")
_Cluster: TypeAlias = "Mapping[str, list[str] | dict[str, str] | None]"  # addresses by role

JAX = Contract(
    "jaxjob-v1",
    Marks(
        all_of=("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"),
        none_of=("JAX_COORDINATOR_ADDRESS",),  # whose users set these names too, for their own scripts
    ),
    Row(
        nodes=v1_table.JAX.variable("nodes"),
        rank=v1_table.JAX.variable("rank"),
        coordinator=v1_table.JAX.variable("host"),
        port=v1_table.JAX.variable("port"),
        nproc_per_node=1,
        v1_roles=("worker", "worker"),
        engine="plain",
        words=(("rank", "node_rank"), ("coordinator_address", "coordinator")),
    ).read,
    kind=v1_table.JAX.name,
)


# XGBoostJob: WORLD_SIZE counts pods, and each pod is one process.

_XGBOOST = v1_table.XGBOOST
_WORKERS, _WORKER_PORT = _XGBOOST.variable("workers"), _XGBOOST.variable("worker_port")


def _read_xgboost(source: Source) -> Job:
    """Read the general names, and the workers when there are any."""
    words = (*v1_table.ROW.words, ("rank", "node_rank"))
    job = replace(v1_table.ROW, nproc_per_node=1, engine="plain", words=words).read(source)
    pods, master = source.count(v1_table.ROW.nodes, "nodes"), v1_table.plain_master(source)
    workers = _workers(source, pods)
    port = source.port(_WORKER_PORT, "worker_port", default=None)
    source.derive(env_rank_means="node", worker_addrs=workers, worker_port=port)
    # none rather than a wrong list
    members = tuple(map(Member, (master.host, *workers))) if len(workers) == pods - 1 else None
    return replace(job, members=members)


def _workers(source: Source, pods: int) -> tuple[str, ...]:
    if source.blank(_WORKERS):
        return ()
    workers = source.hosts(_WORKERS, "worker_addrs")
    if len(workers) >= pods:
        raise source.error(_WORKERS, ",".join(workers), f"fewer hosts than WORLD_SIZE, which is {pods}")
    return workers


XGBOOST = Contract(
    "xgboostjob-v1",
    Marks(when=v1_table.may_be_xgboost),
    _read_xgboost,
    kind=_XGBOOST.name,
)


# PaddleJob: collective, or with parameter servers; Paddle's own launcher gives the ranks.

_PADDLE = v1_table.PADDLE
_MASTER, _JOB_ID, _NNODES = (_PADDLE.variable(value) for value in ("address", "job", "nodes"))
_SERVERS, _TRAINERS = _PADDLE.variable("server_num"), _PADDLE.variable("trainer_num")


def _read_paddle(source: Source) -> Job:
    """Read the PADDLE_* variables; the master is an IP on its own pod and a name on the others."""
    nodes = source.count(_NNODES, "nodes")
    master = source.endpoint(_MASTER, "master_addr", least_port=1, naked_ipv6=True)
    job_id = source.text(_JOB_ID, "job_id")
    servers = source.count(_SERVERS, "server_num", default=None)
    trainers = source.count(_TRAINERS, "trainer_num", default=None)
    if servers is not None and trainers is not None:
        raise source.error(_SERVERS, str(servers), f"either this or {_TRAINERS}, not both")
    collective = servers is None and trainers is None
    source.derive(mode="collective" if collective else "ps", server_num=servers, trainer_num=trainers)
    own = names.split_v1(source.pod.hostname)
    worker_0 = parse_host(f"{job_id}{names.V1_WORKER}0") if collective else None
    return Job(
        role=own.role if own else ("master" if servers is not None else "worker"),
        nodes=NodeRange(nodes, nodes),
        hostname_index=own.index if own else None,
        coordinator=master,
        is_coordinator=source.has_any(*_PADDLE.variables("pod_ip"))
        or names.first_label(master.host) == source.pod.hostname,
        members=names.members_like(worker_0, names.V1_WORKER, nodes) if worker_0 else None,
        engine="plain",
        has_servers=not collective,
    )


PADDLE = Contract(
    "paddlejob-v1",
    Marks(all_of=(_MASTER, _JOB_ID)),
    _read_paddle,
    kind=_PADDLE.name,
)


# TFJob: TF_CONFIG has all nodes' addresses by their roles.


class _TfConfig(Struct, frozen=True, kw_only=True):
    """TF_CONFIG; with enableDynamicWorker the workers are an object by index, and up to 1.6 under another key."""

    task: ReplicaTask
    cluster: dict[Word, list[str] | dict[str, str] | None] | None = None
    legacy: dict[Word, list[str] | dict[str, str] | None] | None = field(name=_LEGACY, default=None)
    environment: Word | None = None


def _read_tensorflow(source: Source) -> Job:
    """Read TF_CONFIG: full, or sparse with enableDynamicWorker. A job of one replica has none."""
    config = source.json(_TF_CONFIG, _TfConfig, "cluster")
    is_legacy = config.cluster is None and config.legacy is not None
    cluster = config.legacy if is_legacy else config.cluster
    if cluster is None:
        raise _bad(source, "cluster", "null", "the addresses of the job's pods")
    if not is_legacy and not isinstance(cluster.get("worker"), dict):
        return _full(source, config, cluster)
    job = _sparse(source, config, cluster)
    source.derive(legacy_key=_LEGACY if is_legacy else None)
    source.warn("TF_CONFIG is sparse: the number of workers is unknown")
    return job


def _bad(source: Source, place: str, value: str, expected: str) -> ContractError:
    return source.error(f"{_TF_CONFIG} at {place}", value, expected)


def _addresses(source: Source, cluster: _Cluster, role: str) -> dict[str, Endpoint]:
    """The addresses of a role by their indices; null stands for none."""
    entry = cluster.get(role) or []
    if isinstance(cluster.get(role), dict) and role != "worker":
        raise _bad(source, role, "an object", "a list")
    by_index = entry if isinstance(entry, dict) else {str(index): text for index, text in enumerate(entry)}
    addresses: dict[str, Endpoint] = {}
    for index, text in sorted(by_index.items(), key=lambda pair: pair[0].rjust(20)):
        address = parse_endpoint(text, None, least_port=1)
        if address is None or not index.isdecimal():
            raise _bad(source, f"{role}.{index[:20]}", text, "HOST:PORT, under a pod's index")
        addresses[index] = address
    return addresses


def _full(source: Source, config: _TfConfig, cluster: _Cluster) -> Job:
    """A job all of whose pods are listed."""
    task = config.task
    by_role = {role: _addresses(source, cluster, role) for role in sorted(cluster)}
    # TF's own convention leaves the evaluator out
    is_outside = task.type == "evaluator" and task.type not in by_role
    own = by_role.get(task.type, {}).get(str(task.index))
    if own is None and not is_outside:
        raise _bad(source, "task", f"{task.type} {task.index}", "a type and index that cluster has")
    counts = {role: len(addresses) for role, addresses in by_role.items()}
    chief = next((by_role[role]["0"] for role in v1_table.TENSORFLOW.leaders if by_role.get(role)), None)
    has_chief = any(counts.get(role) for role in _CHIEFS)
    leads = task.index == 0 and (task.type in _CHIEFS or (task.type == "worker" and not has_chief))
    nodes = sum(counts.values())
    source.derive(
        environment=config.environment,
        self_address=None if own is None else str(own),
        is_chief=leads,
        num_workers=counts.get("worker", 0),
        num_ps=counts.get("ps", 0),
        num_evaluators=counts.get("evaluator", 0),
        # The operator lists evaluators in the cluster; TF wants them outside of the collective.
        nodes_in_training=nodes - counts.get("evaluator", 0),
        task_type=task.type,
        task_index=task.index,
        cluster={role: tuple(map(str, addresses.values())) for role, addresses in by_role.items()},
    )
    return Job(
        role=task.type,
        nodes=NodeRange(nodes, nodes) if nodes else None,
        coordinator=chief,
        is_coordinator=leads,
        members=tuple(Member(address.host) for each in by_role.values() for address in each.values()),
        engine="plain",
    )


def _sparse(source: Source, config: _TfConfig, cluster: _Cluster) -> Job:
    """A job of which a worker sees itself and all parameter servers, and a parameter server only itself."""
    task = config.task
    workers = {index: str(address) for index, address in _addresses(source, cluster, "worker").items()}
    servers = tuple(map(str, _addresses(source, cluster, "ps").values()))
    own = None  # chief, master and evaluator get no address
    if task.type == "worker":
        own = workers.get(str(task.index))
    elif task.type == "ps":  # it sees only itself, first in the list, whatever its index
        own = next(iter(servers[0 if len(servers) == 1 else task.index :]), None)
    if own is None and task.type in ("worker", "ps"):
        raise _bad(source, "task", f"{task.type} {task.index}", "a type and index that cluster has")
    source.derive(
        task_type=task.type,
        task_index=task.index,
        environment=config.environment,
        workers_known=workers,
        ps_known=servers,
        self_address=own,
    )
    return Job(role=task.type, is_coordinator=task.type in _CHIEFS and task.index == 0, engine="plain", sparse=True)


TENSORFLOW = Contract("tfjob-v1", Marks(all_of=(_TF_CONFIG,)), _read_tensorflow, kind=v1_table.TENSORFLOW.name)


def _fits(source: Source) -> bool:
    if source.has_any("JOB_COMPLETION_INDEX", "PET_RDZV_ENDPOINT"):
        return False
    return _has_master(source) or _is_worker_only(source) or v1_table.may_be_pytorch(source)


def _has_master(source: Source) -> bool:
    return source.has_any("RANK", "WORLD_SIZE") and source.has_any("PET_NODE_RANK", "PET_MASTER_ADDR")


def _is_worker_only(source: Source) -> bool:
    if not source.has("PET_NNODES") or v1_table.is_owned(source):
        return False
    if source.has_any("RANK", "PET_NODE_RANK", "PET_MASTER_ADDR"):
        return False
    return source.has("PYTHONUNBUFFERED") or _own_name(source) is not None


def _own_name(source: Source) -> names.V1Name | None:
    own = names.split_v1(source.pod.hostname)
    return own if own and own.role in ("master", "worker") else None


def _read(source: Source) -> Job:
    """Read whichever of the three forms is there."""
    if source.has_any("PET_NODE_RANK", "PET_MASTER_ADDR"):
        return _with_master(source)
    if source.has("PET_NNODES"):
        return _worker_only(source)
    return _up_to_1_6(source)


def _with_master(source: Source) -> Job:
    nodes = source.node_range("PET_NNODES", "nodes")
    nproc = source.nproc("PET_NPROC_PER_NODE", "nproc_per_node", default=None)
    rank = source.index(v1_table.ROW.rank, "node_rank", below=nodes.max)
    _same(source, "rank", str(rank), str(source.index("PET_NODE_RANK")))
    master, plain = torchrun_env.master(source), v1_table.plain_master(source)
    _same(source, "host", plain.host, master.host)
    _same(source, "port", str(plain.port), str(master.port))
    env_world_size = source.count("WORLD_SIZE", "env_world_size")
    _check_world_size(source, env_world_size, nodes, nproc)
    job = torchrun_env.job(source, nodes, nproc, torchrun_env.rendezvous(source, master))
    v1_table.derive_ranks(source, env_world_size, rank)
    own = _own_name(source)
    return replace(
        job,
        role=own.role if own else ("master" if rank == 0 else "worker"),
        node_rank=rank,
        hostname_index=own.index if own else None,
        coordinator=master,
        is_coordinator=rank == 0,
        members=_members(master.host, nodes.max),
    )


def _worker_only(source: Source) -> Job:
    nodes = source.node_range("PET_NNODES", "nodes")
    nproc = source.nproc("PET_NPROC_PER_NODE", "nproc_per_node", default=None)  # 1.7 wrote it with a Master only
    own = _own_name(source)
    members = names.members_like(f"{own.job}{names.V1_WORKER}0", names.V1_WORKER, nodes.max) if own else None
    if own:
        source.note("hostname", source.pod.hostname, Origin.HOSTNAME, "hostname_index")
        source.warn("a PyTorchJob without a Master gives no rank: it has to come from the host name")
    return replace(
        torchrun_env.job(source, nodes, nproc, torchrun_env.given_rendezvous(source)),
        role=own.role if own else "worker",
        hostname_index=own.index if own else None,
        coordinator=None,
        is_coordinator=own.index == 0 if own else None,
        members=members,
    )


def _up_to_1_6(source: Source) -> Job:
    job = v1_table.ROW.read(source)
    master = v1_table.plain_master(source)
    first = master.host
    if job.role == "master" and first == "localhost" and job.hostname_index is not None:
        first = source.pod.hostname  # up to 1.3 its MASTER_ADDR is this
        source.warn("MASTER_ADDR is localhost on the master: the workers know it by its host name")
    source.derive(env_rank_means="node")
    return replace(
        job,
        rendezvous=Rendezvous(kind="static", backend="static", endpoint=master),
        members=_members(first, source.count(v1_table.ROW.nodes, "nodes")),
        engine="torchrun",
    )


def _same(source: Source, value: str, expected: str, actual: str) -> None:
    """Check that both variables that hold this value of the row hold the same."""
    name, other = v1_table.PYTORCH.variables(value)
    if actual != expected:
        raise source.error(other, actual, f"the same as {name}, which is {expected[:60]}")


def _check_world_size(source: Source, size: int, nodes: NodeRange, nproc: int | str | None) -> None:
    # pods x nproc, where a word counts as 1
    expected = nodes.max * nproc if isinstance(nproc, int) else nodes.max
    if size not in (expected, nodes.max):
        raise source.error("WORLD_SIZE", str(size), f"PET_NNODES x PET_NPROC_PER_NODE, which is {expected}")
    if size != expected:
        source.warn(f"WORLD_SIZE is {size} and counts pods: PET_NNODES x PET_NPROC_PER_NODE is {expected}")


def _members(master: str, pods: int) -> tuple[Member, ...] | None:
    if pods == 1:
        return (Member(master),)
    label, dot, domain = master.partition(".")
    if not label.endswith("-master-0"):
        return None
    worker_0 = f"{label.removesuffix('-master-0')}{names.V1_WORKER}0{dot}{domain}"
    workers = names.members_like(worker_0, names.V1_WORKER, pods - 1)
    return None if workers is None else (Member(master), *workers)


def _read_elastic(source: Source, engine: str) -> Job:
    """Read a PyTorchJob with `elasticPolicy`: PET_RDZV_*, a range of nodes, ranks only with a Master."""
    nodes = source.node_range("PET_NNODES", "nodes", default=None)
    nproc = source.nproc("PET_NPROC_PER_NODE", "nproc_per_node", default=None)
    meeting = torchrun_env.rendezvous(source, None)
    own = names.split_v1(source.pod.hostname)
    host = meeting.endpoint.host if meeting.endpoint else None
    if own:
        source.note("hostname", source.pod.hostname, Origin.HOSTNAME, "hostname_index")
    made = torchrun_env.job(source, nodes, nproc, meeting)
    return replace(
        made,
        role=own.role if own else "worker",
        hostname_index=own.index if own else None,
        is_coordinator=_is_host(host, meeting.backend, own) if own and host else None,
        members=_elastic_workers(host, own, nodes),
        engine=engine,
        rank_behind_workers=_master_too(source, own, nodes, nproc),
    )


def _is_host(host: str, backend: str | None, own: names.V1Name) -> bool:
    """Whether this pod is the one that the endpoint names; behind a name that is no pod's, worker 0 hosts.

    Such as a Service, or a rehearsal's loopback address. Backends other than c10d have a server of their own.
    """
    named = names.split_v1(host)
    if named is not None and named.job == own.job:
        return named == own
    return backend == torchrun_env.C10D and (own.role, own.index) == ("worker", 0)


def _elastic_workers(
    host: str | None, own: names.V1Name | None, nodes: NodeRange | None
) -> tuple[Member, ...] | None:
    if nodes is None:
        return None
    # The endpoint may be an etcd server; then only the own name shows the pattern.
    worker_0 = host if host and names.first_label(host).endswith(f"{names.V1_WORKER}0") else None
    if worker_0 is None and own and own.role == "worker":
        worker_0 = f"{own.job}{names.V1_WORKER}0"
    return names.members_like(worker_0, names.V1_WORKER, nodes.max) if worker_0 else None


def _master_too(
    source: Source, own: names.V1Name | None, nodes: NodeRange | None, nproc: int | str | None
) -> int | None:
    # Master plus elasticPolicy writes both sets: PET_NNODES counts workers only, WORLD_SIZE and RANK count all.
    if not all(map(source.has, ("MASTER_ADDR", "RANK", "WORLD_SIZE"))):
        return None
    source.warn(
        "the job has a Master and an elasticPolicy: torchrun ignores the ranks, and one pod may be too many"
    )
    size = source.count("WORLD_SIZE", "env_world_size")
    v1_table.derive_ranks(source, size, source.index("RANK", "env_rank"))
    is_master = own is not None and own.role == "master"
    return _behind_workers(size, nodes, nproc) if is_master and nodes else None


def _behind_workers(size: int, nodes: NodeRange, nproc: int | str | None) -> int:
    """The Master's rank: the workers have their indices, and its own index is that of worker 0."""
    # WORLD_SIZE counts pods, in newer operators times nproc: where both can be, the larger rank is free as well.
    times = nproc if isinstance(nproc, int) and size > nodes.max + 1 and size % nproc == 0 else 1
    return size // times - 1


# v1 pods never have a completion index; a Trainer v2 pod in which somebody set the endpoint by hand does.
_NO_INDEX = ("JOB_COMPLETION_INDEX",)


PYTORCH = Contract(
    "pytorchjob-v1",
    Marks(when=_fits),
    _read,
    kind=v1_table.PYTORCH.name,
)
FLYTE_ELASTIC = Contract(
    "flyte-elastic",
    Marks(
        all_of=("PET_RDZV_ENDPOINT",),
        none_of=_NO_INDEX,
        when=lambda source: source.has_prefix("FLYTE_INTERNAL_", "_F_"),
    ),
    partial(_read_elastic, engine="plain"),  # a second agent around flytekit's would be wrong
    kind=v1_table.PYTORCH.name,
)
PYTORCH_ELASTIC = Contract(
    "pytorchjob-v1-elastic",
    Marks(all_of=("PET_RDZV_ENDPOINT",), none_of=_NO_INDEX),
    partial(_read_elastic, engine="torchrun"),
    kind=v1_table.PYTORCH.name,
)
