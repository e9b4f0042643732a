"""The machine as the container sees it: CPUs, limits, accelerators, shared memory. Only reads.

Limits and counters are those of the container's own cgroup, v1 or v2. A limit may sit on any ancestor, so the
smallest on the way up counts. Inside a container the cgroup namespace usually shows only the own group, as the root
of the mount. Without that namespace /proc/self/cgroup names a path of the host that is not mounted here, and the
root of the mount is the own group as well.
"""

from __future__ import annotations

import os
import re
import resource
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from trainer_launch.host import files, shm
from trainer_launch.model import Cpus, Gpus, Host
from trainer_launch.model.value_parsers import parse_number


def probe(env: Mapping[str, str], root: Path = Path("/")) -> Host:
    """Look at this machine; `env` holds the variables that hide devices, `root` stands for `/` in tests."""
    groups = own_groups(root)
    space = shm.space(str(root / "dev/shm"))
    return Host(
        hostname=socket.gethostname(),
        cpus=Cpus(affinity=len(usable_cpus()), quota=cpu_quota(groups)),
        gpus=count(env, root),
        memory_limit_bytes=memory_limit_bytes(groups),
        memory_used_bytes=memory_used_bytes(groups),
        shm_bytes=None if space is None else space.size_bytes,
        shm_free_bytes=None if space is None else space.free_bytes,
        may_enlarge_shm=shm.may_enlarge(root),
    )


_NODE_NAMES = ("NODE_NAME", "K8S_NODE_NAME", "KUBE_NODE_NAME", "KUBERNETES_NODE_NAME", "MY_NODE_NAME")
_MAX_NAME = 253


def machine_name(env: Mapping[str, str], node: str, root: Path = Path("/")) -> str:
    """The name of this machine: the Kubernetes node, else the kernel's boot ID with this node's name.

    All containers of a machine have the same boot ID until it is booted again.
    """
    given = next((env[name].strip() for name in _NODE_NAMES if env.get(name, "").strip()), None)
    if given is None:
        boot = files.LiveFiles(_MAX_NAME).read(str(root / "proc/sys/kernel/random/boot_id"))
        given = f"{node[: _MAX_NAME - 40]} {boot.decode(errors='replace').strip()}" if boot else ""
    return given[:_MAX_NAME] if given.isascii() and given.isprintable() else ""


def usable_cpus() -> list[int]:
    """CPUs in the scheduler's mask. Only Linux tells it; elsewhere (a laptop's rehearsal) all may be used."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:
        return list(range(os.cpu_count() or 1))


class DeviceKind(Struct, frozen=True):
    """How the devices of one kind are counted without their driver's library."""

    device: str  # torch's word; ROCm has CUDA's
    name: str  # for people
    folder: str  # its entries whose names match `entry` are the devices
    entry: str
    hidden_by: tuple[str, ...]  # variables
    proof: str = ""  # a file of {entry} that has to contain `says`
    says: str = ""
    needs: str = ""  # a file without which there is none
    parts: tuple[str, ...] = ()  # patterns of {entry}: as many devices as one of them finds
    by_index: bool = True  # the variables count from 0 what is here; False: they number the whole machine's devices


CUDA = ("CUDA_VISIBLE_DEVICES",)
ROCM = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", *CUDA)
_GAUDI = ("HABANA_VISIBLE_MODULES", "HABANA_VISIBLE_DEVICES")
_TPU = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")
_NVIDIA, KFD, _VENDOR = "in /dev", "sys/class/kfd/kfd/topology/nodes", "sys/class/accel/{entry}/device/vendor"
_DISCRETE = r"(?s)(?=.*PCI_ID=8086:)(?!.*PCI_SLOT_NAME=0000:00:02\.0)"
_TILES = "sys/class/drm/{entry}/device/tile[0-9]*", "sys/class/drm/{entry}/device/drm/card*/gt/gt[0-9]*"
# The first kind of which there are devices is the one. MTIA is not here: torch asks a library that is not public,
# and no file tells its count. Sources:
# WSL has one device file for all GPUs, and no count without the driver's library: one is what torch sees most.
# AMD: gpu_id is 0 for a CPU (Linux, amdkfd/kfd_topology.c).
# XPU: torch takes discrete GPUs (c10/xpu/XPUFunctions.cpp); the integrated one is at 00:02.0. Each tile is a
#   device unless ZE_FLAT_DEVICE_HIERARCHY is COMPOSITE (Level Zero's specification): xe's tile*, i915's gt*.
# Gaudi: Linux's accel subsystem, /dev/hl* before it. The variables are for who mounts devices, too, and name
#   devices or modules of the machine (docs.habana.ai, Orchestration).
# Ascend: as Ray counts (python/ray/_private/accelerators/npu.py).
# TPU: as Ray counts (tpu.py beside it), with the PCI vendor as in JAX (jax/_src/hardware_utils.py).
KINDS = (
    DeviceKind("cuda", _NVIDIA, "dev", "nvidia[0-9]+", CUDA),
    DeviceKind("cuda", _NVIDIA, "dev", "dxg", CUDA, needs="usr/lib/wsl/lib/libcuda.so.1"),
    DeviceKind(
        *("cuda", "AMD devices", KFD, "[0-9]+", ROCM),
        *(f"{KFD}/{{entry}}/gpu_id", "[1-9]", "dev/kfd"),
    ),
    DeviceKind(
        *("xpu", "Intel XPU devices", "dev/dri", "renderD[0-9]+", ("ZE_AFFINITY_MASK",)),
        *("sys/class/drm/{entry}/device/uevent", _DISCRETE),
        parts=_TILES,
    ),
    DeviceKind("hpu", "Gaudi devices", "dev/accel", "accel[0-9]+", _GAUDI, _VENDOR, "0x1da3", by_index=False),
    DeviceKind("hpu", "Gaudi devices", "dev", "hl[0-9]+", _GAUDI, by_index=False),
    DeviceKind("npu", "Ascend devices", "dev", "davinci[0-9]+", ("ASCEND_RT_VISIBLE_DEVICES",)),
    DeviceKind("tpu", "TPU chips", "dev", "accel[0-9]+", _TPU, _VENDOR, "0x1ae0"),
    DeviceKind(
        "tpu", "TPU chips", "dev/vfio", "[0-9]+", _TPU, "sys/kernel/iommu_groups/{entry}/devices/*/vendor", "0x1ae0"
    ),
)
_MAX_NUMBER = 65_535
_COMPOSITE = "ZE_FLAT_DEVICE_HIERARCHY", "COMPOSITE"


def count(env: Mapping[str, str], root: Path = Path("/")) -> Gpus:
    """Count the accelerators as torch.accelerator does; variables narrow the count as the drivers do."""
    for kind in KINDS:
        there = _there(kind, env, root)
        if there:
            return _narrowed(env, there, kind)
    return Gpus(count=0, reason="no GPU device in /dev")


def _there(kind: DeviceKind, env: Mapping[str, str], root: Path) -> int:
    folder = root / kind.folder
    if not folder.is_dir() or not (root / kind.needs).exists():
        return 0
    entries = [entry.name for entry in folder.iterdir() if re.fullmatch(kind.entry, entry.name)]
    proven = [entry for entry in entries if not kind.proof or _is_proven(kind, entry, root)]
    parts = () if env.get(_COMPOSITE[0], "").upper() == _COMPOSITE[1] else kind.parts
    return sum(max((1, *(len(_files_of(part, entry, root)) for part in parts))) for entry in proven)


def _is_proven(kind: DeviceKind, entry: str, root: Path) -> bool:
    return any(re.search(kind.says, files.text(path), re.IGNORECASE) for path in _files_of(kind.proof, entry, root))


def _files_of(pattern: str, entry: str, root: Path) -> list[Path]:
    return list(root.glob(pattern.format(entry=entry)))


def _narrowed(env: Mapping[str, str], there: int, kind: DeviceKind) -> Gpus:
    visible, why = there, [f"{there} {kind.name}"]
    for name in kind.hidden_by:
        value = env.get(name)
        if value is not None:
            visible = min(visible, len(listed(value, there, by_index=kind.by_index)))
            why.append(f"{name}={value or '(empty)'}")
    return Gpus(count=visible, reason=", ".join(why), device=kind.device, is_nvidia=kind.name == _NVIDIA)


def listed(value: str, there: int, *, by_index: bool = True) -> list[str]:
    """The devices that a list of indexes or UUIDs shows; the driver stops at the first invalid entry."""
    shown: list[str] = []
    if value == "all" and not by_index:
        return [str(number) for number in range(there)]
    for item in (part.strip().partition(".")[0] for part in value.split(",")):  # 0.1 is a part of an XPU
        valid = parse_number(item, 0, there - 1 if by_index else _MAX_NUMBER) is not None
        if not (valid or item.startswith(("GPU-", "MIG-"))) or item in shown:
            break
        shown.append(item)
    return shown


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
