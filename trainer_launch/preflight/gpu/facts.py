"""What is known of GPUs, read from what children said. A fact that is not told is no fault of a card. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from trainer_launch.model.errors import MALFORMED

MAX_GPUS = 64


class State(Enum):
    """How well a fact is known."""

    KNOWN = "known"
    UNSUPPORTED = "unsupported"  # this card has no such thing
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that was asked for."""

    state: State
    value: Any = None
    why: str = ""  # it is unknown

    @property
    def is_known(self) -> bool:
        """Whether there is a value."""
        return self.state is State.KNOWN


_NOT_TOLD = Fact(State.UNKNOWN, why="it was not told")


def _no_facts() -> Mapping[str, Fact]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVIDIA's library sees it."""

    index: int
    lost: str = ""  # what the driver says of a GPU that is gone, or must be reset
    facts: Mapping[str, Fact] = field(default_factory=_no_facts)

    def fact(self, name: str) -> Fact:
        """A fact, known or not."""
        return self.facts.get(name, _NOT_TOLD)

    def value(self, name: str, default: Any = None) -> Any:
        """A fact's value where it is known."""
        found = self.fact(name)
        return found.value if found.is_known else default

    @property
    def label(self) -> str:
        """For people."""
        return f"GPU {self.index}"

    @property
    def uuid(self) -> str:
        """Which card it is, wherever it is put; empty where it is not told."""
        return str(self.value("uuid", ""))

    @property
    def model(self) -> str:
        """As in NVIDIA H200; empty where it is not told."""
        return str(self.value("name", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All GPUs of this container, or why nothing is known of them."""

    trouble: str = ""
    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    log: Fact = _NOT_TOLD  # XID errors of the last two hours: place on the bus, number, seconds ago


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """One GPU while it was under load; each fact has the least, the most, and by how much it grew."""

    index: int
    busy: int = 0  # how often it was looked at while it was not idle
    xids: Fact = _NOT_TOLD
    reasons: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))  # bits, how often seen
    facts: Mapping[str, Fact] = field(default_factory=_no_facts)

    def _of(self, name: str, number: int) -> float | None:
        found = self.facts.get(name, _NOT_TOLD)
        return found.value[number] if found.is_known else None

    def least(self, name: str) -> float | None:
        """The least value that was seen."""
        return self._of(name, 0)

    def most(self, name: str) -> float | None:
        """The greatest value that was seen."""
        return self._of(name, 1)

    def growth(self, name: str) -> float | None:
        """By how much a counter grew."""
        return self._of(name, 2)


def facts_of(said: bytes) -> Facts:
    """What preflight/children/gpu_facts.py printed."""
    try:
        told = json.loads(said)
        if told["trouble"]:
            return Facts(trouble=str(told["trouble"])[:300])
        return Facts(
            driver=str(_fact(told["driver"]).value or ""),
            gpus=tuple(_gpu(one) for one in told["gpus"][:MAX_GPUS]),
            log=_fact(told["log"]),
        )
    except MALFORMED:
        return Facts(trouble="what was said of the GPUs cannot be read")


def watched_of(said: bytes) -> tuple[str, Mapping[int, Watched]]:
    """What preflight/children/gpu_watch.py printed: the trouble, or the GPUs by their numbers."""
    try:
        told = json.loads(said)
        if told["trouble"]:
            return str(told["trouble"])[:300], {}
        return "", {made.index: made for made in map(_watched, told["gpus"][:MAX_GPUS])}
    except MALFORMED:
        return "what was seen under load cannot be read", {}


def visible(gpus: Sequence[Gpu], shown: str | None) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES shows: by number, by the beginning of a UUID, or all."""
    if shown is None or "MIG-" in shown:
        return tuple(gpus)
    words = [word.strip() for word in shown.split(",")]
    return tuple(gpu for gpu in gpus if any(w == str(gpu.index) or (w and gpu.uuid.startswith(w)) for w in words))


def numbered(indices: Sequence[int]) -> str:
    """`GPU 3`, or `GPUs 0-3, 7`."""
    parts: list[list[int]] = []
    for index in sorted(indices):
        if parts and parts[-1][-1] == index - 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    told = ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
    return f"GPU{'s' if len(indices) > 1 else ''} {told}"


def _gpu(told: Any) -> Gpu:
    return Gpu(
        index=int(told["index"]),
        lost=str(told["lost"])[:300],
        facts=MappingProxyType({str(name): _fact(one) for name, one in told["facts"].items()}),
    )


def _watched(told: Any) -> Watched:
    return Watched(
        index=int(told["index"]),
        busy=int(told["busy"]),
        xids=_fact(told["xids"]),
        reasons=MappingProxyType({int(bit): int(count) for bit, count in told["reasons"].items()}),
        facts=MappingProxyType({str(name): _fact(one) for name, one in told["facts"].items()}),
    )


def _fact(told: Any) -> Fact:
    state, *rest = told
    if state == State.KNOWN.value:
        return Fact(State.KNOWN, rest[0])
    return Fact(State(state), why=str(rest[0])[:300] if rest else "")
