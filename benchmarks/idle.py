"""What a process 1 costs while its program does nothing, and how long a signal takes through it."""

from __future__ import annotations

import functools
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import peers, trees
from benchmarks.measuring import Case, Reading, Section, Setup, wait_for
from benchmarks.peers import versions_here
from tests.cli.launching import LAUNCHER

SIGNALS = 20
IDLE_S = 3.0
SETTLE_S = 0.5
LIMIT_S = 60.0
ROWS = {"memory (PSS)": "MB", "wake-ups": "/s", "CPU while idle": "ms/s", "a signal": "ms"}
# Says when each SIGUSR1 came; blocked before the first line, so that none is lost.
PROGRAM = """
import os, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(file, b"0\\n")
while True:
    signal.sigwait({signal.SIGUSR1})
    os.write(file, b"%.9f\\n" % time.monotonic())
"""
Send = Callable[[], object]
OWN_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@dataclass(frozen=True, slots=True)
class Init:
    """A process 1. `argv` takes a folder of its own and the program; `sender` gives what sends a signal."""

    who: str
    argv: Callable[[Path, tuple[str, ...]], tuple[str, ...]]
    sender: Callable[[Path, psutil.Process], Send]
    note: str = ""
    package: str = ""  # Debian's


def _by_signal(_folder: Path, first: psutil.Process) -> Send:
    return functools.partial(os.kill, first.pid, signal.SIGUSR1)


def _before(*words: str) -> Callable[[Path, tuple[str, ...]], tuple[str, ...]]:
    return lambda _folder, program: (*words, *program)


def _to_program(_folder: Path, first: psutil.Process) -> Send:
    """To the program alone, with nobody between: what nobody can be faster than."""
    program = next(process for process in (first, *first.children()) if _is_program(process))
    return functools.partial(os.kill, program.pid, signal.SIGUSR1)


def _s6(folder: Path, program: tuple[str, ...]) -> tuple[str, ...]:
    """A scan folder with one service."""
    service = folder / "services" / "program"
    service.mkdir(parents=True)
    quoted = " ".join(f"'{word}'" for word in program)
    (service / "run").write_text(f"#!/bin/sh\nexec {quoted}\n")
    (service / "run").chmod(0o755)
    return (peers.debian("s6-svscan", "s6"), str(folder / "services"))


def _by_s6(folder: Path, _first: psutil.Process) -> Send:
    words = (peers.debian("s6-svc", "s6"), "-1", str(folder / "services" / "program"))
    return functools.partial(subprocess.run, words, check=True)


def once(init: Init) -> Mapping[str, float | Reading]:
    """Start it, let it be idle, send signals one after another, end it."""
    with trees.folder() as name:
        folder, heard = Path(name), Path(name, "heard")
        program = (sys.executable, "-S", "-c", PROGRAM.replace("'", '"'), str(heard))
        with trees.started((*_namespace(), *init.argv(folder, program)), {}, name) as job:
            job.wait_for(heard.exists, "the program's start", 30.0)
            time.sleep(SETTLE_S)
            first = _first(job)
            beside = [one for one in (first, *first.children(recursive=True)) if not _is_program(one)]
            cpu = trees.cpu_s(beside)
            woken = trees.wakeups(beside, IDLE_S)
            used = (trees.cpu_s(beside) - cpu) / IDLE_S * 1000
            memory = trees.pss_mb(beside)
            send = init.sender(folder, first)
            took = [_signalled(send, heard) * 1000 for _ in range(SIGNALS)]
        values = (memory, woken, used, Reading(statistics.median(took), init.note))
        return dict(zip(ROWS, values, strict=True))


def _is_program(process: psutil.Process) -> bool:
    """The program itself, not what starts it, though both have its words."""
    return process.cmdline()[:2] == [sys.executable, "-S"]


def _namespace() -> tuple[str, ...]:
    return OWN_NAMESPACE if os.geteuid() == 0 else ()


def _first(job: trees.Started) -> psutil.Process:
    """Process 1 of the namespace, or of what was started where it has none."""
    started = psutil.Process(job.process.pid)
    return started.children()[0] if _namespace() else started


def _signalled(send: Send, heard: Path) -> float:
    """Seconds until the program has heard a signal."""
    before = heard.stat().st_size
    sent_s = time.monotonic()
    send()
    wait_for(lambda: heard.stat().st_size > before, "a signal", 10.0, 0.002)
    return float(heard.read_text().split()[-1]) - sent_s


INITS = (
    Init(
        "trainer-launch", _before(*LAUNCHER, "run", "--log-level", "warning", "--engine", "plain", "--"), _by_signal
    ),
    *(Init(name, _before(name, "--"), _by_signal, package=name) for name in ("tini", "dumb-init")),
    Init("s6", _s6, _by_s6, "by `s6-svc -1`, as it forwards none", package="s6"),
    Init("no init", _before("sh", "-c", '"$@"; exit $?', "sh"), _to_program, "sent to the program itself"),
)


def opened() -> Setup:
    """Each init that is here."""

    def made(who: str) -> Init:
        init = next(one for one in INITS if one.who == who)
        if init.package:
            peers.debian({"s6": "s6-svscan"}.get(who, who), init.package)
        return init

    found, absent = peers.those_here({init.who: made for init in INITS})
    return Setup([Case(one.who, ROWS, functools.partial(once, one), LIMIT_S, 8.0) for one in found], absent)


def versions() -> dict[str, str]:
    """Ours, Python's, and Debian's packages."""
    found = versions_here("trainer-launch", "Python")
    return found | {one.package: peers.version_of_debian(one.package) for one in INITS if one.package}


SECTION = Section(
    name="idle",
    title="PID 1 while idle",
    about="PID 1 of its own process namespace, with one program that waits for a signal.",
    loses_because="The other inits are small C programs; a Python interpreter alone needs 10 MB.",
    beside=("trainer-launch", "tini", "dumb-init", "s6", "no init"),
    shows=("memory (PSS)", "wake-ups", "a signal"),
    open=opened,
    versions=versions,
    whos=tuple(init.who for init in INITS),
)
