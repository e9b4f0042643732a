"""Which CPUs each worker of this node is bound to: torch's --numa-binding, without torch and without numactl.

As torch 2.13 has it (torch/numa/binding.py): a worker belongs to the GPU whose index is its local rank, and runs
near it. Only CPUs that this container may use count. Two things are ours: nodes of a socket without such a CPU are
left out, and on a machine without GPUs the workers are dealt to its NUMA nodes in equal runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from trainer_launch.host import files, machine
from trainer_launch.model import Binding, Gpus
from trainer_launch.model.units import grouped, in_ranges, numbers_in

_CPU = "sys/devices/system/cpu/cpu"
_PROC = "proc/driver/nvidia/gpus"


class Cpu(NamedTuple):
    """A CPU that may be used; core and cache are known by the lowest CPU that shares them."""

    number: int
    node: int
    package: int
    core: int
    cache: int  # the largest


class Numa(Struct, frozen=True):
    """The CPUs that may be used, and the NUMA node of each visible GPU by its index (-1: the kernel knows none)."""

    cpus: tuple[Cpu, ...]
    gpus: tuple[int, ...] = ()
    unknown: str = ""  # why the GPUs' nodes are not known


# -- reading -----------------------------------------------------------------------------------


def read(env: Mapping[str, str], gpus: Gpus, root: Path = Path("/"), allowed: Sequence[int] | None = None) -> Numa:
    """Look at this machine; `root` and `allowed` stand for it in tests."""
    usable = machine.usable_cpus() if allowed is None else sorted(allowed)
    nodes: dict[int, int] = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        nodes |= dict.fromkeys(_numbers(folder / "cpulist"), int(folder.name[4:]))
    cpus = tuple(_cpu(number, nodes.get(number, 0), root) for number in usable)
    if not gpus.count:
        return Numa(cpus)
    try:
        return Numa(cpus, _gpus(env, gpus, root))
    except ValueError as unknown:
        return Numa(cpus, unknown=str(unknown))


def _cpu(number: int, node: int, root: Path) -> Cpu:
    folder = root / f"{_CPU}{number}"
    core = _numbers(folder / "topology/thread_siblings_list") or [number]
    level, cache = -1, -1  # where the kernel tells of no caches, all CPUs of a node share one
    for index in (folder / "cache").glob("index[0-9]*"):
        found = _number(index / "level")
        if files.text(index / "type").strip() in ("Unified", "Data") and found > level:
            level, cache = found, min(_numbers(index / "shared_cpu_list"), default=-1)
    return Cpu(number, node, _number(folder / "topology/physical_package_id"), min(core), cache)


def _gpus(env: Mapping[str, str], gpus: Gpus, root: Path) -> tuple[int, ...]:
    """The NUMA nodes of the visible GPUs in their order; a ValueError says why they are unknown."""
    if gpus.device != "cuda":
        raise ValueError(f"torch binds workers to CUDA and ROCm devices only, these are {gpus.device}")
    found = _nvidia(env, root) if gpus.is_nvidia else _amd(root)
    for name in machine.CUDA if gpus.is_nvidia else machine.ROCM:
        if name in env:
            shown = machine.listed(env[name], len(found))
            found = [
                next((gpu for i, gpu in enumerate(found) if one in (str(i), gpu[0])), ("", "")) for one in shown
            ]
    if len(found) != gpus.count or any(not address for _, address in found):
        raise ValueError(f"the driver does not tell which {gpus.count} GPUs are visible ({gpus.reason})")
    return tuple(_number(root / "sys/bus/pci/devices" / address / "numa_node") for _, address in found)


def _nvidia(env: Mapping[str, str], root: Path) -> list[tuple[str, str]]:
    """UUID and PCI address of each GPU of this container, in CUDA's order: that of the bus, if all are equal."""
    told = {path.parent.name.lower(): files.text(path) for path in sorted((root / _PROC).glob("*/information"))}
    facts = {
        at: dict(re.findall(r"(?m)^(Model|GPU UUID|Device Minor):\s*(.*?)\s*$", text)) for at, text in told.items()
    }
    here = {at: fact for at, fact in facts.items() if (root / f"dev/nvidia{fact.get('Device Minor')}").exists()}
    if len({fact.get("Model") for fact in here.values()}) > 1 and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise ValueError(
            "the GPUs are of several models, which CUDA orders by speed; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return [(fact.get("GPU UUID", ""), at) for at, fact in here.items()]


def _amd(root: Path) -> list[tuple[str, str]]:
    """PCI address of each GPU in ROCm's order, from location_id: bus << 8 | device << 3 | function."""
    found = []
    for folder in sorted((root / machine.KFD).glob("[0-9]*"), key=lambda folder: int(folder.name)):
        facts = dict(re.findall(r"(?m)^(domain|location_id) (\d+)$", files.text(folder / "properties")))
        if files.text(folder / "gpu_id").strip() not in ("", "0") and len(facts) == len(("domain", "location_id")):
            at = int(facts["location_id"])
            found.append(("", f"{int(facts['domain']):04x}:{at >> 8:02x}:{at >> 3 & 31:02x}.{at & 7}"))
    return found


def _number(path: Path) -> int:
    text = files.text(path).strip()
    return int(text) if text.isdecimal() else -1


def _numbers(path: Path) -> list[int]:
    return numbers_in(files.text(path).strip())


# -- deciding ----------------------------------------------------------------------------------


def bindings(numa: Numa, mode: str, workers: int) -> tuple[tuple[Binding, ...], str]:
    """Each worker's binding by local rank, and a sentence that says so; none, and why not."""
    try:
        nodes = _nodes(numa, workers)
        bound = tuple(_binding(numa.cpus, nodes, rank, mode) for rank in range(workers))
    except ValueError as problem:
        return (), f"--numa-binding {mode}: workers are not bound to CPUs: {problem}"
    told = grouped((binding, rank) for rank, binding in enumerate(bound))
    words = (
        f"local rank {in_ranges(ranks)} to CPU {in_ranges(binding.cpus)}"
        f"{'' if binding.node is None else f' and the memory of NUMA node {binding.node}'}"
        for binding, ranks in told.items()
    )
    return bound, f"--numa-binding {mode} binds {', '.join(words)}"


def _nodes(numa: Numa, workers: int) -> Sequence[int]:
    """The NUMA node of each GPU, or of each worker where there is no GPU."""
    here = sorted({cpu.node for cpu in numa.cpus})
    if numa.unknown:
        raise ValueError(numa.unknown)
    if numa.gpus and workers > len(numa.gpus):
        raise ValueError(f"{workers} workers have {len(numa.gpus)} GPUs, so not each has a GPU of its own")
    return [max(node, 0) for node in numa.gpus] or [here[rank * len(here) // workers] for rank in range(workers)]


def _binding(cpus: Sequence[Cpu], nodes: Sequence[int], rank: int, mode: str) -> Binding:
    """A worker's CPUs; `nodes` tells the NUMA node of each GPU."""
    here = [cpu for cpu in cpus if cpu.node == nodes[rank]]
    if not here:
        raise ValueError(f"this container may use no CPU of NUMA node {nodes[rank]}, where GPU {rank} is")
    neighbours = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    place = neighbours.index(rank)
    if mode == "socket":
        first = {node: mates[0] for node, mates in grouped((cpu.node, cpu) for cpu in cpus).items()}
        here = [cpu for cpu in cpus if first[cpu.node].package == here[0].package]
    elif mode == "exclusive":
        here = _share(here, place, len(neighbours))
    elif mode == "core-complex":
        caches = sorted(grouped((cpu.cache, cpu) for cpu in here).items(), key=lambda one: (-len(one[1]), one[0]))
        here = caches[place % len(caches)][1]
    near = {cpu.node for cpu in here}
    return Binding(tuple(cpu.number for cpu in here), near.pop() if len(near) == 1 else None)


def _share(here: Sequence[Cpu], place: int, n_gpus: int) -> list[Cpu]:
    """One GPU's share of a node's physical cores; the first GPUs have one more where they cannot be divided."""
    cores = [mates for _, mates in sorted(grouped((cpu.core, cpu) for cpu in here).items())]
    each, more = divmod(len(cores), n_gpus)
    if not each:
        raise ValueError(f"NUMA node {here[0].node} has {len(cores)} physical cores for {n_gpus} GPUs")
    start = place * each + min(place, more)
    return sorted(cpu for core in cores[start : start + each + (place < more)] for cpu in core)
