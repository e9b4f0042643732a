"""Two cards in which all is well, as the children that look at them would tell."""

from __future__ import annotations

from typing import Any

from trainer_launch.preflight.gpu_collect import LOAD, Cards, Gpu, GpuFacts, GpuTest, LoadEnding, Peers


def under_load(**values: Any) -> dict[str, Any]:
    return {f"{LOAD}{name}": value for name, value in values.items()}


def card(index: int) -> Gpu:
    at_rest = {
        "name": "NVIDIA H200",
        "uuid": f"GPU-{index}",
        "recovery": 0,
        "ecc_uncorrected": 0,
        "remapped": [0, 0, 0, 0],
        "mig": 0,
        "memory_used": 500 << 20,
        "nvlinks": [1] * 18,
    }
    seen = under_load(clock_reasons={"looks": 9, "times": {"4": 9}}, pcie_lanes=[16, 16], nvlink_errors=0, xids=[])
    return Gpu(index=index, facts=at_rest | seen)


FACTS = GpuFacts(
    trouble="",
    driver="580.159.04",
    gpus=(card(0), card(1)),
    tests=tuple(
        GpuTest(
            gpu=index,
            ending=LoadEnding.DONE,
            repeats=20,
            network="IB",
            peers=Peers(good=True, rate=460.0, why=""),
        )
        for index in (0, 1)
    ),
)
HEALTHY_CARDS = Cards(lambda: FACTS)
