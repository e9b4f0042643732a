"""What our own processes leave for each other: variables, and files of the private directory of a run.

PID 1, the agents of mpirun, the workers and `status` tell each other things here; nobody else writes to it.
Messages are in `membership/protocol.py`, `preflight/cluster/protocol.py` and `pytorch/messages.py`. What a child is
told when it is started is a value that `model/launch_spec.py` prints, or its arguments.
Little is imported: training scripts load this with `report()`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping

from trainer_launch.host import atomic_file

START = "trainer-launch-"  # how the directory's name begins
SHM = "/dev/shm"  # where it is when nothing else may be written

# -- the table: a test compares it with the code -----------------------------------------------

VARIABLE = "TRAINER_LAUNCH_RUN_DIR"
MPI_SPEC = "TRAINER_LAUNCH_MPI"
MPI_RUN = "TRAINER_LAUNCH_MPI_RUN"
NODE_LABEL = "TRAINER_LAUNCH_NODE_LABEL"
INSIDE = "TRAINER_LAUNCH_INSIDE"
LAUNCHER = "launcher.json"
FAILURE = "failure.json"
NEWS = "news.jsonl"
STACKS = "stacks."
PROGRESS, PROGRESS_END = "progress-", ".json"
ERRORS = "torch"

# By name: who sets it, who reads it, what it is.
VARIABLES = {
    VARIABLE: ("PID 1", "all that it starts", "the runtime directory, by which they are known as the run's own"),
    MPI_SPEC: ("PID 1", "the agent that runs mpirun or horovodrun", "its launch spec"),
    MPI_RUN: ("the agent", "the agent, on each host", "of which start a rank is, so that it is found on its host"),
    NODE_LABEL: ("a rehearsal", "its launchers", "what their lines begin with"),
    INSIDE: ("a rehearsal", "the same in namespaces of its own", "the number that it has there"),
}
# By name or its beginning: who writes it, who reads it, what it is.
FILES = {
    LAUNCHER: ("PID 1", "status", "how it stands"),
    FAILURE: ("torchrun, or the agent of mpirun", "PID 1", "the first failure"),
    NEWS: ("PID 1, or torchrun's plug-in", "PID 1, status, a rehearsal", "generations and starts, a line each"),
    STACKS: ("a forked worker, by local rank", "PID 1", "what its threads do, when PID 1 asks"),
    PROGRESS: ("a worker, by local rank", "PID 1, status", "what it has said by `report()`"),
    ERRORS: ("torch's @record in a worker", "PID 1", "the error that ended it, unless the user names a directory"),
}
# What programs of others read there.
SSH = "ssh"  # keys and configuration; an agent adds its pid
HOROVOD = "horovod"  # likewise: what horovodrun finds as ssh, and its sessions
HOSTFILE = "hostfile"  # of mpirun's present start


def errors_in(folder: str) -> str:
    """Where torch keeps its workers' error files, unless the user names a folder for them."""
    return f"{folder}/{ERRORS}"


def progress_file(folder: str, local_rank: int) -> str:
    """What a worker has said by `report()`."""
    return f"{folder}/{PROGRESS}{local_rank}{PROGRESS_END}"


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
