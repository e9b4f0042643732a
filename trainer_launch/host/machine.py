"""What this machine is, as the container sees it: CPUs, limits, accelerators, shared memory. Only reads."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trainer_launch.host import cgroup, files, shm
from trainer_launch.model import Cpus, Gpus, Host
from trainer_launch.model.value_parsers import parse_number


def probe(env: Mapping[str, str], root: Path = Path("/")) -> Host:
    """Look at this machine; `env` holds the variables that hide devices, `root` stands for `/` in tests."""
    groups = cgroup.own_groups(root)
    space = shm.space(str(root / "dev/shm"))
    return Host(
        hostname=socket.gethostname(),
        cpus=Cpus(affinity=_affinity(), quota=cgroup.cpu_quota(groups)),
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
    """What tells this machine from others: the Kubernetes node, else the kernel's boot ID with this node's name.

    All containers of a machine have the same boot ID until it is booted again.
    """
    given = next((env[name].strip() for name in _NODE_NAMES if env.get(name, "").strip()), None)
    if given is None:
        boot = files.LiveFiles(_MAX_NAME).read(str(root / "proc/sys/kernel/random/boot_id"))
        given = f"{node[: _MAX_NAME - 40]} {boot.decode(errors='replace').strip()}" if boot else ""
    return given[:_MAX_NAME] if given.isascii() and given.isprintable() else ""


def _affinity() -> int:
    # Only Linux tells the mask; elsewhere (a laptop's rehearsal) all CPUs may be used.
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


# -- GPUs --------------------------------------------------------------------------------------


_NVIDIA_DEVICE = re.compile(r"nvidia[0-9]+")


def count(env: Mapping[str, str], root: Path = Path("/")) -> Gpus:
    """Count NVIDIA devices, else AMD's; CUDA_VISIBLE_DEVICES and its kin narrow the count as the drivers do."""
    nvidia = _nvidia_devices(root)
    if nvidia:
        return _narrowed(env, nvidia, f"{nvidia} in /dev", ("CUDA_VISIBLE_DEVICES",))
    amd = _amd_devices(root)
    if amd:
        hiding = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
        return replace(_narrowed(env, amd, f"{amd} AMD devices", hiding), is_nvidia=False)
    return Gpus(count=0, reason="no GPU device in /dev")


def _narrowed(env: Mapping[str, str], there: int, reason: str, hiding: tuple[str, ...]) -> Gpus:
    visible, why = there, [reason]
    for name in hiding:
        value = env.get(name)
        if value is not None:
            visible = min(visible, _listed(value, there))
            why.append(f"{name}={value or '(empty)'}")
    return Gpus(count=visible, reason=", ".join(why))


def _listed(value: str, there: int) -> int:
    """How many devices a list of indexes or UUIDs shows; the driver stops at the first invalid entry."""
    shown: set[str] = set()
    for item in (part.strip() for part in value.split(",")):
        valid = parse_number(item, 0, there - 1) is not None
        if not (valid or item.startswith(("GPU-", "MIG-"))) or item in shown:
            break
        shown.add(item)
    return len(shown)


def _nvidia_devices(root: Path) -> int:
    dev = root / "dev"
    if dev.is_dir():
        named = sum(1 for entry in dev.iterdir() if _NVIDIA_DEVICE.fullmatch(entry.name))
        if named:
            return named
    # WSL has one device file for all GPUs and no count without the driver's library: one is what torch sees most.
    return 1 if (dev / "dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists() else 0


def _amd_devices(root: Path) -> int:
    if not (root / "dev/kfd").exists():
        return 0
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    return sum(1 for node in nodes if files.text(node).strip() not in ("", "0"))  # 0 marks a CPU node
