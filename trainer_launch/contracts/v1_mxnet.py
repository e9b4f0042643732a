"""MXJob of the v1 operator up to 1.8: MX_CONFIG and the DMLC_* variables of MXNet's parameter servers."""

from __future__ import annotations

from trainer_launch.contracts.json_view import JsonView
from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Endpoint, Job, Json, Member, NodeRange

NAME = "mxjob-v1"
MARKS = Marks(all_of=("MX_CONFIG",), shows=("DMLC_ROLE", "DMLC_PS_ROOT_URI"))


def read(source: Source) -> Job:
    """Read MX_CONFIG, and check that DMLC_* says the same."""
    config = JsonView.of(source, "MX_CONFIG", "cluster")
    kind = config.get("task").get("type").word()
    index = config.get("task").get("index").index()
    cluster = config.get("cluster")
    lists = {key: tuple(_address(item) for item in entry.list()) for key, entry in cluster.items()}
    own = _own_address(cluster, lists, kind, index)
    _check_role(source, kind, index)
    nodes = sum(map(len, lists.values()))
    return Job(
        contract=NAME,
        role=kind,
        nodes=NodeRange(nodes, nodes) if nodes else None,
        coordinator=_root(source),
        is_coordinator=kind == "scheduler" and index == 0,
        members=tuple(Member(address.host) for addresses in lists.values() for address in addresses),
        engine="plain",
        details={
            "task_type": kind,
            "task_index": index,
            "self_address": own,
            "cluster": _shown_cluster(lists),
            "num_workers": source.count("DMLC_NUM_WORKER", "num_workers", least=0, default=None),
            "num_servers": source.count("DMLC_NUM_SERVER", "num_servers", least=0, default=None),
        },
    )


def _address(item: JsonView) -> Endpoint:
    return Endpoint(item.get("url").host(), item.get("port").port())


def _own_address(cluster: JsonView, lists: dict[str, tuple[Endpoint, ...]], kind: str, index: int) -> str:
    if kind not in lists:
        raise cluster.error(f"a list under {kind}, which is this task's type")
    if index >= len(lists[kind]):
        raise cluster.get(kind).error(f"more than {index} addresses, because task.index is {index}")
    return str(lists[kind][index])


def _check_role(source: Source, kind: str, index: int) -> None:
    role = source.text("DMLC_ROLE", "role", default=kind)
    if role != kind:
        raise source.error("DMLC_ROLE", role, f"the task's type in MX_CONFIG, which is {kind}")
    worker = source.index("DMLC_WORKER_ID", "task_index", default=index)
    if kind == "worker" and worker != index:
        raise source.error("DMLC_WORKER_ID", str(worker), f"the task's index in MX_CONFIG, which is {index}")


def _root(source: Source) -> Endpoint | None:
    # Without a scheduler the operator writes "" and 0.
    if source.blank("DMLC_PS_ROOT_URI"):
        return None
    host = source.host("DMLC_PS_ROOT_URI", "master_addr")
    port = source.port("DMLC_PS_ROOT_PORT", "master_port", least=0)
    return Endpoint(host, port) if port else None


def _shown_cluster(lists: dict[str, tuple[Endpoint, ...]]) -> dict[str, Json]:
    return {kind: tuple(map(str, addresses)) for kind, addresses in lists.items()}
