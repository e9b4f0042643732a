"""What a call of `trainer_launch.report()` costs: held back, written, and without a launcher; median of 5 rounds.

Run: python benchmarks/report.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

CALLS = 200_000
WRITES = 500
METRICS = {"loss": 0.4312, "lr": 3e-4, "grad_norm": 1.02, "tokens_per_s": 81234.0, "mem": 61.2}


def micros(calls: int, **given: object) -> float:
    """The cost of one call, in microseconds."""
    from trainer_launch import report, reporting

    rounds = []
    for _ in range(5):
        if calls == WRITES:
            reporting.EVERY_S = 0.0  # every call is due
        started = time.perf_counter()
        for _ in range(calls):
            report(**given)  # type: ignore[arg-type]
        rounds.append((time.perf_counter() - started) / calls * 1e6)
    return statistics.median(rounds)


def show(name: str) -> None:
    """Print a line for each kind of call."""
    for words, given in (
        ("progress", {"progress": 0.5}),
        ("progress, eta, 5 metrics", {"progress": 0.5, "eta_s": 60.0, "metrics": METRICS}),
    ):
        calls = WRITES if name == "written" else CALLS
        print(f"report({words}) {name}: {micros(calls, **given):.2f} us", flush=True)


def main() -> None:
    if len(sys.argv) > 1:
        show(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in ("held back", "written", "without a launcher"):
            env = {k: v for k, v in os.environ.items() if k != "TRAINER_LAUNCH_RUN_DIR"}
            if name != "without a launcher":
                env["TRAINER_LAUNCH_RUN_DIR"] = folder
            subprocess.run([sys.executable, __file__, name], env=env, check=True)


if __name__ == "__main__":
    main()
