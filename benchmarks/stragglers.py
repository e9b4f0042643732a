"""Real jobs of 2 to 4 ranks, healthy or with one slow rank, as a section of the page: who is named a straggler."""

from __future__ import annotations

import concurrent.futures
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from benchmarks.measuring import Case, Failed, Reading, Section, Setup, say
from benchmarks.peers import versions_here
from tests.cli.launching import LAUNCHER, clean_env

LIMIT_S = 1800.0
SIDE_BY_SIDE = 4
WHO = "trainer-launch"
FACTORS = {1.2: "20 % longer steps", 1.5: "50 % longer steps", 3.0: "200 % longer steps"}
EACH = 20  # jobs of each factor, and as many healthy ones
NAMED = {factor: f"{text}: only that rank named" for factor, text in FACTORS.items()}
QUIET = "healthy jobs: nobody named"
EVERY_S = 2.0  # between two looks, in place of a minute
LOOKS = 5  # for which a job trains: three in a row name a rank
JOB_LIMIT_S = 90.0
SOON = "from trainer_launch.diagnosis import stragglers\nstragglers.EVERY_S = {}\n"  # as sitecustomize
# How steps are made; in the last, every rank is slow now and then.
KINDS = ("all_reduce", "DDP", "pipeline", "in turn")
TRAIN = """
import os, random, sys, time, torch, torch.distributed as dist
kind, step_s, slow, factor, train_s = sys.argv[1], *map(float, sys.argv[2:])
dist.init_process_group("gloo")
rank, ranks, total = dist.get_rank(), dist.get_world_size(), torch.ones(64)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))))

def compute(step):
    late = factor if rank == slow else 2.0 if kind == "in turn" and step % (3 * ranks) == 3 * rank else 1.0
    time.sleep(step_s * late * random.uniform(0.95, 1.05))

goes_on, step, begin_s = torch.ones(1), 0, time.monotonic()
while goes_on.item():
    step += 1
    if kind == "pipeline" and rank:
        dist.recv(total, rank - 1)
    compute(step)
    if kind == "pipeline" and rank < ranks - 1:
        dist.send(total, rank + 1)
    if kind == "DDP":
        model(torch.ones(8, 64)).sum().backward()
    if rank == 0 and step % 50 == 0:
        time.sleep(5 * step_s)  # a checkpoint
    goes_on.fill_(time.monotonic() - begin_s < train_s)
    dist.all_reduce(goes_on, dist.ReduceOp.MIN)
os._exit(0)
"""


class Straggling(msgspec.Struct, frozen=True):
    """One job; a factor of 1 is a healthy one."""

    number: int
    factor: float

    @property
    def ranks(self) -> int:
        return 2 + self.number % 3

    @property
    def slow(self) -> int:
        """Every rank in turn; of nobody in a healthy job."""
        return self.number // 3 % self.ranks if self.factor > 1 else -1

    @property
    def kind(self) -> str:
        """A rank of a pipeline waits for those before it, so that slow ones are not named there."""
        return KINDS[self.number % (2 if self.factor > 1 else len(KINDS))]

    @property
    def step_s(self) -> float:
        return (0.06, 0.1, 0.14, 0.2)[self.number // 4 % 4]


JOBS = [
    *(Straggling(number, factor) for factor in FACTORS for number in range(EACH)),
    *(Straggling(number, 1.0) for number in range(len(FACTORS) * EACH)),
]


def named(job: Straggling) -> frozenset[int]:
    """Train, and give the ranks that were named.

    Raises:
        Failed: the job did not end by itself.
    """
    with tempfile.TemporaryDirectory(prefix="straggler-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(SOON.format(EVERY_S))
        (folder / "train.py").write_text(TRAIN)
        words = [job.kind, *(str(value) for value in (job.step_s, job.slow, job.factor, EVERY_S * (LOOKS + 0.5)))]
        argv = [*LAUNCHER, "run", "--nproc-per-node", str(job.ranks), "--", str(folder / "train.py"), *words]
        env = clean_env({"PYTHONPATH": name, "OMP_NUM_THREADS": "1", "TMPDIR": name})
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=JOB_LIMIT_S, check=False)
    if done.returncode:
        raise Failed(f"{job} ended with {done.returncode}: {done.stderr.strip()[-200:]}")
    return frozenset(map(int, re.findall(r"rank (\d+) \(node \d+\) is a straggler", done.stderr)))


def figures(said: Mapping[Straggling, frozenset[int]]) -> dict[str, Reading]:
    """In how many jobs exactly the slow rank was named, or nobody."""
    rows: dict[str, Reading] = {}
    for factor, row in {**NAMED, 1.0: QUIET}.items():
        group = {job: ranks for job, ranks in said.items() if job.factor == factor}
        right = sum(ranks == ({job.slow} - {-1}) for job, ranks in group.items())
        wrong = sum(bool(ranks - {job.slow}) for job, ranks in group.items())
        rows[row] = Reading(right, f"of {len(group)}" + (f", others named in {wrong}" if wrong else ""))
    return rows


def once() -> Mapping[str, Reading]:
    """All jobs, several side by side."""
    begun_s = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        said = dict(zip(JOBS, threads.map(named, JOBS), strict=True))
    say(f"stragglers: {time.monotonic() - begun_s:.0f} s")
    return figures(said)


def opened() -> Setup:
    """One run has all jobs."""
    return Setup([Case(WHO, dict.fromkeys((*NAMED.values(), QUIET), ""), once, LIMIT_S, 500.0)])


SECTION = Section(
    name="stragglers",
    title="Stragglers",
    about=(
        f"Real jobs of 2 to 4 gloo ranks, {SIDE_BY_SIDE} side by side, with steps of 60 to 200 ms. "
        f"The launcher takes {LOOKS} samples in each job, one every {EVERY_S:g} s; three in a row name a rank."
    ),
    open=opened,
    versions=lambda: versions_here("trainer-launch", "torch"),
    whos=(WHO,),
    repeats=1,
)
