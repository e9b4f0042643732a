"""How long rehearsals take on this machine: many pods to their first step, and every example to its end.

    python -m benchmarks.rehearse [--pods N] [--fault TEXT] [pods | NAME of docker/examples ...]

Without names: 16 pods, one pod, and all examples that can run here. What to hold it against: 16 pods with one gloo
worker each within 20 s on 2 cores, each example within 90 s. With --fault, the examples that are manifests get it.
An example's framework is looked for in this Python, then in the environments that tests/setup makes (once, which
takes minutes). Prints figures with the machine's load, judges nothing.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers import ROOT, SETUP, Absent, made

EXAMPLES = ROOT / "docker" / "examples"
PODS = 16
LIMIT_S = 600
MISCONFIGURED = 2  # what the launcher ends with when something it needs is not there
STEP = re.compile(r"\bstep[ =:]+[1-9]", re.IGNORECASE)
TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
with open(sys.argv[1], "a") as file:
    file.write(f"{time.monotonic()}\\n")
dist.barrier()
os._exit(0)
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that ran to its end; seconds from its start."""

    code: int
    first_step_s: float | None  # to the first line that tells a step
    wall_s: float
    cpu_s: float  # of all processes that were waited for
    last_line: str


@dataclass(frozen=True, slots=True)
class Example:
    """A command line that runs one of docker/examples."""

    name: str
    words: tuple[str, ...]  # after the Python
    scripts: tuple[Path, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pods", type=int, default=PODS)
    parser.add_argument("--fault")
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} CPUs, Python {sys.version.split()[0]}, load {load()} at the start\n")
    if not asked.names or "pods" in asked.names:
        print(f"{'gloo, one worker each':<34}{'first step':>12}{'CPU':>10}{'load':>8}")
        for nodes in (1, asked.pods):
            step_s, cpu_s = to_first_step(nodes)
            print(f"{f'local --nodes {nodes}':<34}{step_s:>10.1f} s{cpu_s:>8.1f} s{load():>8}")
        print()
    chosen = [one for one in examples() if not asked.names or one.name in asked.names]
    if chosen:
        print(f"{'example':<34}{'first step':>12}{'end':>10}{'CPU':>10}{'load':>8}  exit")
    for example in chosen:
        print(row(example, asked.fault), flush=True)


def load() -> str:
    """The machine's load of the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


# -- many pods ----------------------------------------------------------------------------------


def to_first_step(nodes: int) -> tuple[float, float]:
    """Seconds until all workers have reduced once, and CPU seconds to the end."""
    with tempfile.TemporaryDirectory() as folder:
        script, notes = Path(folder, "train.py"), Path(folder, "notes")
        script.write_text(TRAIN)
        words = ("-m", "trainer_launch", "rehearse", "--nodes", str(nodes), "--", str(script), str(notes))
        start_s = time.monotonic()
        ended = run((sys.executable, *words), environment(), Path(folder))
        if ended.code:
            raise SystemExit(f"rehearse: {words} ended with {ended.code}: {ended.last_line}")
        return max(float(line) for line in notes.read_text().splitlines()) - start_s, ended.cpu_s


# -- examples -----------------------------------------------------------------------------------


def examples() -> list[Example]:
    """All of docker/examples: manifests, programs that run by themselves, and the one of `make demo`."""
    module = ("-m", "trainer_launch", "rehearse")
    found = []
    for path in sorted(EXAMPLES.glob("*.yaml")):
        named = [EXAMPLES / name for name in set(re.findall(r"\w+\.py\b", path.read_text()))]
        scripts = tuple(script for script in named if script.exists())
        found.append(Example(path.name, (*module, "-f", path.name), scripts))
    alone = [path for path in sorted(EXAMPLES.glob("*.py")) if not path.name.startswith("train_")]
    found += [Example(path.name, (path.name,), (path,)) for path in alone]
    demo = EXAMPLES / "train_charlm.py"
    words = (*module, "--nodes", "2", "--nproc-per-node", "2", "--", demo.name)
    return [*found, Example(demo.name, words, (demo,))]


def row(example: Example, fault: str | None) -> str:
    """Run it; a line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            python, env = surroundings(example)
        except Absent as reason:
            return f"{example.name:<34}  not here: {reason}"
        words = [*example.words, *(("--fault", fault) if fault and "-f" in example.words else ())]
        ended = run((python, *words), {**env, "CHECKPOINTS": folder}, EXAMPLES)
    if ended.code == MISCONFIGURED:
        return f"{example.name:<34}  not here: {ended.last_line}"
    step = "-" if ended.first_step_s is None else f"{ended.first_step_s:.1f} s"
    told = f"{example.name:<34}{step:>12}{ended.wall_s:>8.1f} s{ended.cpu_s:>8.1f} s{load():>8}  {ended.code}"
    return told if ended.code == 0 else f"{told}: {ended.last_line}"


def surroundings(example: Example) -> tuple[str, dict[str, str]]:
    """The Python that has what the example imports, and the variables.

    Raises:
        Absent: there is none.
    """
    missing = sorted(name for name in imported(example.scripts) if importlib.util.find_spec(name) is None)
    if not missing:
        return sys.executable, environment()
    if missing == ["horovod"]:
        site = made("horovod.sh")
        more = {"PYTHONPATH": os.pathsep.join((str(ROOT), site)), "PATH": f"{site}/bin:{os.environ['PATH']}"}
        return sys.executable, environment() | more
    for path in sorted((SETUP / "frameworks").glob("*.txt")):
        if missing[0] in path.read_text():
            return made("frameworks.sh", path.stem), environment()
    raise Absent(f"no module {', '.join(missing)}")


def imported(scripts: Sequence[Path]) -> set[str]:
    """What they and their neighbours import as they begin, and Python does not bring."""
    found: set[str] = set()
    left, seen = list(scripts), set(scripts)
    while left:
        for node in ast.parse(left.pop().read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                beside = EXAMPLES / f"{top}.py"
                if not beside.exists():
                    found.add(top)
                elif beside not in seen:
                    seen.add(beside)
                    left.append(beside)
    return found - set(sys.stdlib_module_names)


# -- running ------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Ours, with this tree's package and without GPUs."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> Ended:
    """Run a command to its end, or stop it in time."""
    before, start_s, step_s, last = cpu_s(), time.monotonic(), None, ""
    with subprocess.Popen(
        ["timeout", "--kill-after=30", str(LIMIT_S), *argv],
        env=env,
        cwd=cwd,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = line.strip() or last
            if step_s is None and STEP.search(line):
                step_s = time.monotonic() - start_s
    return Ended(process.returncode, step_s, time.monotonic() - start_s, cpu_s() - before, last)


def cpu_s() -> float:
    """Of all processes that ended below us."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
