"""What a call of `trainer_launch.report()` costs the training loop."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping

from benchmarks.measuring import Case, Section, Setup
from benchmarks.peers import version_here

CALLS = 200_000
WRITES = 500
LIMIT_S = 60.0
METRICS = {"loss": 0.4312, "lr": 3e-4, "grad_norm": 1.02, "tokens_per_s": 81234.0, "mem": 61.2}
KINDS: Mapping[str, Mapping[str, object]] = {
    "progress": {"progress": 0.5},
    "progress, eta, 5 metrics": {"progress": 0.5, "eta_s": 60.0, "metrics": METRICS},
}
WHOS = ("held back", "written", "without a launcher")


def micros(calls: int, **given: object) -> float:
    """The cost of one call in this process, in microseconds."""
    from trainer_launch import report
    from trainer_launch.observability import report as reporting

    if calls == WRITES:
        reporting.EVERY_S = 0.0  # every call is due
    began_s = time.perf_counter()
    for _ in range(calls):
        report(**given)  # type: ignore[arg-type]
    return (time.perf_counter() - began_s) / calls * 1e6


def once(who: str) -> Mapping[str, float]:
    """Each kind of call, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        env = {name: value for name, value in os.environ.items() if name != "TRAINER_LAUNCH_RUN_DIR"}
        if who != "without a launcher":
            env["TRAINER_LAUNCH_RUN_DIR"] = folder
        argv = (sys.executable, "-m", "benchmarks.report", str(WRITES if who == "written" else CALLS))
        told = subprocess.check_output(argv, env=env, text=True, timeout=LIMIT_S)
    return dict(zip(KINDS, map(float, told.split()), strict=True))


@contextlib.contextmanager
def opened() -> Iterator[Setup]:
    """Each state that a program may be in."""
    rows = dict.fromkeys(KINDS, "us")
    yield Setup([Case(who, rows, functools.partial(once, who), LIMIT_S, 1.0) for who in WHOS])


SECTION = Section(
    name="report",
    title="One call of report()",
    about="In a training loop: held back, as nearly all calls are; written to the launcher; without a launcher.",
    open=opened,
    versions=lambda: {"trainer-launch": version_here("trainer-launch"), "Python": sys.version.split()[0]},
    whos=WHOS,
)


if __name__ == "__main__":
    print(*(micros(int(sys.argv[1]), **given) for given in KINDS.values()))
