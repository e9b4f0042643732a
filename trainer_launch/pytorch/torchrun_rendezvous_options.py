"""What a plain torchrun was told about our rendezvous: its options, `--rdzv-conf`, and PET_NODE_RANK. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from msgspec import Struct

from trainer_launch.model import Endpoint, NodeRange, PortRange, Seats, value_parsers
from trainer_launch.model.errors import UsageError
from trainer_launch.model.suggestions import did_you_mean

T = TypeVar("T")
PORT = 29400  # torch's own for an endpoint without a port
ANY_PORT = Endpoint("127.0.0.1", 0)  # one node meets nobody else, whatever the endpoint says
OURS = ("node_rank", "is_host", "patience", "max_restarts", "secret_file", "ports", "host", "seats", "spares")
# torch adds some of these itself, and users keep them from another backend.
TORCHS = (
    "timeout",
    "join_timeout",
    "last_call_timeout",
    "close_timeout",
    "keep_alive_interval",
    "heartbeat_timeout",
)
_TORCHS_TOO = ("keep_alive_max_attempt", "read_timeout", "store_type", "local_addr", "rank")
_BOOLEANS = {"1": True, "true": True, "t": True, "yes": True, "0": False, "false": False, "f": False, "no": False}
_MOST_S = 10**8
_PATIENCE_S = 600


class Conf(Struct, frozen=True, kw_only=True):
    """Where this node meets the others, and what it is among them."""

    endpoint: Endpoint
    nodes: NodeRange
    run_id: str
    node_rank: int | None  # None: nodes are ordered by host name
    is_host: bool | None  # whether it hosts the coordinator; None: whoever the endpoint names
    patience_s: float  # how long a lost node or the coordinator is waited for
    max_restarts: int | None  # failures of the whole job; None: torch's own count of each node is all there is
    secret_file: str | None
    ports: PortRange | None  # what the nodes' stores may use, None: any
    host: str | None = None  # the node's own name, None: the machine's
    seats: Seats | None = None  # where each node's coordinator is, None: only node 0 has one


def read(endpoint: str, nodes: NodeRange, run_id: str, conf: Mapping[str, Any], env: Mapping[str, str]) -> Conf:
    """Read it all.

    Raises:
        UsageError: a value does not fit, or a name is unknown.
    """
    for name in conf:
        if name not in (*OURS, *TORCHS, *_TORCHS_TOO):
            advice = did_you_mean(name, OURS) or f"expected one of {', '.join(OURS)}"
            raise UsageError(f"unknown key {name!r} in --rdzv-conf of the backend trainer-launch; {advice}")
    told = dict(conf)
    hosts = _value(told, "is_host", lambda v: _BOOLEANS.get(v.lower()), "true or false")
    alone = nodes.max == 1 and hosts is not False  # else the launcher hosts the coordinator, for one node too
    if "node_rank" not in told and env.get("PET_NODE_RANK", "").strip():
        told["node_rank"] = env["PET_NODE_RANK"]
    rank = _value(told, "node_rank", _count, "a number from 0")
    spares = _value(told, "spares", _count, "a number") or 0
    if rank is not None and nodes.fixed is not None and rank >= nodes.max + spares:
        raise UsageError(f"node_rank is {rank} but --nnodes is {nodes}; expected a rank from 0 to {nodes.max - 1}")
    patience = _value(told, "patience", lambda v: value_parsers.parse_number(v, 0, _MOST_S), "whole seconds")
    home = ANY_PORT if alone else _endpoint(endpoint)
    return Conf(
        endpoint=home,
        nodes=nodes,
        run_id=run_id,
        node_rank=0 if alone else rank,
        is_host=True if alone else hosts,
        patience_s=_PATIENCE_S if patience is None else patience,
        max_restarts=_value(told, "max_restarts", _count, "a number from 0"),
        secret_file=_value(told, "secret_file", value_parsers.parse_path, "the absolute path of a file"),
        ports=_value(told, "ports", value_parsers.parse_port_range, "LOW-HIGH, two ports from 1 to 65535"),
        host=_value(told, "host", lambda v: v.strip() or None, "this node's name"),
        seats=_value(told, "seats", lambda v: _seats(v, home), "NAME-#/OFFSET/COUNT, as the launcher writes it"),
    )


def is_host(conf: Conf, own_names: frozenset[str], is_here: Callable[[str], bool]) -> bool:
    """Whether this node hosts the coordinator; `is_here` tells whether all addresses of a name are this machine's.

    torch's own guess takes any address in common for proof, and so is wrong behind a name of many pods.
    """
    if conf.is_host is not None:
        return conf.is_host
    if conf.node_rank is not None:
        return conf.node_rank == 0
    host = conf.endpoint.host
    return conf.endpoint.is_loopback or host in own_names or host.partition(".")[0] in own_names or is_here(host)


def _endpoint(text: str) -> Endpoint:
    if not text.strip():
        raise UsageError("--rdzv-endpoint is missing; expected HOST:PORT of the node that hosts the coordinator")
    parsed = value_parsers.parse_endpoint(text, PORT, least_port=1)
    if parsed is None:
        raise UsageError(
            f"--rdzv-endpoint is {value_parsers.shown(text)}; expected HOST:PORT, the same on every node"
        )
    return parsed


def _seats(text: str, home: Endpoint) -> Seats | None:
    pattern, _, numbers = text.partition("/")
    offset, _, count = numbers.partition("/")
    size = value_parsers.parse_number(count, 1, value_parsers.MAX_COUNT)
    if "#" not in pattern or offset not in ("0", "-1") or size is None:
        return None
    return Seats(home, pattern, int(offset), size)


def _count(text: str) -> int | None:
    return value_parsers.parse_number(text, 0, value_parsers.MAX_COUNT)


def _value(told: Mapping[str, Any], name: str, parse: Callable[[str], T | None], expected: str) -> T | None:
    if name not in told:
        return None
    text = str(told[name])
    parsed = parse(text)
    if parsed is None:
        raise UsageError(f"{name} of --rdzv-conf is {value_parsers.shown(text)}; expected {expected}")
    return parsed
