"""What this machine is, as the container sees it: CPUs, limits, accelerators, shared memory. Only reads."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from trainer_launch.host import cgroup, gpu, shm
from trainer_launch.model import Cpus, Host


def probe(env: Mapping[str, str], root: Path = Path("/")) -> Host:
    """Look at this machine; `env` holds the variables that hide devices, `root` stands for `/` in tests."""
    groups = cgroup.own_groups(root)
    room = shm.room(str(root / "dev/shm"))
    return Host(
        hostname=socket.gethostname(),
        cpus=Cpus(affinity=_affinity(), quota=cgroup.cpu_quota(groups)),
        gpus=gpu.count(env, root),
        memory_limit_bytes=cgroup.memory_limit_bytes(groups),
        memory_used_bytes=cgroup.memory_used_bytes(groups),
        shm_bytes=None if room is None else room.size_bytes,
        shm_free_bytes=None if room is None else room.free_bytes,
        may_enlarge_shm=shm.may_enlarge(root),
    )


def _affinity() -> int:
    # Only Linux tells the mask; elsewhere (a laptop's rehearsal) all CPUs may be used.
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
