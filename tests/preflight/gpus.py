"""Two cards in which all is well, as the children that look at them would tell."""

from __future__ import annotations

from typing import Any

from trainer_launch.preflight.gpu.devices import Cards, Load
from trainer_launch.preflight.gpu.facts import Benched, Ending, Fact, Facts, Gpu, Peers, State, Watched


def known(**values: Any) -> dict[str, Fact]:
    return {name: Fact(State.KNOWN, value) for name, value in values.items()}


def card(index: int) -> Gpu:
    told = known(
        name="NVIDIA H200",
        uuid=f"GPU-{index}",
        recovery=0,
        ecc_uncorrected=0,
        remapped=[0, 0, 0, 0],
        mig=0,
        memory_used=500 << 20,
        nvlinks=[1] * 18,
        margin_c=40,
    )
    return Gpu(index=index, facts=told)


def under_load(index: int) -> Watched:
    told = known(
        clock_reasons=[1, 4, 3],
        margin_c=[24, 50, 0],
        pcie_width=[16, 16, 0],
        pcie_width_max=[16, 16, 0],
        nvlink_errors=[0, 0, 0],
    )
    return Watched(index=index, busy=9, xids=Fact(State.KNOWN, []), reasons={4: 9}, facts=told)


FACTS = Facts(driver="580.159.04", gpus=(card(0), card(1)))
TESTED = tuple(
    Benched(
        gpu=index,
        ending=Ending.DONE,
        repeats=20,
        lines=("NCCL INFO Using network IB",),
        peers=Peers(2, good=True, rate=460.0, why=""),
    )
    for index in (0, 1)
)
LOAD = Load(tested=TESTED, watched={0: under_load(0), 1: under_load(1)}, driver="580.159.04")
HEALTHY_CARDS = Cards(facts=lambda: FACTS, settled=lambda: FACTS, load=lambda: LOAD)
