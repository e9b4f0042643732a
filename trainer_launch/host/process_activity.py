"""What a process has done so far, from /proc: CPU time, wake-ups of its main thread, its state. Reads only."""

from __future__ import annotations

import os
import re

from trainer_launch.model.errors import MALFORMED
from trainer_launch.model.frozen import dataclass

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SWITCHES = re.compile(rb"^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Activity:
    """One process, with all its threads."""

    state: str  # of the main thread; T: suspended, t: held by a debugger, D: in the kernel
    cpu_s: float
    switches: int  # how often its main thread went to sleep by itself


def read(pid: int, proc: str = "/proc") -> Activity | None:
    """Look at one process, None when it is gone."""
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        with open(f"{proc}/{pid}/status", "rb") as file:
            switches = _SWITCHES.search(file.read())
        cpu_s = (int(fields[11]) + int(fields[12])) * _TICK_S
        return Activity(fields[0].decode(), cpu_s, int(switches[1]) if switches else 0)
    except (FileNotFoundError, ProcessLookupError, *MALFORMED):  # a sandbox may show less than Linux
        return None
