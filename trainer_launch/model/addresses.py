"""Where things listen: values that model.py has for all."""

from __future__ import annotations

from trainer_launch.model.frozen import dataclass


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports from `low` to `high`, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host name or address, and a port."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine itself can mean anything by it."""
        return self.host in ("localhost", "127.0.0.1", "::1")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Seats:
    """Where each node's launcher listens, in a job that may go on without node 0; `pattern` has # for an index."""

    home: Endpoint  # node 0's
    pattern: str
    offset: int  # from a node's rank to the index in its name
    count: int

    def endpoint(self, rank: int) -> Endpoint:
        """A node's seat."""
        if rank == 0:
            return self.home
        return Endpoint(self.pattern.replace("#", str(rank + self.offset)), self.home.port)
