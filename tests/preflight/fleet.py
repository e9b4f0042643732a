"""A fleet in which all is well, to be broken by one fault: each node's own checks, and the judgement of all nodes.

Nodes are made up (their /proc, /sys, names and GPUs), what looks at them and judges them is the product. A node's
GPUs are values, or with `play` NVIDIA's simulated library, which the product's own children ask.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.preflight.cluster.job import Simulation
from tests.preflight.gpu import machine
from tests.preflight.gpus import FACTS, card
from tests.preflight.world import HEALTHY, HOST, JOB, LO, TOPOLOGY, Names
from trainer_launch.host.network import AdapterPort, Interface
from trainer_launch.model import Gpus, Member, NodeRange
from trainer_launch.model.findings import Finding, Status
from trainer_launch.preflight import gpu_collect, registry
from trainer_launch.preflight.check import Subject, Where
from trainer_launch.preflight.cluster import node_facts, pairs
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.gpu_collect import Cards, GpuFacts, collect
from trainer_launch.preflight.node_preflight import Selection
from trainer_launch.preflight.thresholds import load_table

GPUS = 4
ADAPTERS = 8
RATE = "400 Gb/sec (4X NDR)"
PAIR_RATE = 45e9
VERSIONS = {"python": "3.11.9", "torch": "2.11.0", "cuda": "13.0", "nccl": "2.28.9", "arch": "x86_64"}
VERSIONS |= {"kernel": "6.8.0-55-generic", "code": "0123456789ab (4 files)", pairs.FACT: f"nccl on {GPUS} GPUs"}
_LIBRARIES = {"torch": "2.11.0", "cuda": "13.0", "model": "NVIDIA H200", "nccl": "2.28.9"}
_FIGURES = {"gemm": (690.0, "TFLOP/s"), "hbm-copy": (4170.0, "GB/s"), "h2d": (55.1, "GB/s"), "d2h": (55.1, "GB/s")}
Rated = Callable[
    [int, int, int], "tuple[str, float] | None"
]  # of node, partner and rail: why it failed, and the rate


def label(rank: int) -> str:
    """The node as findings name it."""
    return f"node {rank} (job-node-0-{rank})"


def names_of(nodes: int) -> dict[str, frozenset[str]]:
    """What DNS knows."""
    return {
        f"job-node-0-{rank}{suffix}": frozenset({address(rank)}) for rank in range(nodes) for suffix in ("", ".job")
    }


def address(rank: int) -> str:
    return f"10.0.0.{rank + 10}"


class Node:
    """One machine with its pod: what a fault changes."""

    def __init__(self, rank: int, nodes: int, chance: random.Random, spread: float) -> None:
        self.rank = rank
        self.versions: dict[str, str] = dict(VERSIONS)
        self.offset_s, self.error_s = 0.0, 0.005
        self.gpus: GpuFacts = _gpus(rank, chance, spread)
        self.played: tuple[Path, machine.Change] | None = None
        members = tuple(Member(f"job-node-0-{number}.job") for number in range(nodes))
        self.subject: Subject = replace(
            HEALTHY,
            job=replace(JOB, nodes=NodeRange(nodes, nodes), nproc_per_node=GPUS, node_rank=rank, members=members),
            host=replace(HOST, hostname=f"job-node-0-{rank}", gpus=Gpus(count=GPUS, reason=f"{GPUS} in /dev")),
            topology=replace(
                TOPOLOGY,
                node_rank=rank,
                nodes=NodeRange(nodes, nodes),
                local_world_size=GPUS,
                is_coordinator=rank == 0,
            ),
            interfaces=(LO, Interface(name="eth0", addresses=(address(rank), f"fd00::{rank + 10:x}"))),
            adapters=tuple(AdapterPort(f"mlx5_{number}", 1, True, RATE) for number in range(ADAPTERS)),
            lookup=Names(names_of(nodes)),
        )

    def change(self, **fields: Any) -> None:
        """Change what its container is or has; `env` is added to."""
        env = {**self.subject.env, **fields.pop("env", {})}
        host = replace(self.subject.host, **fields.pop("host", {}))
        self.subject = replace(self.subject, env=env, host=host, **fields)

    def play(self, folder: Path, change: machine.Change) -> None:
        """Have its GPUs asked through NVIDIA's simulated library, in which this is changed."""
        self.played = folder, change

    def each_card(self, only: int | None = None, **facts: Any) -> None:
        """Change facts of all its GPUs, or of one."""
        cards = (
            replace(gpu, facts={**gpu.facts, **(facts if only in (None, gpu.index) else {})})
            for gpu in self.gpus.gpus
        )
        self.gpus = replace(self.gpus, gpus=tuple(cards))

    def no_card_tells(self, *names: str, why: str = "") -> None:
        """None of its GPUs tells these facts: for this reason, or because it does not have them."""
        unknown = dict.fromkeys(names, why) if why else {}
        told = ({name: gpu.facts[name] for name in gpu.facts if name not in names} for gpu in self.gpus.gpus)
        cards = (
            replace(gpu, facts=facts, unknown=unknown) for gpu, facts in zip(self.gpus.gpus, told, strict=True)
        )
        self.gpus = replace(self.gpus, gpus=tuple(cards))

    def measures(self, factor: Callable[[int, str], float], model: str = _LIBRARIES["model"]) -> None:
        """Multiply what its GPUs, of this model, reach under load: by GPU and name of the figure."""
        tests = (
            replace(
                test,
                facts={**test.facts, "model": model},
                figures=tuple((name, value * factor(test.gpu, name), unit) for name, value, unit in test.figures),
            )
            for test in self.gpus.tests
        )
        self.gpus = replace(self.gpus, tests=tuple(tests))

    def look(self) -> tuple[Subject, tuple[Finding, ...]]:
        """What its own checks find."""
        made = self.subject
        cards = Cards(lambda: self.gpus, "standard")
        if self.played is not None:
            folder, change = self.played
            env = machine.environment(folder, change, GPUS)
            cards = Cards(lambda: collect(env, sys.executable, "standard", GPUS), "standard")
        made = replace(made, cards=cards) if made.host.gpus.count else replace(made, cards=None)
        return made, Selection().run(made, registry.at(Where.CONTAINER, Where.GPU))


class Fleet(Simulation):
    """All nodes of a job, which meet and are judged by node 0."""

    def __init__(self, nodes: int, seed: int = 0, spread: float = 0.01, **settings: Any) -> None:
        super().__init__(nodes, **{"table": load_table(None), **settings})
        chance = random.Random(seed)
        self.nodes = [Node(rank, nodes, chance, spread) for rank in range(nodes)]
        self.rated: Rated = lambda node, partner, rail: None
        self._spread, self._chance = spread, chance
        self.on_rail = self._rate

    def findings(self) -> tuple[Finding, ...]:
        """All that node 0 tells at the end, with remedies."""
        self._reports = {node.rank: self._report(node) for node in self.nodes}
        self.come(*range(len(self.nodes)))
        self.wait(900)
        return Selection().kept(self.hall.findings)

    def answer(self, rank: int, message: msg.Message) -> None:
        if isinstance(message, msg.Complete):
            self.say(rank, self._reports[rank])
        else:
            super().answer(rank, message)

    def _report(self, node: Node) -> msg.NodeReport:
        made, own = node.look()
        return node_facts.collect(made, node.versions, own, (node.offset_s, node.error_s), b"key")

    def _rate(self, node: int, partner: int, rail: int) -> tuple[str, int]:
        why, rate = self.rated(node, partner, rail) or ("", PAIR_RATE)
        return why, int(rate * self._chance.uniform(1 - self._spread, 1))


def _gpus(rank: int, chance: random.Random, spread: float) -> GpuFacts:
    def figures() -> tuple[tuple[str, float, str], ...]:
        rows = _FIGURES.items()
        return tuple((name, value * chance.uniform(1 - spread, 1 + spread), unit) for name, (value, unit) in rows)

    def uuid(index: int) -> str:
        return f"GPU-{rank:04d}-{index}"

    cards = (card(index) for index in range(GPUS))
    tests = (
        replace(FACTS.tests[0], gpu=index, uuid=uuid(index), facts=_LIBRARIES, figures=figures())
        for index in range(GPUS)
    )
    return replace(
        FACTS,
        gpus=tuple(replace(gpu, facts={**gpu.facts, "uuid": uuid(gpu.index)}) for gpu in cards),
        tests=tuple(tests),
    )


@contextlib.contextmanager
def simulated_library() -> Iterator[None]:
    """Within this block the children that load GPUs are the simulated ones."""
    changes: Mapping[str, Any] = {"BENCH": machine.BENCH, "SETTLE_S": 0.5, "FACTS_S": 5.0}
    kept = {name: getattr(gpu_collect, name) for name in changes}
    for name, value in changes.items():
        setattr(gpu_collect, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(gpu_collect, name, value)


def loud(findings: tuple[Finding, ...]) -> list[Finding]:
    """What accuses somebody, or warns."""
    return [finding for finding in findings if finding.status in (Status.FAIL, Status.WARN)]
