"""What torch's flight recorder and the thread that answers for it cost a training step."""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import trees
from benchmarks.measuring import Case, Failed, Section, Setup, wait_for
from benchmarks.peers import version_here

WORKERS = (1, 4)
STEP_MS = 10.0
BLOCKS = 40  # of each job
STEPS = 40  # of a block
ABOUT_S = 3 * BLOCKS * STEPS * STEP_MS / 1000 + 10.0
# The jobs take turns: only one computes at a time, and each sees the machine as the others do, a moment later.
OFF = ("--hang-report-after", "off")
JOBS: Mapping[str, tuple[str, ...]] = {"with": (), "without": OFF, "control": OFF}
# A step multiplies matrices for about so long in all workers on the given CPUs, and reduces four buckets.
TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
place, number, jobs, blocks, steps, work_s = sys.argv[1], *map(int, sys.argv[2:6]), float(sys.argv[6])
torch.set_num_threads(1)
dist.init_process_group("gloo")
first = dist.get_rank() == 0
a, buckets = torch.rand(128, 128), [torch.rand(4096) for _ in range(4)]
def compute(times):
    for _ in range(times):
        torch.mm(a, a, out=b)
b = torch.empty_like(a)
compute(200)
def timed():
    began = time.perf_counter()
    compute(20)
    return (time.perf_counter() - began) / 20
def given(name, value):
    path = os.path.join(place, name)
    if value is not None:
        with open(path + ".new", "w") as file:
            file.write(value)
        os.replace(path + ".new", path)
    while not os.path.exists(path):
        time.sleep(0.0005)
    return open(path).read()
def step():
    compute(times)
    for bucket in buckets:
        dist.all_reduce(bucket)
ready = torch.zeros(1)
dist.all_reduce(ready)
# All jobs do the same work: the first one's measure of it.
times = torch.zeros(1, dtype=torch.int64)
if first:
    own = number == 0
    times[0] = int(given("times", str(max(1, int(work_s / min(timed() for _ in range(100))))) if own else None))
dist.broadcast(times, 0)
times = int(times)
open(os.path.join(place, f"ready-{number}"), "w").close() if first else None
lines = []
for block in range(blocks):
    if first:
        given(f"turn-{block * jobs + number}", None)
    dist.barrier()
    step()
    took = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        took.append(time.perf_counter() - began)
    if first:
        took.sort()
        lines.append(str(took[steps // 2]))
        open(os.path.join(place, f"turn-{block * jobs + number + 1}"), "w").close()
if first:
    given(f"took-{number}", "\\n".join(lines))
dist.barrier()
os._exit(0)
"""


def rows(workers: int) -> dict[str, str]:
    """The rows for so many workers."""
    name = f"{workers} worker{'s' * (workers > 1)}"
    return {f"{name}: a step": "ms", f"{name}: cost of the recorder": "%", f"{name}: control": "%"}


def once(workers: int) -> Mapping[str, float]:
    """Three jobs at a time, block by block in turn: one with the recorder, two without."""
    with trees.folder() as folder, contextlib.ExitStack() as open_jobs:
        script = Path(folder, "train.py")
        script.write_text(TRAIN)
        cpus = min(workers, len(os.sched_getaffinity(0)))
        work_s = STEP_MS / 1000 * cpus / workers
        words = (str(len(JOBS)), str(BLOCKS), str(STEPS), str(work_s))
        started = []
        for number, more in enumerate(JOBS.values()):
            argv = (*_launcher(workers), *more, "--", str(script), folder, str(number), *words)
            started.append(open_jobs.enter_context(trees.started(argv, {}, folder)))
        for number, job in enumerate(started):
            job.wait_for(Path(folder, f"ready-{number}").exists, "the jobs' start", 60.0)
        Path(folder, "turn-0").touch()
        paths = [Path(folder, f"took-{number}") for number in range(len(JOBS))]
        started[-1].wait_for(paths[-1].exists, "all blocks", 4 * ABOUT_S)
        wait_for(lambda: all(path.exists() for path in paths), "what all blocks took", 10.0)
        took = dict(zip(JOBS, (list(map(float, path.read_text().split())) for path in paths), strict=True))
    if any(len(of_one) != BLOCKS for of_one in took.values()):
        raise Failed("a job ended before its last block")
    step_ms = statistics.median(took["without"]) * 1000
    values = (step_ms, _more(took["with"], took["without"]), _more(took["control"], took["without"]))
    return dict(zip(rows(workers), values, strict=True))


def _more(ones: Sequence[float], others: Sequence[float]) -> float:
    """By how many percent a block takes longer than the one beside it, in the median."""
    return statistics.median((one / other - 1) * 100 for one, other in zip(ones, others, strict=True))


def _launcher(workers: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "trainer_launch", "run", "--log-level", "warning", f"--nproc-per-node={workers}")


@contextlib.contextmanager
def opened() -> Iterator[Setup]:
    """With each number of workers."""
    yield Setup(
        [Case("trainer-launch", rows(n), functools.partial(once, n), 6 * ABOUT_S, 1.5 * ABOUT_S) for n in WORKERS]
    )


SECTION = Section(
    name="recorder",
    title="What the flight recorder costs",
    about=f"""\
Training steps of about {STEP_MS:g} ms with four gloo all_reduce calls. Three jobs run beside each other and take
turns of {STEPS} steps, {BLOCKS} turns each: one with torch's flight recorder and the thread that answers for it,
as is the default, and two with `--hang-report-after off`. The cost is the median, over the turns, of how
much longer the median step of a turn takes than without the recorder in the turn beside it. `control`
compares the two jobs without it: so far the measurement is off by chance. The goal is 1 %.""",
    open=opened,
    versions=lambda: {name: version_here(name) for name in ("trainer-launch", "torch")},
    whos=("trainer-launch",),
    shown=tuple(row for n in WORKERS for row in list(rows(n))[1:]),
)
