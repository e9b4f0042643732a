"""What is known of GPUs, read from what children said. A fact that is not told is no fault of a card. Pure."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.host.deadline_subprocess import Ended
from trainer_launch.model.errors import MALFORMED
from trainer_launch.model.findings import Checksum, Fault, Finding, Measure, Scope, Status, Value
from trainer_launch.model.units import in_ranges

MAX_GPUS = 64


class State(Enum):
    """How well a fact is known."""

    KNOWN = "known"
    UNSUPPORTED = "unsupported"  # this card has no such thing
    UNKNOWN = "unknown"


class Fact(Struct, frozen=True):
    """One thing that was asked for."""

    state: State
    value: Any = None
    why: str = ""  # it is unknown

    @property
    def is_known(self) -> bool:
        """Whether there is a value."""
        return self.state is State.KNOWN


_NOT_TOLD = Fact(State.UNKNOWN, why="it was not told")


class Gpu(Struct, frozen=True, kw_only=True):
    """One GPU as NVIDIA's library sees it."""

    index: int
    lost: str = ""  # what the driver says of a GPU that is gone, or must be reset
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def fact(self, name: str) -> Fact:
        """A fact, known or not."""
        return self.facts.get(name, _NOT_TOLD)

    def value(self, name: str, default: Any = None) -> Any:
        """A fact's value where it is known."""
        found = self.fact(name)
        return found.value if found.is_known else default

    @property
    def uuid(self) -> str:
        """Which card it is, wherever it is put; empty where it is not told."""
        return str(self.value("uuid", ""))

    @property
    def model(self) -> str:
        """As in NVIDIA H200; empty where it is not told."""
        return str(self.value("name", ""))


class Facts(Struct, frozen=True, kw_only=True):
    """All GPUs of this container, or why nothing is known of them."""

    trouble: str = ""
    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    log: Fact = _NOT_TOLD  # XID errors of the last two hours: place on the bus, number, seconds ago


class Watched(Struct, frozen=True, kw_only=True):
    """One GPU while it was under load; each fact has the least, the most, and by how much it grew."""

    index: int
    busy: int = 0  # how often it was looked at while it was not idle
    xids: Fact = _NOT_TOLD
    reasons: Mapping[int, int] = field(default_factory=dict)  # bits, how often seen
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def fact(self, name: str) -> Fact:
        """A fact, known or not."""
        return self.facts.get(name, _NOT_TOLD)

    def _of(self, name: str, number: int) -> float | None:
        found = self.fact(name)
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
    """What it printed after `watch`: the trouble, or the GPUs by their numbers."""
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
    return f"GPU{'s' if len(indices) > 1 else ''} {in_ranges(indices, ', ')}"


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


# -- what the tests of one GPU found -----------------------------------------------------------


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


PEERS = "peers"  # the stage in which GPUs need each other


class Peers(Struct, frozen=True):
    """What all GPUs of a node did together, as one of them saw it."""

    size: int
    good: bool  # all sums were right
    rate: float  # of an all-reduce of 1 GiB, as bus bandwidth in GB/s
    why: str  # it did not come to that


class Benched(Struct, frozen=True, kw_only=True):
    """One GPU's tests."""

    gpu: int
    uuid: str = ""
    ending: Ending = Ending.NOT_RUN
    why: str = ""
    stage: str = ""  # the last one that was begun
    facts: Mapping[str, str] = field(default_factory=dict)  # torch, cuda, nccl, cublas, model ...
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


def benched(gpu: int, uuid: str, ended: Ended, limit_s: float) -> Benched:
    """What a child found, by the last of its lines that can be read, and how it ended within `limit_s`."""
    made = Benched(gpu=gpu, uuid=uuid)
    for line in reversed(ended.stdout.splitlines()):
        with contextlib.suppress(*MALFORMED):
            made = _benched(gpu, uuid, json.loads(line))
            break
    if made.ending is not Ending.NOT_RUN:
        return made
    at = f"at {made.stage!r}" if made.stage else "at its start"
    if ended.status is None:
        why = f"its test hangs {at}, and not even SIGKILL ends it: it is stuck inside the driver"
        return replace(made, ending=Ending.STUCK, why=why)
    if ended.timed_out:
        return replace(made, ending=Ending.HUNG, why=f"its test hung {at}, and was killed after {limit_s:g} s")
    how = f"signal {-ended.status}" if ended.status < 0 else f"exit code {ended.status}"
    return replace(made, ending=Ending.DIED, why=f"its test died {at} ({how})")


def _benched(gpu: int, uuid: str, told: Any) -> Benched:
    facts = {str(name)[:60]: str(value)[:300] for name, value in told.get("facts", {}).items()}
    figures = told.get("figures", [])[:_MAX_FIGURES]
    peers = told.get("peers")
    return Benched(
        gpu=gpu,
        uuid=uuid or facts.get("uuid", ""),
        ending=Ending(told.get("ending", Ending.NOT_RUN)),
        why=str(told.get("why", ""))[:600],
        stage=str(told.get("stage", ""))[:60],
        facts=MappingProxyType(facts),
        figures=tuple((str(name), float(value), str(unit)) for name, value, unit in figures),
        checksum=str(told.get("checksum", ""))[:64],
        repeats=int(told.get("repeats", 0)),
        different=int(told.get("different", 0)),
        tested_bytes=int(told.get("tested_bytes", 0)),
        wrong_words=int(told.get("wrong_words", 0)),
        sums_right=bool(told.get("sums_right", True)),
        lines=tuple(str(line)[:300] for line in told.get("lines", [])[:100]),
        peers=None if peers is None else _peers(peers),
    )


def _peers(told: Any) -> Peers:
    return Peers(int(told["size"]), bool(told["good"]), float(told["rate"]), str(told["why"])[:300])


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


# -- findings of several GPUs ------------------------------------------------------------------


DRAIN = "drain this node, and have the card reset, tested or replaced"


class Trouble(Struct, frozen=True, kw_only=True):
    """What is wrong with one GPU."""

    gpu: int
    text: str
    status: Status = Status.FAIL
    measured: Value = None
    expected: Value = None
    unit: str = ""
    action: str = DRAIN


def summed(
    name: str,
    asked: Sequence[tuple[int, Fact]],
    judged: Iterable[Trouble | None],
    good: str,
    fault: Fault = Fault.NODE,
) -> Iterator[Finding]:
    """A finding for the GPUs with troubles of each status, one for those that are unknown, or one for all."""
    troubles = [one for one in judged if one is not None]
    for status in (Status.FAIL, Status.WARN):
        its = [one for one in troubles if one.status is status]
        if its:
            yield _joined(name, status, its, fault)
    unknown = [(index, fact.why) for index, fact in asked if fact.state is State.UNKNOWN]
    known = [index for index, fact in asked if fact.is_known]
    if unknown:
        text = f"not known of {numbered([index for index, _ in unknown])}: {unknown[0][1]}"
        yield Finding(check=name, status=Status.UNKNOWN, scope=Scope.GPU, text=text)
    elif asked and not known:
        text = f"{numbered([index for index, _ in asked])}: this kind of card has no such thing"
        yield Finding(check=name, status=Status.SKIPPED, scope=Scope.GPU, text=text)
    if known and not troubles:
        yield Finding(check=name, status=Status.PASS, scope=Scope.GPU, text=f"{numbered(known)}: {good}")


def _joined(name: str, status: Status, its: Sequence[Trouble], fault: Fault) -> Finding:
    return Finding(
        check=name,
        status=status,
        fault=fault if status is Status.FAIL else None,
        scope=Scope.GPU,
        subject=", ".join(dict.fromkeys(f"GPU {one.gpu}" for one in its)),
        text="; ".join(f"GPU {one.gpu} {one.text}" for one in its),
        measured=its[0].measured,
        expected=its[0].expected,
        unit=its[0].unit,
        action=its[0].action,
    )
