"""Start-up: what each launcher costs before, beside and after a program that needs no time itself."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks import trees
from benchmarks.measuring import Case, Section, Setup
from benchmarks.peers import RELEASE, Launcher, launchers, versions_of_launchers
from tests.cli.launching import LAUNCHER

SETTLE_S = 0.5
IDLE_S = 2.0
LIMIT_S = 60.0
WORDS = (*LAUNCHER, *("run", "--log-level", "warning", "--engine", "plain", "--"), sys.executable)
PLAIN = Launcher("trainer-launch, plain", lambda _: WORDS, {}, 0.5)
PROGRAM = """
import os, time
with open("began.new", "w") as file:
    file.write(f"{time.monotonic()} {os.getpid()}")
os.rename("began.new", "began")
while not os.path.exists("go"):
    time.sleep(0.002)
with open("ended.new", "w") as file:
    file.write(str(time.monotonic()))
os.rename("ended.new", "ended")
"""
ROWS = {
    "to the program's first line": "s",
    "CPU until then": "s",
    "memory beside the program (PSS)": "MB",
    "wake-ups beside the program": "/s",
    "from the program's end to the launcher's": "s",
}


def once(launcher: Launcher) -> Mapping[str, float]:
    """One start, a while of doing nothing, one end."""
    with trees.folder() as folder, launcher.beside() as more:
        program, began, ended = (Path(folder, name) for name in ("program.py", "began", "ended"))
        program.write_text(PROGRAM)
        words = (*launcher.command(1), str(program))
        with trees.started(words, {**launcher.env, **(more or {})}, folder) as job:
            job.wait_for(began.exists, "the program's first line", LIMIT_S)
            at_s, pid = began.read_text().split()
            used_s = trees.cpu_s(job.others([int(pid)]))
            time.sleep(SETTLE_S)
            others = job.others([int(pid)])
            memory, woken = trees.pss_mb(others), trees.wakeups(others, IDLE_S)
            Path(folder, "go").touch()
            job.process.wait()
            over_s = time.monotonic() - float(ended.read_text())
        return dict(zip(ROWS, (float(at_s) - job.began_s, used_s, memory, woken, over_s), strict=True))


def opened() -> Setup:
    """Each launcher that is here."""
    found, absent = launchers()
    programs = [found[0], PLAIN, *(one for one in found[1:] if "store off" not in one.who)]
    cases = [
        Case(one.who, ROWS, functools.partial(once, one), LIMIT_S * 2, one.about_s + SETTLE_S + IDLE_S + 2)
        for one in programs
    ]
    return Setup(cases, absent)


SECTION = Section(
    name="startup",
    title="Cost beside the workers",
    about=f"One worker that imports nothing and then idles for {IDLE_S:g} s. `shell` is a loop in bash.",
    loses_because="Torch is imported before a worker is forked, even one that imports nothing.",
    pictured=("memory beside the program (PSS)",),
    beside=("trainer-launch", "torchrun", "ft_launcher", "dlrover-run", "shell"),
    shows=("to the program's first line", "memory beside the program (PSS)", "wake-ups beside the program"),
    open=opened,
    versions=versions_of_launchers,
    whos=(
        *("trainer-launch", "trainer-launch, plain", RELEASE, "torchrun", "ft_launcher", "dlrover-run"),
        "shell",
    ),
)
