"""The machine as the container sees it: CPUs, limits, accelerators, shared memory. Only reads."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from trainer_launch.host import cgroup, files, shm
from trainer_launch.model import Cpus, Gpus, Host
from trainer_launch.model.value_parsers import parse_number


def probe(env: Mapping[str, str], root: Path = Path("/")) -> Host:
    """Look at this machine; `env` holds the variables that hide devices, `root` stands for `/` in tests."""
    groups = cgroup.own_groups(root)
    space = shm.space(str(root / "dev/shm"))
    return Host(
        hostname=socket.gethostname(),
        cpus=Cpus(affinity=len(usable_cpus()), quota=cgroup.cpu_quota(groups)),
        gpus=count(env, root),
        memory_limit_bytes=cgroup.memory_limit_bytes(groups),
        memory_used_bytes=cgroup.memory_used_bytes(groups),
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
