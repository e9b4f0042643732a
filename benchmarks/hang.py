"""How long it takes from a hang to the sentence that says which rank the job waits for."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks import trees
from benchmarks.measuring import Case, Failed, Section, Setup, wait_for
from benchmarks.peers import version_here
from trainer_launch.host import network

AFTER_S = 2.0  # --hang-report-after
BUSY_STEPS = 40
LIMIT_S = 60.0
# The last rank does this after some steps, while the others wait for it in an all_reduce.
WHAT = {"never enters": "time.sleep(600)", "stopped": "os.kill(os.getpid(), signal.SIGSTOP)"}
TRAIN = f"""
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, last, total = dist.get_rank(), dist.get_world_size() - 1, torch.ones(4)
for step in range({BUSY_STEPS}):
    dist.all_reduce(total)
    time.sleep(0.05)
if rank == last:
    with open("hangs.new", "w") as file:
        file.write(str(time.monotonic()))
    os.rename("hangs.new", "hangs")
    exec(sys.argv[1])
dist.all_reduce(total)
time.sleep(600)
"""
_SENTENCE = re.compile(r"suspected hang: (.*)")
SHAPES = {(1, 4): "1 node, 4 workers", (4, 1): "4 nodes, 1 worker each"}


def _row(nodes: int, workers: int, what: str) -> str:
    return f"{SHAPES[nodes, workers]}: {what}"


def once(nodes: int, workers: int, what: str) -> Mapping[str, float]:
    """One job that hangs."""
    return {_row(nodes, workers, what): _said_after_s(nodes, workers, WHAT[what]) - AFTER_S}


def _said_after_s(nodes: int, workers: int, code: str) -> float:
    """Seconds from the hang until the first node has logged the sentence, which names the last rank.

    Raises:
        Failed: no sentence came, or it names another rank.
    """
    with trees.folder() as folder, contextlib.ExitStack() as started:
        script, hangs = Path(folder, "train.py"), Path(folder, "hangs")
        script.write_text(TRAIN)
        port = network.free_port()
        jobs = [
            started.enter_context(trees.started(_argv(folder, nodes, workers, node, port, code), {}, folder))
            for node in range(nodes)
        ]
        jobs[-1].wait_for(hangs.exists, "the hang", LIMIT_S)
        said = ""

        def is_said() -> bool:
            nonlocal said
            said = next(filter(None, (_sentence(job) for job in jobs)), "")
            return bool(said)

        wait_for(is_said, "the sentence", AFTER_S + LIMIT_S, 0.01)
        took_s = time.monotonic() - float(hangs.read_text())
        if not re.search(rf"rank\S* .*\b{nodes * workers - 1}\b", said):
            raise Failed(f"the sentence names another rank: {said}")
        return took_s


def _argv(folder: str, nodes: int, workers: int, node: int, port: int, code: str) -> tuple[str, ...]:
    run = (sys.executable, "-m", "trainer_launch", "run", "--log-level", "warning", f"--nproc-per-node={workers}")
    place = ("--nodes", str(nodes), "--node-rank", str(node), "--master-addr", "127.0.0.1")
    hang = ("--hang-report-after", f"{AFTER_S:g}", "--incident-dir", f"{folder}/incidents-{node}")
    return (*run, *hang, *(place if nodes > 1 else ()), *_port(nodes, port), "--", f"{folder}/train.py", code)


def _port(nodes: int, port: int) -> tuple[str, ...]:
    return ("--master-port", str(port)) if nodes > 1 else ()


def _sentence(job: trees.Started) -> str:
    found = _SENTENCE.search(job.output())
    return found[1] if found else ""


@contextlib.contextmanager
def opened() -> Iterator[Setup]:
    """Each shape of a job, with each way to hang."""
    cases = [
        Case(
            "trainer-launch",
            {_row(*shape, what): "s"},
            functools.partial(once, *shape, what),
            AFTER_S + 3 * LIMIT_S,
            9.0,
        )
        for shape in SHAPES
        for what in WHAT
    ]
    yield Setup(cases)


SECTION = Section(
    name="hang",
    title="From a hang to its sentence",
    about=f"""\
A gloo job in which the last rank never enters an all_reduce, or is stopped (SIGSTOP), while the others wait for it.
A figure is the time from the hang until the launcher logs which rank the job waits for,
beyond `--hang-report-after {AFTER_S:g}`. All nodes run on this machine. A stopped worker cannot answer for
its stacks and flight recorder, and is waited for. No peer has such a sentence.""",
    open=opened,
    versions=lambda: {name: version_here(name) for name in ("trainer-launch", "torch")},
    whos=("trainer-launch",),
)
