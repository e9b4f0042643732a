"""How many accelerators the container can see, from device files and the variables that hide them.

PID 1 must never initialise CUDA, and torch is not imported here: the kernel's files tell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trainer_launch.model import Gpus
from trainer_launch.model.value_parsers import parse_number

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
    return sum(1 for node in nodes if _gpu_id(node) not in ("", "0"))  # 0 marks a CPU node


def _gpu_id(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
