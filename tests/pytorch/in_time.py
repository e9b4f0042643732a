"""Run a script whose rank 0 waits in step 40 until a rank is dead: a fault comes in time on a machine of any speed.

usage: in_time.py RANK SCRIPT; the file `lock` is in the working directory.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import sys

import trainer_launch

report, lock = trainer_launch.report, open("lock", "a")  # noqa: SIM115
if os.environ["RANK"] == sys.argv[1]:
    fcntl.flock(lock, fcntl.LOCK_EX)


def report_and_wait(step: int) -> None:
    report(step=step)
    if step == 40:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_UN)


trainer_launch.report = report_and_wait  # type: ignore[assignment]
runpy.run_path(sys.argv[2], run_name="__main__")
