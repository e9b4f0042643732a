"""What the nodes of a job are called, as far as this node can know. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer_launch.model import Endpoint, Job, Topology

_FIRST = re.compile(r"(?P<stem>[^.]*-)0")  # the first of some hosts with an index each


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Host names by node rank; `pattern` has # for an index."""

    home: Endpoint  # node 0's
    members: tuple[str, ...] = ()
    pattern: str | None = None
    offset: int = 0  # from a node's rank to the index in its name

    def place(self, rank: int) -> Endpoint | None:
        """Where a node should be found, None when nothing tells."""
        if rank == 0:
            return self.home
        if rank < len(self.members):
            return Endpoint(self.members[rank], self.home.port)
        if self.pattern is None:
            return None
        return Endpoint(self.pattern.replace("#", str(rank + self.offset)), self.home.port)


def names_of(job: Job, topology: Topology, home: Endpoint, hostname: str) -> Names:
    """From the contract's members, else from node 0's name and this one's, when they differ in an index alone."""
    members = tuple(member.host for member in job.members or ())
    if members:
        return Names(home=home, members=members)
    label, dot, domain = home.host.partition(".")
    first = _FIRST.fullmatch(label)
    own_rank = topology.node_rank
    if first is None or own_rank is None:
        return Names(home=home)
    stem, offset = first["stem"], 0
    if stem.endswith("-master-"):  # PyTorchJob calls its other nodes worker-0, worker-1 ...
        stem, offset = f"{stem.removesuffix('-master-')}-worker-", -1
    names = Names(home=home, pattern=f"{stem}#{dot}{domain}", offset=offset)
    own = names.place(own_rank)
    fits = own is not None and own.host.partition(".")[0] == hostname.partition(".")[0]
    return names if fits else Names(home=home)
