"""What the tests of one GPU found, read from what its child said line by line. Pure."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

from trainer_launch.model.errors import MALFORMED
from trainer_launch.preflight.measurements import Checksum, Measure

_NETWORK = re.compile(r"Using network (\S+)|Assigned NET plugin (\S+) to comm")
_NETS_FOUND = re.compile(r"NET/(\S+)\s*: Using \[")
_MAX_FIGURES = 32


class Ending(Enum):
    """How the child ended."""

    DONE = "done"
    NO_TORCH = "import"  # its Python has no torch
    FAILED = "failed"  # a test failed
    HUNG = "hung"  # it was killed when its time was up
    STUCK = "stuck"  # not even SIGKILL ended it: it is inside the driver
    DIED = "died"  # by itself, and said nothing of it
    NOT_RUN = "not run"


def _nothing() -> Mapping[str, str]:
    return MappingProxyType({})


PEERS = "peers"  # the stage in which GPUs need each other


@dataclass(frozen=True, slots=True)
class Peers:
    """What all GPUs of a node did together, as one of them saw it."""

    size: int
    good: bool  # all sums were right
    rate: float  # of an all-reduce of 1 GiB, as bus bandwidth in GB/s
    why: str  # it did not come to that


@dataclass(frozen=True, slots=True, kw_only=True)
class Benched:
    """One GPU's tests."""

    gpu: int
    uuid: str = ""
    ending: Ending = Ending.NOT_RUN
    why: str = ""
    stage: str = ""  # the last one that was begun
    stages: tuple[tuple[str, float], ...] = ()  # all of them, and when each was begun, in seconds
    facts: Mapping[str, str] = field(default_factory=_nothing)  # torch, cuda, nccl, cublas, model ...
    figures: tuple[tuple[str, float, str], ...] = ()  # name, value, unit
    checksum: str = ""
    repeats: int = 0
    different: int = 0  # of the repeats: those that did not come out as the first
    tested_bytes: int = 0  # of memory, with patterns
    wrong_words: int = 0
    sums_right: bool = True  # of the collective
    lines: tuple[str, ...] = ()  # of NCCL's own log
    peers: Peers | None = None  # how it did together with the node's other GPUs

    @property
    def network(self) -> str:
        """What NCCL says that it uses between nodes, such as IB or Socket; empty: it did not say."""
        return network(self.lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How the parent saw the child end."""

    status: int | None  # None: it has not ended
    timed_out: bool
    limit_s: float


def benched(gpu: int, uuid: str, said: bytes, seen: Limits) -> Benched:
    """Put together what a child said and how it ended; a line that cannot be read is none."""
    made = Benched(gpu=gpu, uuid=uuid)
    for line in said.splitlines():
        with contextlib.suppress(*MALFORMED):
            made = _with(made, json.loads(line))
    if made.ending is not Ending.NOT_RUN:
        return made
    at = f"at {made.stage!r}" if made.stage else "at its start"
    if seen.status is None:
        why = f"its test hangs {at}, and not even SIGKILL ends it: it is stuck inside the driver"
        return replace(made, ending=Ending.STUCK, why=why)
    if seen.timed_out:
        return replace(made, ending=Ending.HUNG, why=f"its test hung {at}, and was killed after {seen.limit_s:g} s")
    how = f"signal {-seen.status}" if seen.status < 0 else f"exit code {seen.status}"
    return replace(made, ending=Ending.DIED, why=f"its test died {at} ({how})")


def _with(made: Benched, told: Any) -> Benched:
    """A line more."""
    if "stage" in told:
        stage, at_s = str(told["stage"])[:60], float(told.get("at", 0.0))
        return replace(made, stage=stage, stages=(*made.stages, (stage, at_s)))
    if "facts" in told:
        facts = {str(name)[:60]: str(value)[:300] for name, value in told["facts"].items()}
        return replace(made, facts=MappingProxyType(facts), uuid=made.uuid or facts.get("uuid", ""))
    if "measure" in told:
        name, value, unit = told["measure"]
        if len(made.figures) == _MAX_FIGURES:
            return made
        return replace(made, figures=(*made.figures, (str(name), float(value), str(unit))))
    if "checksum" in told:
        repeats, different = int(told["repeats"]), int(told["different"])
        return replace(made, checksum=str(told["checksum"])[:64], repeats=repeats, different=different)
    if "patterns" in told:
        found = told["patterns"]
        return replace(made, tested_bytes=int(found["bytes"]), wrong_words=int(found["wrong"]))
    if "collective" in told:
        lines = tuple(str(line)[:300] for line in told["lines"][:100])
        return replace(made, sums_right=bool(told["collective"]["good"]), lines=lines)
    if "peers" in told:
        found = told["peers"]
        rate, why = float(found["rate"]), str(found["why"])[:300]
        return replace(made, peers=Peers(int(found["size"]), bool(found["good"]), rate, why))
    if "error" in told:
        ending = Ending.NO_TORCH if told["kind"] == "import" else Ending.FAILED
        return replace(made, ending=ending, why=str(told["error"])[:600])
    return replace(made, ending=Ending.DONE) if told.get("done") else made


def network(lines: Sequence[str]) -> str:
    """From the log: what was chosen, or else what was found."""
    chosen = [found[1] or found[2] for found in map(_NETWORK.search, lines) if found]
    found = [match[1] for match in map(_NETS_FOUND.search, lines) if match]
    return (chosen or found or [""])[-1]


def measures(tested: Iterable[Benched]) -> tuple[Measure, ...]:
    """All figures, for the comparison with a reference and with other nodes."""
    return tuple(
        Measure(name, value, unit, one.facts.get("model", ""), one.gpu)
        for one in tested
        for name, value, unit in one.figures
    )


def checksums(tested: Iterable[Benched], driver: str) -> tuple[Checksum, ...]:
    """Only the same model with the same libraries must come to the same bits."""
    return tuple(
        Checksum(one.gpu, one.uuid, _kind(one.facts, driver), one.checksum) for one in tested if one.checksum
    )


def _kind(facts: Mapping[str, str], driver: str) -> str:
    words = [facts.get("model", ""), f"driver {driver}"]
    words += [f"{name} {facts.get(name, '')}" for name in ("torch", "cuda", "cublas")]
    return ", ".join(words)[:120]
