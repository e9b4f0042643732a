"""How long a job takes to its first line after `import torch`: at first, and after a worker was killed.

    python benchmarks/recovery.py [workers ...]

Cold start: from the launcher's start to that line in the last worker. Recovery: from the SIGKILL of one worker to
that line in all of them again, and to their first all-reduce. torchrun gets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1,
without which torch 2.13 does not recover. Prints figures, judges nothing.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = 3
WORKERS = (1, 4, 8)
LAUNCHER = (sys.executable, "-m", "trainer_launch", "run", "--log-level", "warning", "--max-restarts", "1")
WAYS = {
    "trainer-launch": (*LAUNCHER, "--nproc-per-node={}", "--"),
    "  --start-method exec": (*LAUNCHER, "--start-method", "exec", "--nproc-per-node={}", "--"),
    "torchrun": (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"),
        "--nproc-per-node={}",
    ),
}
TRAIN = """
import os, sys, time
import torch
def note(word):
    with open(sys.argv[1], "a") as file:
        file.write(f"{word} {time.monotonic()}\\n")
def count(word):
    return open(sys.argv[1]).read().count(word)
attempt, size = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["WORLD_SIZE"])
note("imported" + attempt)
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
note("step" + attempt)
while count("step" + attempt) < size:
    time.sleep(0.01)
if attempt == "0":
    time.sleep(0.5)
    if dist.get_rank() == size - 1:
        note("killed0")
        os.kill(os.getpid(), 9)
    time.sleep(60)
os._exit(0)
"""
Figures = tuple[float, float, float]  # seconds: cold start, recovery to the import, to the first step


def main() -> None:
    """Print a table for each number of workers."""
    sizes = [int(word) for word in sys.argv[1:]] or WORKERS
    bare_s = bare_import_s()
    print(f"{len(os.sched_getaffinity(0))} CPUs; python -c 'import torch': {bare_s:.2f} s; medians of {RUNS} runs")
    for size in sizes:
        print(
            f"\n{size} workers{'cold start':>31}{'x torchrun':>12}{'x import':>10}"
            f"{'recovery':>12}{'x torchrun':>12}{'to a step':>12}"
        )
        figures = {way: median(way, size) for way in WAYS}
        peer = figures["torchrun"]
        for way, (cold_s, import_s, step_s) in figures.items():
            print(
                f"{way:<30}{cold_s:>8.2f} s{cold_s / peer[0]:>12.2f}{cold_s / bare_s:>10.2f}"
                f"{import_s:>10.2f} s{import_s / peer[1]:>12.3f}{step_s:>10.2f} s"
            )


def bare_import_s() -> float:
    """What nobody can be faster than."""
    times = []
    for _ in range(RUNS + 1):
        start_s = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        times.append(time.monotonic() - start_s)
    return statistics.median(times[1:])


def median(way: str, size: int) -> Figures:
    """Each figure's median."""
    cold, imported, step = zip(*(once(way, size) for _ in range(RUNS)), strict=True)
    return statistics.median(cold), statistics.median(imported), statistics.median(step)


def once(way: str, size: int) -> Figures:
    """One job with one killed worker."""
    with tempfile.TemporaryDirectory() as folder:
        script, notes = Path(folder, "train.py"), Path(folder, "notes")
        script.write_text(TRAIN)
        argv = [*(word.format(size) for word in WAYS[way]), str(script), str(notes)]
        env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        start_s = time.monotonic()
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=150)
        if done.returncode:
            raise SystemExit(f"recovery: {argv!r} ended with {done.returncode}:\n{done.stderr}")
        told = [line.split() for line in notes.read_text().splitlines()]
    last = {word: max(float(at) for which, at in told if which == word) for word, _ in told}
    return last["imported0"] - start_s, last["imported1"] - last["killed0"], last["step1"] - last["killed0"]


if __name__ == "__main__":
    main()
