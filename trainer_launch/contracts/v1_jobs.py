"""Of the v1 operator: TFJob, XGBoostJob (LightGBM runs in it, too), PaddleJob, JAXJob and, up to 1.8, MXJob.

Each is read by the variables of its row in `v1_table`. PyTorchJob has a module of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from trainer_launch.contracts import names, v1_table
from trainer_launch.contracts.rows import Row
from trainer_launch.contracts.source import Contract, Marks, ReplicaTask, Source, Word
from trainer_launch.model import Endpoint, Job, Member, NodeRange
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
        shows=("COORDINATOR_PORT",),
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


# -- XGBoostJob: WORLD_SIZE counts pods, and each pod is one process ------------------------------

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
    Marks(when=v1_table.may_be_xgboost, shows=(_WORKERS, *v1_table.NAMES)),
    _read_xgboost,
    kind=_XGBOOST.name,
)


# -- PaddleJob: collective, or with parameter servers; Paddle's own launcher gives the ranks ---------

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
    Marks(all_of=(_MASTER, _JOB_ID), shows=(_NNODES, _SERVERS, _TRAINERS)),
    _read_paddle,
    kind=_PADDLE.name,
)


# -- TFJob: TF_CONFIG has all nodes' addresses by their roles ----------------------------------------


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
    found: dict[str, Endpoint] = {}
    for index, text in sorted(by_index.items(), key=lambda pair: pair[0].rjust(20)):
        address = parse_endpoint(text, None, least_port=1)
        if address is None or not index.isdecimal():
            raise _bad(source, f"{role}.{index[:20]}", text, "HOST:PORT, under a pod's index")
        found[index] = address
    return found


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
    own = None  # chief, master and evaluator are told no address
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


# -- MXJob: MX_CONFIG, and the DMLC_* variables of MXNet's parameter servers ---------------------------

_MX = v1_table.MXNET
_MX_CONFIG, _URI, _ROLE, _WORKER_ID = (_MX.variable(value) for value in ("config", "host", "role", "worker_index"))


class _MxAddress(Struct, frozen=True):
    url: str
    port: Annotated[int, Meta(ge=1, le=65535)]


class _MxConfig(Struct, frozen=True):
    task: ReplicaTask
    cluster: dict[Word, list[_MxAddress]]


def _read_mxnet(source: Source) -> Job:
    """Read MX_CONFIG, and check that DMLC_* says the same."""
    config = source.json(_MX_CONFIG, _MxConfig, "cluster")
    task, by_role = config.task, {role: config.cluster[role] for role in sorted(config.cluster)}
    for address in (address for addresses in by_role.values() for address in addresses):
        if parse_host(address.url) is None:
            raise source.error(f"{_MX_CONFIG} at cluster", address.url, "a host name")
    own = next(iter(by_role.get(task.type, [])[task.index : task.index + 1]), None)
    if own is None:
        expected = "a type and index that cluster has"
        raise source.error(f"{_MX_CONFIG} at task", f"{task.type} {task.index}", expected)
    role = source.text(_ROLE, "role", default=task.type)
    if role != task.type:
        raise source.error(_ROLE, role, f"the task's type in MX_CONFIG, which is {task.type}")
    worker = source.index(_WORKER_ID, "task_index", default=task.index)
    if task.type == "worker" and worker != task.index:
        raise source.error(_WORKER_ID, str(worker), f"the task's index in MX_CONFIG, which is {task.index}")
    root = _root(source)
    source.derive(
        self_address=f"{own.url}:{own.port}",
        num_workers=source.count(_MX.variable("workers"), "num_workers", least=0, default=None),
        num_servers=source.count(_MX.variable("servers"), "num_servers", least=0, default=None),
        task_type=task.type,
        task_index=task.index,
        cluster={role: tuple(f"{pod.url}:{pod.port}" for pod in pods) for role, pods in by_role.items()},
    )
    hosts = [pod.url for pods in by_role.values() for pod in pods]
    return Job(
        role=task.type,
        nodes=NodeRange(len(hosts), len(hosts)),
        coordinator=root,
        is_coordinator=task.type == "scheduler" and task.index == 0,
        members=tuple(map(Member, hosts)),
        engine="plain",
    )


def _root(source: Source) -> Endpoint | None:
    # Without a scheduler the operator writes "" and 0.
    if source.blank(_URI):
        return None
    host = source.host(_URI, "master_addr")
    port = source.port(_MX.variable("port"), "master_port", least=0)
    return Endpoint(host, port) if port else None


MXNET = Contract("mxjob-v1", Marks(all_of=(_MX_CONFIG,), shows=(_ROLE, _URI)), _read_mxnet, kind=_MX.name)
