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


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def xpu(number: int, slot: str, vendor: str = "8086") -> dict[str, str]:
    uevent = f"DRIVER=xe\nPCI_CLASS=38000\nPCI_ID={vendor}:0BD5\nPCI_SLOT_NAME={slot}"
    return {f"dev/dri/renderD{number}": "", f"sys/class/drm/renderD{number}/device/uevent": uevent}


XPU = xpu(128, "0000:3A:00.0") | xpu(129, "0000:9A:00.0") | xpu(130, "0000:00:02.0")
XPU |= xpu(131, "0000:01:00.0", "10DE")
TILES = {f"sys/class/drm/renderD{n}/device/tile{tile}/gt0/id": "" for n in (128, 129) for tile in (0, 1)}
I915 = {f"sys/class/drm/renderD128/device/drm/card0/gt/gt{n}/id": "" for n in (0, 1)}
GAUDI = {"dev/accel/accel_controlD0": ""} | {f"dev/accel/accel{n}": "" for n in range(4)}
GAUDI |= {f"sys/class/accel/accel{n}/device/vendor": "0x1da3" for n in range(8)}
NPU = {f"dev/accel/accel{n}": "" for n in range(2)} | {"sys/class/accel/accel0/device/vendor": "0x1022"}
ASCEND = {f"dev/davinci{n}": "" for n in range(10)} | {"dev/davinci_manager": ""}
TPU = {f"dev/accel{n}": "" for n in range(4)}
TPU |= {f"sys/class/accel/accel{n}/device/vendor": "0x1ae0" for n in range(4)}
VFIO = {"dev/vfio/vfio": "", "dev/vfio/7": "", "dev/vfio/8": ""}
VFIO |= {f"sys/kernel/iommu_groups/{n}/devices/0000:00:0{n}.0/vendor": "0x1ae0" for n in (7, 8)}


@pytest.mark.parametrize(
    ("files", "env", "device", "count"),
    [
        (XPU, {}, "xpu", 2),
        (XPU, {"ZE_AFFINITY_MASK": "1"}, "xpu", 1),
        (XPU | TILES, {}, "xpu", 4),
        (XPU | TILES, {"ZE_AFFINITY_MASK": "0,3"}, "xpu", 2),
        (XPU | TILES, {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, "xpu", 2),
        (XPU | TILES, {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE", "ZE_AFFINITY_MASK": "0.0,0.1"}, "xpu", 1),
        (XPU | I915, {}, "xpu", 3),
        (xpu(128, "0000:00:02.0"), {}, "cuda", 0),
        (GAUDI, {}, "hpu", 4),
        (GAUDI, {"HABANA_VISIBLE_DEVICES": "all"}, "hpu", 4),
        (GAUDI, {"HABANA_VISIBLE_MODULES": "7,5"}, "hpu", 2),
        ({"dev/hl0": "", "dev/hl1": "", "dev/hl_controlD0": ""}, {}, "hpu", 2),
        (NPU, {}, "cuda", 0),
        (ASCEND, {}, "npu", 10),
        (ASCEND, {"ASCEND_RT_VISIBLE_DEVICES": "0,1,9"}, "npu", 3),
        (TPU, {}, "tpu", 4),
        (TPU, {"TPU_VISIBLE_CHIPS": "0,1"}, "tpu", 2),
        (VFIO, {}, "tpu", 2),
        (VFIO | {"sys/kernel/iommu_groups/7/devices/0000:00:07.0/vendor": "0x10de"}, {}, "tpu", 1),
    ],
)
def test_other_accelerators_are_counted_by_their_files_and_variables(
    tmp_path: Path, files: dict[str, str], env: dict[str, str], device: str, count: int
) -> None:
    (tmp_path / "dev").mkdir()
    found = machine.count(env, tree(tmp_path, files))
    assert (found.device, found.count, found.cuda) == (device, count, 0), found.reason


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
