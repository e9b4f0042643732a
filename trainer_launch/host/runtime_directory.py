"""The private folder of one run: its name, its files, and how they are written.

PID 1, the agents of mpirun, the workers and `status` tell each other things here. Little is imported: training
scripts load this with `report()`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping

from trainer_launch.host import atomic_file

VARIABLE = "TRAINER_LAUNCH_RUN_DIR"  # by which all that a launcher starts knows the folder
START = "trainer-launch-"  # how the folder's name begins
SHM = "/dev/shm"  # where it is when nothing else may be written

# By PID 1.
LAUNCHER = "launcher.json"  # how it stands, for `status`
# By what runs mpirun.
SSH = "ssh"  # a folder for each, by pid: key and configuration
HOROVOD = "horovod"  # likewise: what horovodrun finds as ssh, and its sessions
HOSTFILE = "hostfile"  # of the present start
# By torchrun or what runs mpirun, for PID 1.
FAILURE = "failure.json"  # the first failure
# By PID 1, or by the plug-in for torchrun.
NEWS = "news.jsonl"  # generations and starts of workers, a line each
# By each worker, by local rank.
STACKS = "stacks."  # what its threads do, when PID 1 asks
PROGRESS, PROGRESS_END = "progress-", ".json"  # what it has said by `report()`


def errors_in(folder: str) -> str:
    """Where torch keeps its workers' error files, unless the user names a folder for them."""
    return f"{folder}/torch"


def replace(path: str, values: Mapping[str, object]) -> None:
    """Write a file whole or not at all."""
    atomic_file.replace(path, json.dumps(values).encode())


def tell(folder: str, event: str, **values: str | int | None) -> None:
    """Add a line to the news; nobody is waited for, and a full disk is nobody's failure. "": nobody is told."""
    if not folder:
        return
    line = json.dumps({"time_s": time.time(), "event": event, **values})
    with contextlib.suppress(OSError):
        fd = os.open(f"{folder}/{NEWS}", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line.encode() + b"\n")
        finally:
            os.close(fd)
