"""How much the figures of a GPU differ from run to run, and how long its tests take, at the standard level.

`python benchmarks/gpu.py [--times 5] [--device cpu]`. Each run is a new process, as in a preflight. A healthy card
differs by 3 % at most. On the CPU it only shows that the program works.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys

from trainer_launch.host import machine
from trainer_launch.preflight.gpu import devices
from trainer_launch.preflight.gpu.devices import Load
from trainer_launch.preflight.gpu.facts import Benched, Ending, Facts


def main() -> None:
    """Run them, and print a table in Markdown."""
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--times", type=int, default=5)
    words.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = words.parse_args()
    if asked.device == "cuda" and not machine.count(os.environ).count:
        print("no GPU here; --device cpu shows that the program works")
        return
    runs = [load(asked.device) for _ in range(asked.times)]
    bad = [one for run in runs for one in run.tested if one.ending is not Ending.DONE]
    if bad:
        sys.exit(f"GPU {bad[0].gpu}: {bad[0].why}")
    print("| GPU | figure | least | median | most | spread |\n|---|---|---|---|---|---|")
    for number in sorted({one.gpu for run in runs for one in run.tested}):
        table([one for run in runs for one in run.tested if one.gpu == number])


def load(device: str) -> Load:
    """One run over all GPUs."""
    if device == "cuda":
        count = machine.count(os.environ).count
        made = devices.cards(os.environ, sys.executable, "standard", count).load()
        return made if made is not None else Load()
    argv = (sys.executable, devices.BENCH, "--device", "cpu")
    return devices.loaded(
        Facts(trouble="no GPU"), ((0, ""),), {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}, argv, 60.0
    )


def table(runs: list[Benched]) -> None:
    """The rows of one GPU."""
    figures: dict[str, list[float]] = {}
    for one in runs:
        for name, value, unit in one.figures:
            figures.setdefault(f"{name}, {unit}", []).append(value)
        at = dict(one.stages)
        figures.setdefault("import torch, s", []).append(at["device"])
        figures.setdefault("after it, s", []).append(at["end"] - at["device"])
    for name, values in figures.items():
        middle = statistics.median(values)
        spread = (max(values) - min(values)) / middle if middle else 0.0
        row = f"{min(values):.4g} | {middle:.4g} | {max(values):.4g} | {spread:.1%}"
        print(f"| {runs[0].facts['model']} {runs[0].gpu} | {name} | {row} |")
    sums = {one.checksum for one in runs}
    print(f"| {runs[0].facts['model']} {runs[0].gpu} | checksums that differ | {len(sums) - 1} | | | |")


if __name__ == "__main__":
    main()
