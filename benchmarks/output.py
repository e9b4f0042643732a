"""How fast labelled output is carried, from the writers' pipes to whoever reads the container's."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.measuring import Case, Failed, Section, Setup
from benchmarks.peers import TORCHRUN, versions_here
from tests.cli.launching import LAUNCHER, clean_env

MEGABYTES = 128  # of all writers together
WRITERS = (1, 4, 8)
LIMIT_S = 120.0
LINE = b"epoch 3 step 1200 loss 0.4312 lr 3.0e-4 grad_norm 1.02 tokens/s 81234 mem 61.2\n"
WRITER = f"""
import os, sys
line = {LINE!r}
rank = os.environ.get("RANK", "0").encode()
block = (rank + line[len(rank):]) * 800
for _ in range(int(sys.argv[1]) // len(block)):
    view = memoryview(block)
    while view:
        view = view[os.write(1, view):]
os._exit(0)
"""
CAT = 'for i in $(seq "$0"); do "$@" | cat & done; wait'


def commands(writers: int, folder: str) -> dict[str, tuple[str, ...]]:
    """What stands before the writer; `cat` labels nothing."""
    ours = (*LAUNCHER, "run", "--log-level", "error", "--prefix", "--start-method", "exec")
    tee = ("--log-dir", folder, "--tee", "3", "--standalone")
    return {
        "trainer-launch --prefix": (*ours, f"--nproc-per-node={writers}", "--"),
        "torchrun --tee 3": (*TORCHRUN, *tee, f"--nproc-per-node={writers}"),
        "cat": ("bash", "-c", CAT, str(writers), sys.executable, "-S"),
    }


WHOS = tuple(commands(1, ""))


def once(who: str, writers: int) -> Mapping[str, float | str]:
    """MB of the writers' own bytes for each second between the first and the last byte that arrive."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "writer.py")
        script.write_text(WRITER)
        each = MEGABYTES * 1_000_000 // writers // (len(LINE) * 800) * (len(LINE) * 800)
        argv = (*commands(writers, folder)[who], str(script), str(each))
        env = clean_env({"OMP_NUM_THREADS": "1"})
        with subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            try:
                arrived, took_s = _read(process.stdout.fileno())
            finally:
                process.kill()
        if arrived < each * writers:
            raise Failed(f"only {arrived / 1e6:.0f} of {each * writers / 1e6:.0f} MB arrived")
        return {_row(writers): each * writers / 1e6 / took_s}


def _read(fd: int) -> tuple[int, float]:
    """Bytes until the end, and the seconds from the first to the last of them."""
    arrived, first_s, last_s = 0, None, 0.0
    while data := os.read(fd, 1 << 20):
        last_s = time.monotonic()
        first_s = first_s or last_s
        arrived += len(data)
    return arrived, max(last_s - (first_s or last_s), 1e-6)


def _row(writers: int) -> str:
    return f"{writers} writer{'s' * (writers > 1)}"


def opened() -> Setup:
    """Each way with each number of writers."""
    cases = [
        Case(who, {_row(n): "MB/s"}, functools.partial(once, who, n), LIMIT_S, 4.0) for n in WRITERS for who in WHOS
    ]
    return Setup(cases)


SECTION = Section(
    name="output",
    title="Output",
    about=f"{MEGABYTES} MB of lines of {len(LINE)} bytes, written by 1, 4 and 8 workers, each line with its label.",
    loses_because="`cat` copies blocks unchanged; the launcher labels each line.",
    open=opened,
    versions=lambda: versions_here("trainer-launch", "torch"),
    whos=WHOS,
)
