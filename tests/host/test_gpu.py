"""GPUs counted from device files, narrowed by the variables that hide them."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_launch.host import machine


def devices(root: Path, *names: str) -> Path:
    (root / "dev").mkdir(exist_ok=True)
    for name in names:
        (root / "dev" / name).touch()
    return root


NVIDIA = ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-modeset")


def test_device_files_with_a_number_are_gpus_and_control_files_are_not(tmp_path: Path) -> None:
    assert machine.count({}, devices(tmp_path, *NVIDIA)).count == 4


def test_no_device_file_is_no_gpu_and_says_so(tmp_path: Path) -> None:
    counted = machine.count({"CUDA_VISIBLE_DEVICES": "0,1"}, devices(tmp_path))
    assert counted.count == 0
    assert "no GPU" in counted.reason


@pytest.mark.parametrize(
    ("value", "visible"),
    [
        ("0,1", 2),
        ("3", 1),
        ("", 0),
        ("-1", 0),
        ("0,-1,2", 1),  # the driver stops at the first invalid entry
        ("0,9", 1),
        ("0,0", 1),
        ("GPU-1111,GPU-2222", 2),
        ("MIG-a,MIG-b,MIG-c", 3),
        (" 1 , 2 ", 2),
        ("all", 0),
    ],
)
def test_cuda_visible_devices_narrows_as_the_driver_does(tmp_path: Path, value: str, visible: int) -> None:
    counted = machine.count({"CUDA_VISIBLE_DEVICES": value}, devices(tmp_path, *NVIDIA))
    assert counted.count == visible
    assert "CUDA_VISIBLE_DEVICES" in counted.reason


def test_amd_gpus_are_counted_by_their_topology_nodes(tmp_path: Path) -> None:
    devices(tmp_path, "kfd")
    for node, gpu_id in enumerate(("0", "4711", "4712")):  # 0 is the CPU
        folder = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(node)
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(gpu_id + "\n")
    assert machine.count({}, tmp_path).count == 2
    assert machine.count({"HIP_VISIBLE_DEVICES": "1"}, tmp_path).count == 1


@pytest.mark.parametrize("name", ["NODE_NAME", "K8S_NODE_NAME", "MY_NODE_NAME"])
def test_a_machine_has_the_name_of_its_kubernetes_node(name, tmp_path: Path) -> None:
    assert machine.machine_name({name: " gpu-7 "}, "pod-1", tmp_path) == "gpu-7"


def test_without_such_a_name_a_machine_is_known_by_its_boot_and_the_pod(tmp_path: Path) -> None:
    boot = tmp_path / "proc/sys/kernel/random/boot_id"
    assert machine.machine_name({"NODE_NAME": ""}, "pod-1", tmp_path) == "", "unknown"
    boot.parent.mkdir(parents=True)
    boot.write_text("8c6f\n")
    assert machine.machine_name({}, "pod-1", tmp_path) == "pod-1 8c6f"
    assert machine.machine_name({"NODE_NAME": "nœud"}, "pod-1", tmp_path) == ""
