"""Limits and counters of the container's own cgroup, v1 and v2; and the other limits of its processes.

A limit may sit on any ancestor, so the smallest on the way up counts. Inside a container the cgroup namespace
usually shows only the own group, as the root of the mount; without that namespace /proc/self/cgroup names a path
of the host that is not mounted here, and the mount's root is the own group as well.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from trainer_launch.host import files

# v1 reports "no limit" as the largest number of whole pages.
_V1_NO_LIMIT = 1 << 60
_MAX_DIGITS = 20  # of 64 bits
_V1_USAGE = ("memory.usage_in_bytes", "total_inactive_file ")


class Groups(Struct, frozen=True, kw_only=True):
    """The own groups' folders from the innermost outwards, by controller; v2 has one tree for all."""

    version: int  # 0: no cgroup file system is mounted
    cpu: tuple[Path, ...] = ()
    memory: tuple[Path, ...] = ()
    pids: tuple[Path, ...] = ()


def own_groups(root: Path = Path("/")) -> Groups:
    """Find the own groups below `root`."""
    mount = root / "sys/fs/cgroup"
    paths = _paths(root / "proc/self/cgroup")
    if (mount / "cgroup.controllers").exists():
        chain = tuple(_chain(mount, paths.get("", "/")))
        return Groups(version=2, cpu=chain, memory=chain, pids=chain)
    if not mount.is_dir():
        return Groups(version=0)
    return Groups(
        version=1,
        cpu=_v1_chain(mount, paths, "cpu"),
        memory=_v1_chain(mount, paths, "memory"),
        pids=_v1_chain(mount, paths, "pids"),
    )


def cpu_quota(groups: Groups) -> float | None:
    """CPUs' worth of time per period, None without a limit."""
    read = _v2_quota if groups.version == 2 else _v1_quota
    quotas = [q for q in map(read, groups.cpu) if q is not None]
    return min(quotas, default=None)


def memory_limit_bytes(groups: Groups) -> int | None:
    """The memory limit, None without one."""
    name = "memory.max" if groups.version == 2 else "memory.limit_in_bytes"
    limits = [_number(files.text(g / name)) for g in groups.memory]
    return min((n for n in limits if n is not None and n < _V1_NO_LIMIT), default=None)


def memory_peak_bytes(groups: Groups) -> int | None:
    """The most memory that the own group has had; None when the kernel does not say (v2 before 5.19)."""
    name = "memory.peak" if groups.version == 2 else "memory.max_usage_in_bytes"
    return _number(files.text(groups.memory[0] / name)) if groups.memory else None


def memory_used_bytes(groups: Groups) -> int | None:
    """The memory that the own group uses now, without file pages that the kernel drops before it kills."""
    if not groups.memory:
        return None
    usage, idle = ("memory.current", "inactive_file ") if groups.version == 2 else _V1_USAGE
    used = _number(files.text(groups.memory[0] / usage))
    stats = files.text(groups.memory[0] / "memory.stat").splitlines()
    idle_bytes = next((_number(line.removeprefix(idle)) for line in stats if line.startswith(idle)), 0)
    return None if used is None else max(0, used - (idle_bytes or 0))


def pids_left(groups: Groups) -> tuple[int, int] | None:
    """The limit of processes and threads that is nearest, and how many it still allows; None without a limit."""
    left = []
    for group in groups.pids:
        limit, used = (_number(files.text(group / name)) for name in ("pids.max", "pids.current"))
        if limit is not None:
            left.append((limit - (used or 0), limit))
    return min(((limit, rest) for rest, limit in left), key=lambda pair: pair[1], default=None)


def oom_kills(groups: Groups) -> int | None:
    """How many processes of the own group the kernel has killed for memory; None when it does not say."""
    if not groups.memory:
        return None
    name = "memory.events" if groups.version == 2 else "memory.oom_control"
    for line in files.text(groups.memory[0] / name).splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill":
            return _number(value)
    return None


def _paths(file: Path) -> dict[str, str]:
    """The own path by controller; v2's is under the empty name. Lines read `id:controllers:path`."""
    paths: dict[str, str] = {}
    for line in files.text(file).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for name in controllers.split(","):
            paths[name] = path
    return paths


def _v1_chain(mount: Path, paths: dict[str, str], controller: str) -> tuple[Path, ...]:
    # Distributions mount cpu either alone or together with cpuacct.
    folders = [mount / controller, *sorted(mount.glob(f"*{controller},*")), *sorted(mount.glob(f"*,{controller}"))]
    folder = next((f for f in folders if f.is_dir()), None)
    return () if folder is None else tuple(_chain(folder, paths.get(controller, "/")))


def _chain(mount: Path, path: str) -> Iterator[Path]:
    own = mount / path.lstrip("/")
    if ".." in Path(path).parts or not os.path.isdir(own):
        own = mount
    while own != mount:
        yield own
        own = own.parent
    yield mount


def _v2_quota(group: Path) -> float | None:
    quota, _, period = files.text(group / "cpu.max").partition(" ")
    return _ratio(_number(quota), _number(period))


def _v1_quota(group: Path) -> float | None:
    return _ratio(_number(files.text(group / "cpu.cfs_quota_us")), _number(files.text(group / "cpu.cfs_period_us")))


def _ratio(quota: int | None, period: int | None) -> float | None:
    return None if quota is None or not period or quota <= 0 else quota / period


def _number(text: str) -> int | None:
    # "max" in v2 and "-1" in v1 both mean: no limit.
    stripped = text.strip()
    return int(stripped) if stripped.isascii() and stripped.isdigit() and len(stripped) <= _MAX_DIGITS else None


class Limits(Struct, frozen=True, kw_only=True):
    """None always means: no limit, or the kernel does not say."""

    nofile_soft: int | None
    nofile_hard: int | None
    memlock_bytes: int | None


def process_limits() -> Limits:
    """Read them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(
        nofile_soft=_finite(soft),
        nofile_hard=_finite(hard),
        memlock_bytes=_finite(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
    )


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit
