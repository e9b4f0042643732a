"""TFJob and, up to 1.8, MXJob of the v1 operator: TF_CONFIG and MX_CONFIG have all nodes' addresses by their roles.

TF_CONFIG is full or sparse (enableDynamicWorker); a job of one replica has none.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from trainer_launch.contracts.source import Contract, JsonView, Marks, Source
from trainer_launch.model import Endpoint, Job, Json, Member, NodeRange

_LEGACY = "sparseCluster"  # the key up to 1.6
_CHIEFS = ("chief", "master")
_Lists: TypeAlias = "dict[str, tuple[Endpoint, ...]]"  # addresses by role


class _Task(Struct, frozen=True):
    type: str
    index: int

    @classmethod
    def of(cls, config: JsonView) -> _Task:
        task = config.get("task")
        return cls(task.get("type").word(), task.get("index").index())

    @property
    def details(self) -> dict[str, Json]:
        return {"task_type": self.type, "task_index": self.index}


def _own_address(cluster: JsonView, lists: _Lists, task: _Task) -> str:
    if task.type not in lists:
        raise cluster.error(f"a list under {task.type}, which is this task's type")
    addresses = lists[task.type]
    if task.index >= len(addresses):
        raise cluster.get(task.type).error(f"more than {task.index} addresses, because task.index is {task.index}")
    return str(addresses[task.index])


def _members(lists: _Lists) -> tuple[Member, ...]:
    return tuple(Member(address.host) for addresses in lists.values() for address in addresses)


def _shown(lists: _Lists) -> dict[str, Json]:
    return {kind: tuple(map(str, addresses)) for kind, addresses in lists.items()}


# -- TF_CONFIG ----------------------------------------------------------------------------------


def _read_tensorflow(source: Source) -> Job:
    """Read TF_CONFIG in whichever form it has."""
    config = JsonView.of(source, "TF_CONFIG", "cluster")
    task = _Task.of(config)
    legacy = "cluster" not in config.mapping() and _LEGACY in config.mapping()
    cluster = config.get(_LEGACY if legacy else "cluster")
    cluster.mapping()
    sparse = legacy or isinstance(cluster.get("worker").value, dict)
    if not sparse:
        return _full(config, cluster, task)
    job = _sparse(cluster, task, {"environment": _environment(config), "legacy_key": _LEGACY if legacy else None})
    source.warn("TF_CONFIG is sparse: the number of workers is unknown")
    return job


def _full(config: JsonView, cluster: JsonView, task: _Task) -> Job:
    lists = {kind: tuple(item.address() for item in entry.list()) for kind, entry in cluster.items()}
    # TF's own convention leaves the evaluator out
    is_outside = task.type == "evaluator" and task.type not in lists
    own = None if is_outside else _own_address(cluster, lists, task)
    counts = {kind: len(addresses) for kind, addresses in lists.items()}
    nodes = sum(counts.values())
    chief = next((lists[kind][0] for kind in (*_CHIEFS, "worker") if lists.get(kind)), None)
    has_chief = any(counts.get(kind) for kind in _CHIEFS)
    leads = task.type in _CHIEFS or (task.type == "worker" and not has_chief)
    is_chief = leads and task.index == 0
    return Job(
        role=task.type,
        nodes=NodeRange(nodes, nodes) if nodes else None,
        coordinator=chief,
        is_coordinator=is_chief,
        members=_members(lists),
        engine="plain",
        details={
            **task.details,
            "sparse": False,
            "cluster": _shown(lists),
            "environment": _environment(config),
            "self_address": own,
            "is_chief": is_chief,
            "num_workers": counts.get("worker", 0),
            "num_ps": counts.get("ps", 0),
            "num_evaluators": counts.get("evaluator", 0),
            # The operator lists evaluators in the cluster; TF wants them outside of the collective.
            "nodes_in_training": nodes - counts.get("evaluator", 0),
        },
    )


def _sparse(cluster: JsonView, task: _Task, details: dict[str, Json]) -> Job:
    workers = {key: str(entry.address()) for key, entry in _entries(cluster.get("worker"))}
    servers = _servers(cluster.get("ps"))
    own = _own_sparse_address(cluster, workers, servers, task)
    return Job(
        role=task.type,
        is_coordinator=task.type in _CHIEFS and task.index == 0,
        engine="plain",
        details={
            **task.details,
            **details,
            "sparse": True,
            "workers_known": workers,
            "ps_known": servers,
            "self_address": own,
        },
    )


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


def _read_mxnet(source: Source) -> Job:
    """Read MX_CONFIG, and check that DMLC_* says the same."""
    config = JsonView.of(source, "MX_CONFIG", "cluster")
    task = _Task.of(config)
    cluster = config.get("cluster")
    lists = {key: tuple(_address(item) for item in entry.list()) for key, entry in cluster.items()}
    own = _own_address(cluster, lists, task)
    _check_role(source, task)
    nodes = sum(map(len, lists.values()))
    return Job(
        role=task.type,
        nodes=NodeRange(nodes, nodes) if nodes else None,
        coordinator=_root(source),
        is_coordinator=task.type == "scheduler" and task.index == 0,
        members=_members(lists),
        engine="plain",
        details={
            **task.details,
            "self_address": own,
            "cluster": _shown(lists),
            "num_workers": source.count("DMLC_NUM_WORKER", "num_workers", least=0, default=None),
            "num_servers": source.count("DMLC_NUM_SERVER", "num_servers", least=0, default=None),
        },
    )


def _address(item: JsonView) -> Endpoint:
    return Endpoint(item.get("url").host(), item.get("port").port())


def _check_role(source: Source, task: _Task) -> None:
    role = source.text("DMLC_ROLE", "role", default=task.type)
    if role != task.type:
        raise source.error("DMLC_ROLE", role, f"the task's type in MX_CONFIG, which is {task.type}")
    worker = source.index("DMLC_WORKER_ID", "task_index", default=task.index)
    if task.type == "worker" and worker != task.index:
        raise source.error("DMLC_WORKER_ID", str(worker), f"the task's index in MX_CONFIG, which is {task.index}")


def _root(source: Source) -> Endpoint | None:
    # Without a scheduler the operator writes "" and 0.
    if source.blank("DMLC_PS_ROOT_URI"):
        return None
    host = source.host("DMLC_PS_ROOT_URI", "master_addr")
    port = source.port("DMLC_PS_ROOT_PORT", "master_port", least=0)
    return Endpoint(host, port) if port else None


TENSORFLOW = Contract("tfjob-v1", Marks(all_of=("TF_CONFIG",)), _read_tensorflow)
MXNET = Contract("mxjob-v1", Marks(all_of=("MX_CONFIG",), shows=("DMLC_ROLE", "DMLC_PS_ROOT_URI")), _read_mxnet)
