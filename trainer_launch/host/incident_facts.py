"""Facts about this container and its devices after a failure, each as a text that an incident keeps.

Every function returns "" where there is nothing to tell, and raises OSError with the reason where there is
something that cannot be had. Each may be slow; a driver may hang.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trainer_launch.host import files, machine, shm
from trainer_launch.model.redaction import redact
from trainer_launch.model.units import in_units

_MEMORY = ("memory.events", "memory.pressure", "memory.current", "memory.peak", "memory.max", "memory.failcnt")
_KERNEL = re.compile(
    r"NVRM|Xid|oom|Out of memory|Killed process|mce:|EDAC|mlx5|segfault|hung_task|I/O error", re.IGNORECASE
)
_KERNEL_LINES = 200
_SEGMENTS = 20


def memory(root: Path = Path("/")) -> str:
    """The container's counters of memory, of kills for it, and of pressure."""
    groups = machine.own_groups(root)
    counters = [(folder / name, files.text(folder / name)) for folder in groups.memory[:1] for name in _MEMORY]
    return "".join(f"== {path.name}\n{text}\n" for path, text in counters if text)


def shared_memory(folder: str = shm.FOLDER) -> str:
    """The room in /dev/shm, and its largest segments."""
    space = shm.space(folder)
    if space is None:
        return ""
    largest = shm.segments(folder)[:_SEGMENTS]
    lines = [f"{in_units(segment.size_bytes):>10}  {segment.name}\n" for segment in largest]
    return f"{in_units(space.free_bytes)} free of {in_units(space.size_bytes)}\n" + "".join(lines)


def network(root: Path = Path("/")) -> str:
    """Each interface's counters, also of errors, those of TCP, and those of InfiniBand ports that are not 0."""
    parts = [(f"/proc/net/{name}", files.text(root / "proc/net" / name)) for name in ("dev", "snmp", "netstat")]
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        counters = [(path.name, files.text(path).strip()) for path in sorted(port.glob("*counters/*"))]
        text = "".join(f"{name}: {value}\n" for name, value in counters if value not in ("", "0"))
        parts.append((f"{port.parts[-3]} port {port.name}", text))
    return "".join(f"== {name}\n{text}\n" for name, text in parts if text)


def kernel_log(path: str = "/dev/kmsg") -> str:
    """The kernel's last lines about devices, memory and processes, such as a GPU's XIDs, each with its time.

    Raises:
        OSError: it may not be read, as in most containers.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        lines = [line for line in _messages(fd) if _KERNEL.search(line)]
    except OSError as problem:
        raise OSError(problem.errno, problem.strerror, path) from None
    finally:
        os.close(fd)
    return "".join(f"{line}\n" for line in lines[-_KERNEL_LINES:])


def _messages(fd: int) -> Iterator[str]:
    """Each message: `6,339,5140900,-;NVRM: Xid …`, with μs since the machine's start."""
    started_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    while True:
        try:
            data = os.read(fd, 8192)
        except BlockingIOError:  # no more
            return
        except BrokenPipeError:  # the kernel has overwritten what came next
            continue
        if not data:
            return
        for line in data.decode(errors="replace").splitlines():
            head, _, text = line.partition(";")
            since_us = [*head.split(","), "", ""][2]
            if text and since_us.isdecimal():
                at = datetime.fromtimestamp(started_s + int(since_us) / 1e6, timezone.utc)
                yield f"{at:%Y-%m-%d %H:%M:%S} {text}"


def load_nvml() -> Any | None:
    """NVIDIA's bindings, None without them or the driver: they take 2 MB and 30 ms while the job waits to go on."""
    if "pynvml" not in sys.modules:
        import ctypes

        try:
            ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return None
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def gpus(devices: str = "/dev/nvidia[0-9]*") -> str:
    """NVML's facts about each GPU: clocks, throttling, temperature, memory errors, and who holds memory.

    NVML tells XIDs only to who has waited for them; the kernel's log has them.

    Raises:
        OSError: there are GPUs, but NVML is missing or does not answer.
    """
    if not glob.glob(devices):
        return ""
    nvml = load_nvml()
    if nvml is None:
        raise OSError("nvidia-ml-py is not installed, or libnvidia-ml.so.1 is not there")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as problem:
        raise OSError(f"NVML: {problem}") from None
    lines = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            lines += [f"== GPU {index}\n", *_of_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index))]
    except nvml.NVMLError as problem:  # such as a GPU that has fallen off the bus
        lines.append(f"NVML: {problem}\n")
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlShutdown()
    return "".join(lines)


def _of_gpu(nvml: Any, device: Any) -> Iterator[str]:
    asked: dict[str, Callable[[], object]] = {
        "name": lambda: nvml.nvmlDeviceGetName(device),
        "uuid": lambda: nvml.nvmlDeviceGetUUID(device),
        "temperature C": lambda: nvml.nvmlDeviceGetTemperature(device, 0),
        "SM clock MHz": lambda: nvml.nvmlDeviceGetClockInfo(device, 1),
        "throttle reasons": lambda: hex(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)),
        "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu,
        "memory used": lambda: in_units(nvml.nvmlDeviceGetMemoryInfo(device).used),
        "uncorrected ECC errors": lambda: nvml.nvmlDeviceGetTotalEccErrors(device, 1, 0),
        "remapped rows (corrected, uncorrected, pending, failed)": lambda: nvml.nvmlDeviceGetRemappedRows(device),
        "PCIe replays": lambda: nvml.nvmlDeviceGetPcieReplayCounter(device),
        "processes": lambda: [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(device)],
    }
    for name, ask in asked.items():
        try:
            yield f"{name}: {ask()}\n"
        except (nvml.NVMLError, AttributeError) as problem:  # noqa: PERF203  unsupported, or an older library
            yield f"{name}: {problem}\n"


def environment(env: Mapping[str, str]) -> str:
    """The variables, without secrets, each in a line: whatever would break or command one is escaped."""
    lines = (f"{name}={redact(name, value)}" for name, value in sorted(env.items()))
    return "".join(f"{_escaped(line)}\n" for line in lines)


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# By file. What a driver or a device answers comes last: it may hang.
ALL: dict[str, Callable[[], str]] = {
    "memory.txt": memory,
    "shared_memory.txt": shared_memory,
    "kernel.txt": kernel_log,
    "network.txt": network,
    "gpus.txt": gpus,
}
