"""By what means pairs are tested: the fastest that all nodes have, unless one was asked for. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainer_launch.preflight.cluster.protocol import MAX_RAILS

FACT = "pair tests"  # a node's own words, among its facts
SOCKET, GLOO, NCCL = "socket", "gloo", "nccl"
_NCCL = re.compile(r"nccl on (\d{1,4}) GPUs")


@dataclass(frozen=True, slots=True)
class Way:
    """How pairs are tested, and how all nodes together."""

    pairs: str = SOCKET
    rails: int = 1
    whole: str | None = None  # None: nothing can test them together
    trouble: str = ""  # why it is not what was asked for


def told(gloo: bool, gpus: int, why: str) -> str:
    """What a node can do, as its fact."""
    if gpus:
        return f"nccl on {gpus} GPUs"
    return "gloo" if gloo else f"only plain sockets: {why}"


def choose(wanted: str, facts: Sequence[str | None]) -> Way:
    """From what all nodes said of themselves; `wanted` is a way, or auto."""
    gpus = [_gpus(one) for one in facts]
    has_gloo = all(one is not None and (one == GLOO or _NCCL.fullmatch(one)) for one in facts)
    rails = min(*gpus, MAX_RAILS) if gpus else 0
    if rails and wanted in ("auto", NCCL):
        return Way(NCCL, rails, NCCL)
    whole = GLOO if has_gloo else None
    if wanted == GLOO and has_gloo:
        return Way(GLOO, 1, whole)
    trouble = "" if wanted in ("auto", SOCKET) else f"{wanted} was asked for, and not all nodes have it"
    return Way(SOCKET, 1, whole, trouble)


def _gpus(fact: str | None) -> int:
    found = _NCCL.fullmatch(fact or "")
    return int(found[1]) if found is not None else 0
