"""TFJob of the v1 operator: TF_CONFIG, full or sparse (enableDynamicWorker). A job of one replica has none."""

from __future__ import annotations

from trainer_launch.contracts.json_view import JsonView
from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Endpoint, Job, Json, Member, NodeRange
from trainer_launch.model.frozen import dataclass

NAME = "tfjob-v1"
MARKS = Marks(all_of=("TF_CONFIG",))

_LEGACY = "sparseCluster"  # the key up to 1.6
_CHIEFS = ("chief", "master")


@dataclass(frozen=True, slots=True)
class _Task:
    type: str
    index: int


def read(source: Source) -> Job:
    """Read TF_CONFIG in whichever form it has."""
    config = JsonView.of(source, "TF_CONFIG", "cluster")
    task = _Task(config.get("task").get("type").word(), config.get("task").get("index").index())
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
    own = _own_address(cluster, lists, task)
    counts = {kind: len(addresses) for kind, addresses in lists.items()}
    nodes = sum(counts.values())
    chief = next((lists[kind][0] for kind in (*_CHIEFS, "worker") if lists.get(kind)), None)
    has_chief = any(counts.get(kind) for kind in _CHIEFS)
    leads = task.type in _CHIEFS or (task.type == "worker" and not has_chief)
    is_chief = leads and task.index == 0
    return Job(
        contract=NAME,
        role=task.type,
        nodes=NodeRange(nodes, nodes) if nodes else None,
        coordinator=chief,
        is_coordinator=is_chief,
        members=tuple(Member(address.host) for addresses in lists.values() for address in addresses),
        engine="plain",
        details={
            **_task_details(task),
            "sparse": False,
            "cluster": {kind: tuple(map(str, addresses)) for kind, addresses in lists.items()},
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


def _own_address(cluster: JsonView, lists: dict[str, tuple[Endpoint, ...]], task: _Task) -> str | None:
    if task.type == "evaluator" and task.type not in lists:  # TF's own convention
        return None
    if task.type not in lists:
        raise cluster.error(f"a list under {task.type}, which is this task's type")
    addresses = lists[task.type]
    if task.index >= len(addresses):
        raise cluster.get(task.type).error(f"more than {task.index} addresses, because task.index is {task.index}")
    return str(addresses[task.index])


def _sparse(cluster: JsonView, task: _Task, details: dict[str, Json]) -> Job:
    workers = {key: str(entry.address()) for key, entry in _entries(cluster.get("worker"))}
    servers = _servers(cluster.get("ps"))
    own = _own_sparse_address(cluster, workers, servers, task)
    return Job(
        contract=NAME,
        role=task.type,
        is_coordinator=task.type in _CHIEFS and task.index == 0,
        engine="plain",
        details={
            **_task_details(task),
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


def _task_details(task: _Task) -> dict[str, Json]:
    return {"task_type": task.type, "task_index": task.index}


def _environment(config: JsonView) -> str | None:
    environment = config.get("environment")
    return None if environment.value is None else environment.word()
