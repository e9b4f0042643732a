"""The messages between a node and the coordinator: one JSON object per line, checked before it becomes a value.

The server's first line is a Challenge, the client's first is a Hello; all else may come at any time.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TypeAlias

from trainer_launch.membership.field_checks import (
    MAX_NODES,
    Claim,
    amount,
    claim,
    claims,
    flag,
    name,
    number,
    optional,
    ranks,
    real,
    role,
    rows,
    seconds,
    text,
    texts,
)
from trainer_launch.membership.field_checks import MAX_RANKS as MAX_RANKS
from trainer_launch.membership.json_lines import MAX_LINE_BYTES as MAX_LINE_BYTES
from trainer_launch.membership.json_lines import ProtocolError as ProtocolError
from trainer_launch.membership.json_lines import Vocabulary
from trainer_launch.model.frozen import dataclass

# -- messages of status ------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------


VERSION = 4
_MAX_SEEN = 2**31  # what a client may say it has seen, so that there are always numbers above it
_MAX_NUMBER = 2**53  # exact in every JSON reader


# -- from a node ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Who is calling. A node that has been in the job before says what it has seen, should the server be new."""

    version: int
    job: str
    node_rank: int | None  # None: ordered by host name
    host: str
    incarnation: str  # differs for every process that calls
    generation: int = 0  # the highest that it has seen
    restarts: int = 0  # likewise
    proof: str | None = None  # see prove()
    claims: tuple[Claim, ...] = ()  # the generations that it may still have a say about
    workers: int = 0  # on this node; 0: torch's own agents settle ranks among themselves
    role: str = ""  # of these workers, as in torchrun


@dataclass(frozen=True, slots=True)
class Join:
    """This node has no workers running and is ready for a generation above `generation`."""

    incarnation: str
    generation: int = 0  # the last one that it was in; a Join that is overtaken by a newer one means nothing
    finished: tuple[int, ...] = ()  # ranks that had ended with exit code 0 before that one was over
    failed: bool = False  # whether a worker had failed for a reason of its own


@dataclass(frozen=True, slots=True)
class Renew:
    """Still here."""


@dataclass(frozen=True, slots=True)
class Took:
    """This node has heard of the generation, and will say so wherever it goes."""

    generation: int


@dataclass(frozen=True, slots=True)
class Store:
    """Group rank 0 has opened the generation's store."""

    generation: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker of this node failed, and no other node's loss was known here."""

    generation: int
    rank: int | None
    exit_code: int | None
    signal: int | None
    message: str = ""
    error: str | None = None  # the type of the exception that ended it
    lost_peer: bool = False  # whether all that failed on this node say that the connection to a peer was closed
    finished: tuple[int, ...] = ()  # ranks that had ended with exit code 0 before


@dataclass(frozen=True, slots=True)
class Leave:
    """This node goes on purpose."""

    reason: str


@dataclass(frozen=True, slots=True)
class Quit:
    """This node's agent has ended the job: torchrun's own restarts are spent, and it does not come back."""

    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """All workers of this node have succeeded."""

    generation: int


# -- from the server --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Challenge:
    """The first line: what a proof must contain, or "" when there is no secret."""

    nonce: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """The Hello was good; a node that says nothing for `lease_s` counts as lost."""

    lease_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Not in this job; `retry` tells whether that may change."""

    reason: str
    retry: bool


@dataclass(frozen=True, slots=True)
class Waiting:
    """Who is missing before the next generation; nobody, for a spare."""

    present: int
    wanted: int
    missing: tuple[str, ...]  # the first few by name


@dataclass(frozen=True, slots=True)
class Formed:
    """A generation: this node is `group_rank` of `size`. Its store host answers with Store."""

    generation: int
    group_rank: int
    size: int
    restarts: int  # failures of the job so far
    is_store_host: bool
    claim: Claim | None = None  # answered with Took; None: nobody but this coordinator ever forms a generation
    first_rank: int = 0  # of this node's workers
    world_size: int = 0  # workers of all nodes; 0: a node has not said how many it has
    first_role_rank: int = 0  # of this node's workers, among the workers of its role
    role_world_size: int = 0


@dataclass(frozen=True, slots=True)
class Go:
    """The generation's store is open there: start the workers."""

    generation: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Restart:
    """That generation is over: stop its workers and join again."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job is over and has failed; the rest names the first failure of its last generation, if there was one."""

    reason: str
    node: str | None = None
    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    message: str | None = None
    cause: str | None = None  # the exit reason for all nodes, where the failure has one of its own


@dataclass(frozen=True, slots=True)
class Finished:
    """All nodes are done."""


FromNode: TypeAlias = Hello | Join | Renew | Took | Store | Failed | Leave | Quit | Done | StatusQuery | Time
FromServer: TypeAlias = Challenge | Welcome | Refused | Waiting | Formed | Go | Restart | GiveUp | Finished | Status
Message: TypeAlias = FromNode | FromServer


def prove(secret: bytes, nonce: str, job: str, incarnation: str) -> str:
    """What a client that knows the secret answers to a challenge."""
    # Who is no server of ours may send anything.
    text = f"{nonce}\n{job}\n{incarnation}".encode(errors="replace")
    return hmac.new(secret, text, hashlib.sha256).hexdigest()


def render(message: Message) -> bytes:
    """Write a message as its line; free text that is too long is cut."""
    return _VOCABULARY.render(message)


def parse(line: bytes) -> Message:
    """Read a line, with or without its newline."""
    return _VOCABULARY.make(*_VOCABULARY.read(line))  # type: ignore[no-any-return]


_SEEN, _COUNT, _GENERATION = number(_MAX_SEEN), number(MAX_NODES + 1), number(_MAX_NUMBER)
_WORKERS, _RANKS = number(MAX_RANKS + 1), number(MAX_NODES * MAX_RANKS + 1)
_PORT, _CODE, _RANK = number(65536, 1), optional(number(2**32, -(2**31))), optional(number(2**31))
_VOCABULARY = Vocabulary(
    {
        Hello: {"version": _COUNT, "job": name, "node_rank": optional(number(MAX_NODES)), "host": name}
        | {"incarnation": name, "generation": _SEEN, "restarts": _SEEN, "proof": optional(text), "claims": claims}
        | {"workers": _WORKERS, "role": role},
        Join: {"incarnation": name, "generation": _GENERATION, "finished": ranks, "failed": flag},
        Renew: {},
        Took: {"generation": _GENERATION},
        Store: {"generation": _GENERATION, "host": name, "port": _PORT},
        Failed: {"generation": _GENERATION, "rank": _RANK, "exit_code": _CODE, "signal": _CODE, "message": text}
        | {"error": optional(text), "lost_peer": flag, "finished": ranks},
        Leave: {"reason": text},
        Quit: {"reason": text},
        Done: {"generation": _GENERATION},
        Challenge: {"nonce": text},
        Welcome: {"lease_s": seconds},
        Refused: {"reason": text, "retry": flag},
        Waiting: {"present": _COUNT, "wanted": _COUNT, "missing": texts},
        Formed: {"generation": _GENERATION, "group_rank": _COUNT, "size": _COUNT, "restarts": _GENERATION}
        | {"is_store_host": flag, "claim": optional(claim)}
        | {"first_rank": _RANKS, "world_size": _RANKS, "first_role_rank": _RANKS, "role_world_size": _RANKS},
        Go: {"generation": _GENERATION, "host": name, "port": _PORT},
        Restart: {"generation": _GENERATION, "reason": text},
        GiveUp: {"reason": text, "node": optional(text), "rank": _RANK, "exit_code": _CODE, "signal": _CODE}
        | {"message": optional(text), "cause": optional(name)},
        Finished: {},
        StatusQuery: {"version": _COUNT, "job": name, "proof": optional(text)},
        Time: {"sent": real},
        Status: {"phase": name, "generation": _GENERATION, "restarts": _GENERATION, "max_restarts": _GENERATION}
        | {"min_nodes": _COUNT, "max_nodes": _COUNT, "n_nodes": _GENERATION, "nodes": rows}
        | {"progress": optional(amount), "progress_age_s": optional(amount), "end": optional(text)},
    },
    free_texts=("reason", "message", "end"),
)
