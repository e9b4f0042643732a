"""What others than this job's running nodes ask a coordinator: messages as those in protocol.py."""

from __future__ import annotations

from typing import TypeAlias

from trainer_launch.model.frozen import dataclass

ASKING = "status"  # stands for the incarnation of who only asks
Row: TypeAlias = "tuple[int | None, str, str, float | None]"


@dataclass(frozen=True, slots=True)
class StatusQuery:
    """In place of a Hello: how does the job stand? A Status is the answer, and the end of the connection."""

    version: int
    job: str
    proof: str | None = None  # see prove(), with ASKING as the incarnation


@dataclass(frozen=True, slots=True)
class Time:
    """What time is it at node 0? The first words of a node in preflight; a coordinator answers with Refused."""

    sent: float


@dataclass(frozen=True, slots=True)
class Status:
    """How the job stands."""

    phase: str
    generation: int
    restarts: int
    max_restarts: int
    min_nodes: int
    max_nodes: int
    n_nodes: int  # all that are known; `nodes` are as many of them as fit, above all the absent
    nodes: tuple[Row, ...]  # node rank, host, state, seconds since it was lost
    progress: float | None  # of rank 0
    progress_age_s: float | None
    end: str | None  # why the job is over
