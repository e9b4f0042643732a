"""Of the v1 operator: TFJob, XGBoostJob (LightGBM runs in it, too), PaddleJob, JAXJob and, up to 1.8, MXJob.

Each is read by the variables of its row in `v1_table`. PyTorchJob has a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.contracts import generic_env, names, v1_table
from trainer_launch.contracts.rows import Row
from trainer_launch.contracts.source import Contract, JsonView, Marks, Source
from trainer_launch.model import Endpoint, Job, Member, NodeRange
from trainer_launch.model.value_parsers import parse_host

_TF_CONFIG = v1_table.TENSORFLOW.variable("config")
_LEGACY = "sparseCluster"  # the key up to 1.6
_CHIEFS = ("chief", "master")
_Lists: TypeAlias = "dict[str, tuple[Endpoint, ...]]"  # addresses by role

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
    words = (*generic_env.ROW.words, ("rank", "node_rank"))
    job = replace(generic_env.ROW, nproc_per_node=1, engine="plain", words=words).read(source)
    pods, master = source.count(generic_env.ROW.nodes, "nodes"), generic_env.master(source)
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
    Marks(when=generic_env.may_be_xgboost, shows=(_WORKERS, *generic_env.NAMES)),
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


# -- TF_CONFIG and MX_CONFIG have all nodes' addresses by their roles -------------------------------


class _Task(Struct, frozen=True):
    type: str
    index: int

    @classmethod
    def of(cls, config: JsonView) -> _Task:
        task = config.get("task")
        return cls(task.get("type").word(), task.get("index").index())


def _own_address(cluster: JsonView, lists: _Lists, task: _Task) -> str:
    if task.type not in lists:
        raise cluster.error(f"a list under {task.type}, which is this task's type")
    addresses = lists[task.type]
    if task.index >= len(addresses):
        raise cluster.get(task.type).error(f"more than {task.index} addresses, because task.index is {task.index}")
    return str(addresses[task.index])


def _lists(cluster: JsonView, address: Callable[[JsonView], Endpoint]) -> _Lists:
    return {role: tuple(address(item) for item in entry.list()) for role, entry in cluster.items()}


def _full_job(source: Source, lists: _Lists, task: _Task, leader: Endpoint | None, leads: bool) -> Job:
    """A job all of whose pods are listed."""
    nodes = sum(map(len, lists.values()))
    source.derive(
        task_type=task.type,
        task_index=task.index,
        cluster={role: tuple(map(str, addresses)) for role, addresses in lists.items()},
    )
    return Job(
        role=task.type,
        nodes=NodeRange(nodes, nodes) if nodes else None,
        coordinator=leader,
        is_coordinator=leads and task.index == 0,
        members=tuple(Member(address.host) for addresses in lists.values() for address in addresses),
        engine="plain",
    )


# -- TF_CONFIG ----------------------------------------------------------------------------------


def _read_tensorflow(source: Source) -> Job:
    """Read TF_CONFIG: full, or sparse with enableDynamicWorker. A job of one replica has none."""
    config = JsonView.of(source, _TF_CONFIG, "cluster")
    task = _Task.of(config)
    legacy = "cluster" not in config.mapping() and _LEGACY in config.mapping()
    cluster = config.get(_LEGACY if legacy else "cluster")
    cluster.mapping()
    sparse = legacy or isinstance(cluster.get("worker").value, dict)
    if not sparse:
        return _full(source, config, cluster, task)
    job = _sparse(source, config, cluster, task)
    source.derive(legacy_key=_LEGACY if legacy else None)
    source.warn("TF_CONFIG is sparse: the number of workers is unknown")
    return job


def _full(source: Source, config: JsonView, cluster: JsonView, task: _Task) -> Job:
    lists = _lists(cluster, JsonView.address)
    # TF's own convention leaves the evaluator out
    is_outside = task.type == "evaluator" and task.type not in lists
    own = None if is_outside else _own_address(cluster, lists, task)
    counts = {role: len(addresses) for role, addresses in lists.items()}
    chief = next((lists[role][0] for role in v1_table.TENSORFLOW.leaders if lists.get(role)), None)
    has_chief = any(counts.get(role) for role in _CHIEFS)
    leads = task.type in _CHIEFS or (task.type == "worker" and not has_chief)
    source.derive(
        environment=_environment(config),
        self_address=own,
        is_chief=leads and task.index == 0,
        num_workers=counts.get("worker", 0),
        num_ps=counts.get("ps", 0),
        num_evaluators=counts.get("evaluator", 0),
        # The operator lists evaluators in the cluster; TF wants them outside of the collective.
        nodes_in_training=sum(counts.values()) - counts.get("evaluator", 0),
    )
    return _full_job(source, lists, task, chief, leads)


def _sparse(source: Source, config: JsonView, cluster: JsonView, task: _Task) -> Job:
    environment = _environment(config)
    workers = {key: str(entry.address()) for key, entry in _entries(cluster.get("worker"))}
    servers = _servers(cluster.get("ps"))
    source.derive(
        task_type=task.type,
        task_index=task.index,
        environment=environment,
        workers_known=workers,
        ps_known=servers,
        self_address=_own_sparse_address(cluster, workers, servers, task),
    )
    leads = task.type in _CHIEFS and task.index == 0
    return Job(role=task.type, is_coordinator=leads, engine="plain", sparse=True)


def _entries(worker: JsonView) -> tuple[tuple[str, JsonView], ...]:
    entries = () if worker.value is None else worker.items()
    if not all(key.isdecimal() for key, _ in entries):
        raise worker.error("addresses by index")
    return entries


def _servers(ps: JsonView) -> tuple[str, ...]:
    # null stands for "there are none"
    return () if ps.value is None else tuple(str(item.address()) for item in ps.list())


def _own_sparse_address(
    cluster: JsonView, workers: dict[str, str], servers: tuple[str, ...], task: _Task
) -> str | None:
    if task.type == "worker":
        if str(task.index) not in workers:
            raise cluster.get("worker").error(f"an address under {task.index}, which is task.index")
        return workers[str(task.index)]
    if task.type == "ps":  # it sees only itself, first in the list, whatever its index
        if len(servers) != 1 and task.index >= len(servers):
            raise cluster.get("ps").error("this server's own address")
        return servers[0] if len(servers) == 1 else servers[task.index]
    return None  # chief, master and evaluator are told no address


def _environment(config: JsonView) -> str | None:
    environment = config.get("environment")
    return None if environment.value is None else environment.word()


# -- MX_CONFIG, and the DMLC_* variables of MXNet's parameter servers --------------------------------

_MX = v1_table.MXNET
_MX_CONFIG, _URI, _ROLE, _WORKER_ID = (_MX.variable(value) for value in ("config", "host", "role", "worker_index"))


def _read_mxnet(source: Source) -> Job:
    """Read MX_CONFIG, and check that DMLC_* says the same."""
    config = JsonView.of(source, _MX_CONFIG, "cluster")
    task = _Task.of(config)
    lists = _lists(config.get("cluster"), lambda item: Endpoint(item.get("url").host(), item.get("port").port()))
    own = _own_address(config.get("cluster"), lists, task)
    role = source.text(_ROLE, "role", default=task.type)
    if role != task.type:
        raise source.error(_ROLE, role, f"the task's type in MX_CONFIG, which is {task.type}")
    worker = source.index(_WORKER_ID, "task_index", default=task.index)
    if task.type == "worker" and worker != task.index:
        raise source.error(_WORKER_ID, str(worker), f"the task's index in MX_CONFIG, which is {task.index}")
    root = _root(source)
    source.derive(
        self_address=own,
        num_workers=source.count(_MX.variable("workers"), "num_workers", least=0, default=None),
        num_servers=source.count(_MX.variable("servers"), "num_servers", least=0, default=None),
    )
    return _full_job(source, lists, task, root, task.type == "scheduler")


def _root(source: Source) -> Endpoint | None:
    # Without a scheduler the operator writes "" and 0.
    if source.blank(_URI):
        return None
    host = source.host(_URI, "master_addr")
    port = source.port(_MX.variable("port"), "master_port", least=0)
    return Endpoint(host, port) if port else None


TENSORFLOW = Contract("tfjob-v1", Marks(all_of=(_TF_CONFIG,)), _read_tensorflow, kind=v1_table.TENSORFLOW.name)
MXNET = Contract("mxjob-v1", Marks(all_of=(_MX_CONFIG,), shows=(_ROLE, _URI)), _read_mxnet, kind=_MX.name)
