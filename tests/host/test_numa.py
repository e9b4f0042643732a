"""Which CPUs each worker gets on made-up machines: those that torch chooses, or none, and why."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_launch.host import machine, numa
from trainer_launch.model import Binding
from trainer_launch.model.units import in_ranges


@dataclass(frozen=True)
class Server:
    """A machine: CPUs of each NUMA node, its package, CPUs that share a core and a cache, each GPU's NUMA node."""

    nodes: Mapping[int, range]
    packages: Mapping[int, int]
    gpus: Sequence[int]
    smt: int = 0  # the distance of a core's second CPU; 0: it has one
    cache: int = 4  # so many cores share one
    allowed: Sequence[int] | None = None

    def cpus(self) -> dict[int, int]:
        """All CPUs, with their node."""
        firsts = {cpu: node for node, cpus in self.nodes.items() for cpu in cpus}
        return firsts | ({cpu + self.smt: node for cpu, node in firsts.items()} if self.smt else {})

    def core(self, cpu: int) -> list[int]:
        first = cpu % self.smt if self.smt else cpu
        return [first, first + self.smt] if self.smt else [first]

    def write(self, root: Path) -> None:
        """Its files, as the kernel and NVIDIA's driver have them."""
        cpus = self.cpus()
        write(root / "sys/devices/system/node/possible", in_ranges(self.nodes))
        for node in self.nodes:
            own = in_ranges(cpu for cpu, of in cpus.items() if of == node)
            write(root / f"sys/devices/system/node/node{node}/cpulist", own)
        for cpu, node in cpus.items():
            folder = root / f"sys/devices/system/cpu/cpu{cpu}"
            first = min(self.core(cpu)) // self.cache * self.cache
            shares = [one for core in range(first, first + self.cache) for one in self.core(core) if one in cpus]
            write(folder / "topology/physical_package_id", str(self.packages[node]))
            write(folder / "topology/thread_siblings_list", in_ranges(self.core(cpu)))
            for index, level, kind, shared in (
                (0, 1, "Data", self.core(cpu)),
                (1, 1, "Instruction", self.core(cpu)),
                (2, 2, "Unified", self.core(cpu)),
                (3, 3, "Unified", shares),
            ):
                write(folder / f"cache/index{index}/level", str(level))
                write(folder / f"cache/index{index}/type", kind)
                write(folder / f"cache/index{index}/shared_cpu_list", in_ranges(shared))
        for index, node in enumerate(self.gpus):
            gpu(root, index, node)

    def here(self) -> list[int]:
        """The CPUs that may be used."""
        return [*self.cpus()] if self.allowed is None else [*self.allowed]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def address(index: int) -> str:
    return f"0000:{0x1A + 0x11 * index:02x}:00.0"


def gpu(root: Path, index: int, node: int, model: str = "NVIDIA H100") -> None:
    write(root / f"dev/nvidia{index}", "")
    write(root / "sys/bus/pci/devices" / address(index) / "numa_node", str(node))
    told = f"Model: \t\t {model}\nGPU UUID: \t GPU-{index}{index}\nDevice Minor: \t {index}"
    write(root / "proc/driver/nvidia/gpus" / address(index) / "information", told)


SERVERS = {
    "two sockets": Server({0: range(8), 1: range(8, 16)}, {0: 0, 1: 1}, [0, 0, 1, 1], smt=16),
    "two nodes a socket": Server(
        {node: range(4 * node, 4 * node + 4) for node in range(4)}, {0: 0, 1: 0, 2: 1, 3: 1}, [0, 1, 2, 3, 3]
    ),
    "GPUs out of order": Server({0: range(6), 1: range(6, 12)}, {0: 0, 1: 1}, [1, 0, 1, 0, 1]),
    "caches of two cores": Server({0: range(12)}, {0: 0}, [0, 0, 0, 0, 0, 0, 0], smt=12, cache=2),
    "one node that the kernel does not name": Server({0: range(8)}, {0: 0}, [-1, -1]),
    "a part of the CPUs": Server(
        {0: range(8), 1: range(8, 16)}, {0: 0, 1: 1}, [0, 0, 1], smt=16, allowed=[1, 2, 3, 5, 17, 18, 9, 10, 26]
    ),
}


def ours(root: Path, server: Server, env: Mapping[str, str] | None = None) -> numa.Numa:
    server.write(root)
    return numa.read(env or {}, machine.count(env or {}, root), root, server.here())


def torchs(monkeypatch: pytest.MonkeyPatch, root: Path, server: Server, rank: int, mode: str) -> set[int]:
    """The CPUs that torch chooses when this machine's files are under `root`."""
    binding = pytest.importorskip("torch.numa.binding")

    def properties(index: int) -> Any:
        bus = int(address(index).split(":")[1], 16)
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)

    cuda = SimpleNamespace(device_count=lambda: len(server.gpus), get_device_properties=properties)
    system = SimpleNamespace(
        path=os.path, listdir=lambda at: os.listdir(f"{root}{at}"), sched_getaffinity=lambda _: {*server.here()}
    )
    monkeypatch.setattr(binding, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(binding, "os", system)
    monkeypatch.setattr(binding, "open", lambda at: io.StringIO(Path(f"{root}{at}").read_text()), raising=False)
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    chosen: set[int] = binding._get_logical_cpus_to_bind_to(gpu_index=rank, numa_options=options)
    return chosen


@pytest.mark.torch
@pytest.mark.parametrize("mode", ["node", "socket", "exclusive", "core-complex"])
@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
def test_workers_get_the_cpus_that_torch_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server, mode: str
) -> None:
    bound, told = numa.bindings(ours(tmp_path, server), mode, len(server.gpus))
    wanted = [torchs(monkeypatch, tmp_path, server, rank, mode) for rank in range(len(server.gpus))]
    assert [{*binding.cpus} for binding in bound] == wanted, told


def test_memory_is_that_of_the_cpus_node_and_of_no_node_where_they_are_of_several(tmp_path: Path) -> None:
    found = ours(tmp_path, SERVERS["two nodes a socket"])
    assert [binding.node for binding in numa.bindings(found, "node", 5)[0]] == [0, 1, 2, 3, 3]
    assert [binding.node for binding in numa.bindings(found, "socket", 5)[0]] == [None] * 5


def test_the_sentence_names_ranks_cpus_and_memory(tmp_path: Path) -> None:
    _, told = numa.bindings(ours(tmp_path, SERVERS["two sockets"]), "node", 4)
    assert told == (
        "--numa-binding node binds local rank 0-1 to CPU 0-7,16-23 and the memory of NUMA node 0, "
        "local rank 2-3 to CPU 8-15,24-31 and the memory of NUMA node 1"
    )


@pytest.mark.parametrize(
    ("env", "nodes"),
    [
        ({"CUDA_VISIBLE_DEVICES": "3,0"}, (1, 0)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-22,GPU-11"}, (1, 0)),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1"}, ()),
    ],
)
def test_gpus_count_in_the_order_that_the_variable_shows(
    tmp_path: Path, env: dict[str, str], nodes: tuple[int, ...]
) -> None:
    found = ours(tmp_path, SERVERS["two sockets"], env)
    assert found.gpus == nodes
    assert ("which 1 GPUs are visible" in found.unknown) is not bool(nodes)


def test_gpus_of_other_containers_do_not_count(tmp_path: Path) -> None:
    server = SERVERS["two sockets"]
    server.write(tmp_path)
    for hidden in (0, 1):
        (tmp_path / f"dev/nvidia{hidden}").unlink()
    assert numa.read({}, machine.count({}, tmp_path), tmp_path, server.here()).gpus == (1, 1)


def test_gpus_of_several_models_are_known_only_in_the_order_of_the_bus(tmp_path: Path) -> None:
    server = SERVERS["two sockets"]
    server.write(tmp_path)
    gpu(tmp_path, 4, 1, "NVIDIA L4")
    gpus = machine.count({}, tmp_path)
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in numa.read({}, gpus, tmp_path, server.here()).unknown
    assert numa.read({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, gpus, tmp_path, server.here()).gpus == (0, 0, 1, 1, 1)


def test_an_amd_gpu_is_found_by_the_location_that_the_kernel_tells(tmp_path: Path) -> None:
    server = Server({0: range(2), 1: range(2, 4)}, {0: 0, 1: 1}, [])
    server.write(tmp_path)
    write(tmp_path / "dev/kfd", "")
    for node, (gpu_id, location) in enumerate(((0, 0), (11, 0xC1 << 8), (12, 0x23 << 8 | 1 << 3 | 1))):
        write(tmp_path / machine.KFD / str(node) / "gpu_id", str(gpu_id))
        write(tmp_path / machine.KFD / str(node) / "properties", f"location_id {location}\ndomain {node - 1}")
    write(tmp_path / "sys/bus/pci/devices/0000:c1:00.0/numa_node", "1")
    write(tmp_path / "sys/bus/pci/devices/0001:23:01.1/numa_node", "0")
    assert numa.read({}, machine.count({}, tmp_path), tmp_path, server.here()).gpus == (1, 0)
    env = {"HIP_VISIBLE_DEVICES": "1"}
    assert numa.read(env, machine.count(env, tmp_path), tmp_path, server.here()).gpus == (0,)


def test_without_gpus_the_numa_nodes_are_divided_among_the_workers(tmp_path: Path) -> None:
    found = ours(tmp_path, Server({0: range(2), 1: range(2, 4)}, {0: 0, 1: 1}, []))
    bound, _ = numa.bindings(found, "node", 4)
    assert bound == (Binding((0, 1), 0), Binding((0, 1), 0), Binding((2, 3), 1), Binding((2, 3), 1))
    assert [binding.cpus for binding in numa.bindings(found, "exclusive", 4)[0]] == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize(
    ("server", "mode", "workers", "why"),
    [
        (Server({0: range(2)}, {0: 0}, [0]), "node", 2, "2 workers have 1 GPUs"),
        (Server({0: range(2)}, {0: 0}, [0] * 3), "exclusive", 3, "NUMA node 0 has 2 physical cores for 3 GPUs"),
        (
            Server({0: range(2), 1: range(2, 4)}, {0: 0, 1: 1}, [1], allowed=[0, 1]),
            "node",
            1,
            "this container may use no CPU of NUMA node 1, where GPU 0 is",
        ),
    ],
)
def test_where_nobody_can_be_bound_the_sentence_says_why(
    tmp_path: Path, server: Server, mode: str, workers: int, why: str
) -> None:
    bound, told = numa.bindings(ours(tmp_path, server), mode, workers)
    assert bound == ()
    assert told.startswith(f"--numa-binding {mode}: workers are not bound to CPUs: ")
    assert why in told


def test_a_machine_that_tells_nothing_is_one_node_of_all_cpus(tmp_path: Path) -> None:
    found = numa.read({}, machine.count({}, tmp_path), tmp_path, [3, 0])
    for mode in ("node", "socket", "core-complex"):
        assert numa.bindings(found, mode, 1)[0] == (Binding((0, 3), 0),)
    assert [binding.cpus for binding in numa.bindings(found, "exclusive", 2)[0]] == [(0,), (3,)]
