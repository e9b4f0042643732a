"""The two trees along which NCCL reduces between nodes, and rounds in which all of their edges are tested. Pure.

After src/graph/trees.cc of NCCL: in the first tree node 0 is the root and odd nodes are leaves; the second one is
its mirror image, or with an odd number of nodes it is shifted by one, so that who is a leaf in one works in the
other. A leaf's parent is its neighbour on the ring, so what is left to test beside the ring is a forest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

Edge = tuple[int, int]  # the lower number first


def double_tree(n_nodes: int) -> frozenset[Edge]:
    """The edges of both trees of nodes 0 to `n_nodes` - 1."""
    parents = [_parent(node, n_nodes) for node in range(1, n_nodes)]
    first = [(node, parent) for node, parent in enumerate(parents, 1)]
    if n_nodes % 2:
        second = [((node + 1) % n_nodes, (parent + 1) % n_nodes) for node, parent in first]
    else:
        second = [(n_nodes - 1 - node, n_nodes - 1 - parent) for node, parent in first]
    return frozenset((min(edge), max(edge)) for edge in (*first, *second))


def _parent(node: int, n_nodes: int) -> int:
    """Of any node but 0: the lowest bit that is set goes one up, or away where that leads too far."""
    bit = node & -node
    parent = (node ^ bit) | (bit << 1)
    return parent if parent < n_nodes else node ^ bit


def rounds(n_nodes: int) -> list[tuple[Edge, ...]]:
    """Both trees' edges but those of the ring, each node once in a round: three rounds."""
    left = [(one, other) for one, other in double_tree(n_nodes) if other - one not in (1, n_nodes - 1)]
    used: defaultdict[int, set[int]] = defaultdict(set)  # rounds by node
    found: defaultdict[int, list[Edge]] = defaultdict(list)
    for edge in _from_the_roots(left):
        taken = used[edge[0]] | used[edge[1]]
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        found[number].append(edge)
        for node in edge:
            used[node].add(number)
    return [tuple(sorted(found[number])) for number in sorted(found)]


def _from_the_roots(edges: Iterable[Edge]) -> Iterator[Edge]:
    """In an order in which one end of each edge is new: then no more rounds are needed than a node has edges."""
    neighbours: defaultdict[int, list[int]] = defaultdict(list)
    for one, other in sorted(edges):
        neighbours[one].append(other)
        neighbours[other].append(one)
    seen: set[int] = set()
    for root in sorted(neighbours):
        waiting = [] if root in seen else [root]
        seen.add(root)
        for node in waiting:
            for other in neighbours[node]:
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
                    yield (node, other) if node < other else (other, node)
