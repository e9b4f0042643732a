"""What children say of this node's GPUs, as values: a fact that nobody tells is unknown, and no fault of a card."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from trainer_launch.host.deadline_subprocess import Ended
from trainer_launch.model.errors import MALFORMED
from trainer_launch.model.findings import Checksum, Measure
from trainer_launch.model.units import in_ranges, in_units

IMPORT = "import torch"  # the stage of a test before it touches the device
PEERS = "peers"  # the stage of a test in which GPUs need each other
LOAD = "load "  # how the facts begin that were seen under load


class Gpu(Struct, frozen=True, kw_only=True):
    """One GPU as NVIDIA's library sees it. A fact that the card does not have is neither known nor unknown."""

    index: int
    lost: str = ""  # what the driver says of a GPU that is gone, or must be reset
    facts: Mapping[str, Any] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)  # why a fact is not known

    @property
    def uuid(self) -> str:
        """Which card it is, wherever it is put; empty where it is not told."""
        return str(self.facts.get("uuid", ""))

    @property
    def model(self) -> str:
        """As in NVIDIA H200; empty where it is not told."""
        return str(self.facts.get("name", ""))

    @property
    def down_links(self) -> str:
        """Their numbers."""
        return ", ".join(str(number) for number, is_up in enumerate(self.facts.get("nvlinks", ())) if not is_up)

    @property
    def memory(self) -> str:
        """All of it, in units."""
        return in_units(self.facts.get("memory_total", 0))

    def first(self, names: Sequence[str]) -> str:
        """The first of these facts that this kind of card has, known or not; empty: it has none."""
        return next((name for name in names if name in self.facts or name in self.unknown), "")

    def with_more(self, gpu: Gpu) -> Gpu:
        """This GPU, with what another look at it has shown."""
        return replace(self, facts={**self.facts, **gpu.facts}, unknown={**self.unknown, **gpu.unknown})

    @property
    def is_watched(self) -> bool:
        """Whether it was looked at under load."""
        return any(name.startswith(LOAD) for name in (*self.facts, *self.unknown))


class Ending(Enum):
    """How the test of a GPU ended."""

    DONE = "done"
    NO_TORCH = "import"  # its Python has no torch
    FAILED = "failed"  # a test failed
    DIED = "died"  # by itself, or when its time was up, and said nothing of it
    STUCK = "stuck"  # not even SIGKILL ended it: it is inside the driver
    NOT_RUN = "not run"  # or not so far that it touched the device


class Peers(Struct, frozen=True):
    """What all GPUs of a node did together, as one of them saw it."""

    good: bool  # all sums were right
    rate: float  # of an all-reduce of 1 GiB, as bus bandwidth in GB/s
    why: str  # it did not come to that


class GpuTest(Struct, frozen=True, kw_only=True):
    """What a child that loads one GPU found."""

    gpu: int = 0
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
    network: str = ""  # what NCCL says that it uses between nodes, such as IB or Socket; "": it did not say
    peers: Peers | None = None  # how it did together with the node's other GPUs, or alone


class GpuFacts(Struct, frozen=True, kw_only=True):
    """All that is known of this container's GPUs: one document, of which rules judge."""

    trouble: str  # why nothing is known of them
    driver: str = ""
    gpus: Annotated[tuple[Gpu, ...], Meta(max_length=64)] = ()
    log: tuple[tuple[str, int, int], ...] = ()  # XID errors of two hours: place on the bus, number, seconds ago
    tests: tuple[GpuTest, ...] = ()
    load_trouble: str = ""  # why they were not put under load, or not watched there

    @property
    def measures(self) -> tuple[Measure, ...]:
        """All figures, for the comparison with a reference and with other nodes."""
        return tuple(
            Measure(name, value, unit, test.facts.get("model", ""), test.gpu)
            for test in self.tests
            for name, value, unit in test.figures
        )

    @property
    def checksums(self) -> tuple[Checksum, ...]:
        """Only the same model with the same libraries must come to the same bits."""
        return tuple(
            Checksum(test.gpu, test.uuid, self._kind(test.facts), test.checksum)
            for test in self.tests
            if test.checksum
        )

    def _kind(self, facts: Mapping[str, str]) -> str:
        libraries = [f"{name} {facts.get(name, '')}" for name in ("torch", "cuda", "cublas")]
        return ", ".join((facts.get("model", ""), f"driver {self.driver}", *libraries))[:120]


def parse_facts(data: bytes) -> GpuFacts:
    """What preflight/children/gpu_facts.py printed, also after `watch`."""
    try:
        return msgspec.json.decode(data, type=GpuFacts)
    except MALFORMED:
        return GpuFacts(trouble="what was said of the GPUs cannot be read")


def parse_test(gpu: int, uuid: str, ended: Ended, limit_s: float) -> GpuTest:
    """What a test found, by the last of its lines that can be read, and how it ended within `limit_s`.

    What happens before it touches the device, as on a slow disk, says nothing of the GPU: it was not tested.
    """
    test = GpuTest()
    for line in reversed(ended.stdout.splitlines()):
        with contextlib.suppress(*MALFORMED):
            test = msgspec.json.decode(line, type=GpuTest)
            break
    test = replace(test, gpu=gpu, uuid=uuid or test.facts.get("uuid", ""))
    if test.ending is Ending.NOT_RUN:
        test = _unfinished(test, ended, limit_s)
    is_before = test.stage in ("", IMPORT) and test.ending is not Ending.NO_TORCH
    return replace(test, ending=Ending.NOT_RUN) if is_before else test


def _unfinished(test: GpuTest, ended: Ended, limit_s: float) -> GpuTest:
    """A test that did not say how it ended."""
    at = f"at {test.stage!r}" if test.stage else "at its start"
    if ended.status is None:
        return replace(test, ending=Ending.STUCK, why=f"its test hangs {at}, and not even SIGKILL ends it")
    if ended.timed_out:
        return replace(test, ending=Ending.DIED, why=f"its test hung {at}, and was killed after {limit_s:g} s")
    how = f"signal {-ended.status}" if ended.status < 0 else f"exit code {ended.status}"
    return replace(test, ending=Ending.DIED, why=f"its test died {at} ({how})")


def numbered(indices: Sequence[int]) -> str:
    """`GPU 3`, or `GPUs 0-3, 7`."""
    return f"GPU{'s' if len(indices) > 1 else ''} {in_ranges(indices, ', ')}"
