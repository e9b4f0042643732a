"""Ranks of nodes that have none of their own: who serves the coordinator is node 0, others follow as they come.

A node is known by its host name. While it is away its rank waits for it, unless a new node finds no other free one.
Who comes to a job that is complete gets a rank behind all others, and waits as a spare does.
"""

from __future__ import annotations

from msgspec.structs import replace

from trainer_launch.membership import protocol as msg
from trainer_launch.membership.state import JobState


def with_rank(state: JobState, hello: msg.Hello) -> msg.Hello:
    """The Hello with the node's rank: that which it had before, else its host's, a new one, or a lost node's."""
    if hello.node_rank is not None and not hello.arrives:
        return hello
    hosts, taken = state.hosts, set()
    for rank, node in state.nodes.items():
        is_back = node.incarnation == hello.incarnation or (node.is_away and node.host == hello.host)
        if node.has_lease and not is_back:
            taken.add(rank)
    all_nodes = state.settings.all_nodes
    free = set(range(1, max(all_nodes, 2 + max(taken, default=0)))) - taken

    def order(rank: int) -> tuple[bool | int, ...]:
        return rank != hello.node_rank, hosts.get(rank) != hello.host, rank >= all_nodes, rank in hosts, rank

    return replace(hello, node_rank=min(free, key=order), arrives=True)
