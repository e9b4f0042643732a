"""What this container and its devices show after a failure, each as a text that a bundle keeps.

Every function returns "" where there is nothing to tell, and never raises; each may be slow, none hangs for long.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer_launch.host import cgroup, shm
from trainer_launch.host.deadline_subprocess import run
from trainer_launch.model.redaction import redact
from trainer_launch.model.units import in_units

_MEMORY = ("memory.events", "memory.pressure", "memory.current", "memory.peak", "memory.max", "memory.failcnt")
_KERNEL_BYTES = 1 << 20
_KERNEL = re.compile(
    r"NVRM|Xid|oom|Out of memory|Killed process|mce:|EDAC|mlx5|segfault|hung_task|I/O error", re.IGNORECASE
)
_KERNEL_LINES = 200
_RAS_PORT = 28028  # where NCCL serves its RAS subsystem, unless NCCL_RAS_ADDR says otherwise
_RAS_S = 3.0
_RAS_BYTES = 1 << 20
_SEGMENTS = 20


def memory(root: Path = Path("/")) -> str:
    """The container's counters of memory, of kills for it, and of pressure."""
    groups = cgroup.own_groups(root)
    found = [(folder / name, _text(folder / name)) for folder in groups.memory[:1] for name in _MEMORY]
    return "".join(f"== {path.name}\n{text}\n" for path, text in found if text)


def shared_memory(folder: str = shm.FOLDER) -> str:
    """The room in /dev/shm, and its largest segments."""
    space = shm.space(folder)
    if space is None:
        return ""
    with contextlib.suppress(OSError):
        segments = sorted(shm.segments(folder), key=lambda one: -one.size_bytes)[:_SEGMENTS]
        lines = [f"{in_units(one.size_bytes):>10}  {one.name}\n" for one in segments]
        return f"{in_units(space.free_bytes)} free of {in_units(space.size_bytes)}\n" + "".join(lines)
    return ""


def network(root: Path = Path("/")) -> str:
    """Each interface's counters, also of errors, and those of TCP."""
    parts = [(name, _text(root / "proc/net" / name)) for name in ("dev", "snmp", "netstat")]
    return "".join(f"== /proc/net/{name}\n{text}\n" for name, text in parts if text)


def kernel_log(path: str = "/dev/kmsg") -> str:
    """The kernel's last lines about devices, memory and processes, such as a GPU's XIDs; it may not be readable."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            lines = [line for line in _messages(fd) if _KERNEL.search(line)]
        finally:
            os.close(fd)
    return "".join(f"{line}\n" for line in lines[-_KERNEL_LINES:])


def _messages(fd: int) -> Iterator[str]:
    size = 0
    with contextlib.suppress(BlockingIOError):
        while size < _KERNEL_BYTES:
            try:
                data = os.read(fd, 8192)
            except BrokenPipeError:  # the kernel has overwritten what came next
                continue
            if not data:
                return
            size += len(data)
            yield data.decode(errors="replace").partition("\n")[0].partition(";")[2]


def gpus() -> str:
    """What NVML says of each GPU: clocks, throttling, temperature, memory errors, and who holds memory."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return ""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver here
        return ""
    lines = []
    with contextlib.suppress(nvml.NVMLError):
        for index in range(nvml.nvmlDeviceGetCount()):
            lines += [f"== GPU {index}\n", *_of_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index))]
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
        "processes": lambda: [one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses(device)],
    }
    for name, ask in asked.items():
        try:
            yield f"{name}: {ask()}\n"
        except nvml.NVMLError as problem:  # noqa: PERF203  each may be unsupported
            yield f"{name}: {problem}\n"


def nccl_ras(env: Mapping[str, str]) -> str:
    """The report of NCCL's RAS subsystem, where a process of this container serves it."""
    host, _, port = env.get("NCCL_RAS_ADDR", f"127.0.0.1:{_RAS_PORT}").rpartition(":")
    data = b""
    with contextlib.suppress(OSError, ValueError):
        until_s = time.monotonic() + _RAS_S
        with socket.create_connection((host.strip("[]") or "127.0.0.1", int(port)), timeout=_RAS_S) as connection:
            connection.sendall(b"CLIENT PROTOCOL 2\nTIMEOUT 2\nVERBOSE STATUS\n")
            while len(data) < _RAS_BYTES and (left_s := until_s - time.monotonic()) > 0:
                connection.settimeout(left_s)
                more = connection.recv(65536)
                if not more:
                    break
                data += more
    return data.decode(errors="replace")


def native_stacks(pid: int, limit_s: float) -> str:
    """All threads' Python and C frames by py-spy, where it is installed."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    return run((program, "dump", "--native", "--pid", str(pid)), None, limit_s, reap_s=0.5).out


def environment(env: Mapping[str, str]) -> str:
    """The variables, without secrets."""
    return "".join(f"{name}={redact(name, value)}\n" for name, value in sorted(env.items()))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[: 1 << 16]
    except OSError:
        return ""
