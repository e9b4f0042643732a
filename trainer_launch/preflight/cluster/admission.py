"""Who is a node of this job, who is not, and who is missing. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from trainer_launch.membership.protocol import Hello
from trainer_launch.model import Endpoint
from trainer_launch.preflight.cluster import protocol as msg
from trainer_launch.preflight.cluster.nodes import Key, Names, Node, Settings

# For who looks for a coordinator.
NOT_YET = msg.Refused("node 0 is still in preflight; its coordinator starts afterwards", retry=True)


def refusal(said: msg.Present, key: Key, settings: Settings) -> msg.Refused | None:
    """Why a node is turned away for good, if it is."""
    if said.version != msg.VERSION:
        return msg.Refused(f"node 0 uses protocol version {msg.VERSION}, this node {said.version}", retry=False)
    if said.job != settings.job:
        return _another_job(said.job, settings)
    if isinstance(key, int) and key >= settings.max_nodes:
        last = settings.max_nodes - 1
        return msg.Refused(f"node rank {key} is invalid: this job has nodes 0 to {last}", retry=False)
    return None


def not_now(said: Hello, settings: Settings) -> msg.Refused:
    """What a node is told that looks for a coordinator: its job runs already, or it is of another one."""
    if said.job != settings.job:
        return _another_job(said.job, settings)
    return NOT_YET


def _another_job(name: str, settings: Settings) -> msg.Refused:
    return msg.Refused(f"this is the preflight of job {settings.job}, not {name}", retry=False)


def missing(nodes: Mapping[Key, Node], min_nodes: int) -> list[Key]:
    """Ranks that are not there; where nothing tells ranks, only those that came and went."""
    gone: list[Key] = [key for key, node in nodes.items() if node.peer is None]
    if any(isinstance(key, str) for key in nodes):
        return sorted(gone, key=str)
    return [rank for rank in range(min_nodes) if rank not in nodes or nodes[rank].peer is None]


def place(key: Key, nodes: Mapping[Key, Node], names: Names) -> Endpoint | None:
    """Where to look for a node: where it was, or should be."""
    if key in nodes:
        return Endpoint(nodes[key].address, nodes[key].port)
    return names.place(key) if isinstance(key, int) else None


def order(node: Node) -> tuple[int, str]:
    """Nodes are numbered in this order."""
    return (node.key, "") if isinstance(node.key, int) else (0, node.key)
