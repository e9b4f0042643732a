"""Cold start of torch workers on one node, recovery from a killed one, and the memory of what runs beside them."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks import trees
from benchmarks.measuring import Case, Failed, Section, Setup
from benchmarks.peers import RELEASE, Launcher, launchers, versions_of_launchers

WORKERS = (1, 4, 8)
MANY = 8  # workers that only these start: others need minutes for five runs
WITH_MANY = ("trainer-launch", RELEASE, "torchrun, shared store off", "shell")
BESIDE_S = 5.0  # over which wake-ups are counted
LIMIT_S = 60.0  # for a start
BACK_S = 30.0  # after which a job counts as not recovered
END_S = 10.0  # then it is killed: how it ends is not measured here
TRAIN = """
import os, sys, time
import torch
def note(word):
    with open("notes", "a") as file:
        file.write(f"{word} {time.monotonic()} {os.getpid()}\\n")
first = not os.path.exists("killed")
start = "first" if first else "second"
note(start + "-import")
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
note(start + "-step")
while not os.path.exists("end"):
    time.sleep(0.05)
os._exit(0)
"""
ROWS = {
    "cold start, to `import torch` done": "s",
    "cold start, to the first step": "s",
    "recovery, to `import torch` done": "s",
    "recovery, to the first step": "s",
    "memory beside the workers (PSS)": "MB",
    "memory of all (PSS)": "MB",
    "processes beside the workers": "",
    "wake-ups beside the workers": "/s",
}


def rows(workers: int) -> dict[str, str]:
    """The rows for so many workers."""
    return {f"{workers} worker{'s' * (workers > 1)}: {row}": unit for row, unit in ROWS.items()}


class Notes:
    """What the workers have written: word, time, process."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder, "notes")

    def of(self, word: str) -> list[tuple[float, int]]:
        """Time and process id of each note of this word, in order."""
        if not self._path.exists():
            return []
        lines = [line.split() for line in self._path.read_text().split("\n")[:-1]]
        return sorted((float(at_s), int(pid)) for which, at_s, pid in lines if which == word)

    def last_s(self, word: str) -> float:
        """When the last worker came so far."""
        return self.of(word)[-1][0]


def once(launcher: Launcher, workers: int) -> Mapping[str, float | str]:
    """One job with one killed worker. What came before a failure is kept."""
    with trees.folder() as folder, launcher.beside() as more:
        program, notes = Path(folder, "train.py"), Notes(folder)
        program.write_text(TRAIN)
        words = (*launcher.command(workers), str(program))
        with trees.started(words, {**launcher.env, **(more or {})}, folder) as job:
            job.wait_for(lambda: len(notes.of("first-step")) == workers, "the first step of all", LIMIT_S)
            time.sleep(0.5)
            pids = [pid for _, pid in notes.of("first-step")]
            others = job.others(pids)
            at_rest = (
                *(trees.pss_mb(others), trees.pss_mb(job.others([]))),
                *(len(others), trees.wakeups(others, BESIDE_S)),
            )
            cold = [notes.last_s(word) - job.began_s for word in ("first-import", "first-step")]
            warm = _recovered(job, notes, folder, pids)
            with contextlib.suppress(Exception):
                Path(folder, "end").touch()
                job.process.wait(END_S)
        return dict(zip(rows(workers), (*cold, *warm, *at_rest), strict=True))


def _recovered(job: trees.Started, notes: Notes, folder: str, pids: list[int]) -> list[float] | tuple[str, str]:
    Path(folder, "killed").touch()
    killed_s = time.monotonic()
    os.kill(pids[-1], signal.SIGKILL)
    try:
        job.wait_for(lambda: len(notes.of("second-step")) == len(pids), "the first step again", BACK_S)
    except Failed as why:
        return str(why), str(why)
    return [notes.last_s(word) - killed_s for word in ("second-import", "second-step")]


def opened() -> Setup:
    """Each launcher that is here, with each number of workers."""
    found, absent = launchers()
    limit_s = LIMIT_S + BACK_S + BESIDE_S + 2 * END_S
    cases = [
        Case(one.who, rows(n), functools.partial(once, one, n), limit_s, 2 * one.about_s + BESIDE_S + n)
        for n in WORKERS
        for one in found
        if n < MANY or one.who in WITH_MANY
    ]
    return Setup(cases, absent)


SECTION = Section(
    name="recovery",
    title="Start-up and recovery",
    about=(
        "torch workers with gloo on one node; the last worker gets SIGKILL. "
        f"torchrun runs without its shared store: with it, no recovery succeeded within {BACK_S:g} s."
    ),
    loses_because="Three processes run beside the workers (launcher, fork server, store); torchrun is one.",
    pictured=("8 workers: cold start, to the first step", "8 workers: recovery, to the first step"),
    beside=("trainer-launch", RELEASE, "torchrun, shared store off", "ft_launcher", "dlrover-run"),
    shows=tuple(
        f"{workers} workers: {row}"
        for workers in (4, 8)
        for row in ("cold start, to the first step", "recovery, to the first step", "memory of all (PSS)")
    ),
    open=opened,
    versions=versions_of_launchers,
    whos=(
        *("trainer-launch", RELEASE, "torchrun", "torchrun, shared store off", "ft_launcher", "dlrover-run"),
        "shell",
    ),
)
