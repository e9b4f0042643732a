"""What this container and its devices show after a failure, each as a text that a bundle keeps.

Every function returns "" where there is nothing to tell, and raises OSError with the reason where there is
something that cannot be had. Each may be slow; a driver may hang.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import importlib
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trainer_launch.host import cgroup, process_tree, shm
from trainer_launch.host.deadline_subprocess import Child, stop_all
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
NATIVE_END_S = 0.5  # for all of py-spy's processes to end, beyond their limit
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
    """Each interface's counters, also of errors, those of TCP, and those of InfiniBand ports that are not 0."""
    parts = [(f"/proc/net/{name}", _text(root / "proc/net" / name)) for name in ("dev", "snmp", "netstat")]
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        counters = [(path.name, _text(path).strip()) for path in sorted(port.glob("*counters/*"))]
        told = "".join(f"{name}: {value}\n" for name, value in counters if value not in ("", "0"))
        parts.append((f"{port.parts[-3]} port {port.name}", told))
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
    size, started_s = 0, time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    with contextlib.suppress(BlockingIOError):
        while size < _KERNEL_BYTES:
            try:
                data = os.read(fd, 8192)
            except BrokenPipeError:  # the kernel has overwritten what came next
                continue
            if not data:
                return
            size += len(data)
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
    """What NVML says of each GPU: clocks, throttling, temperature, memory errors, and who holds memory.

    NVML tells XIDs only to who has waited for them; the kernel's log has them.

    Raises:
        OSError: there are GPUs, but NVML is missing or does not answer.
    """
    are_there = bool(glob.glob(devices))
    nvml = load_nvml()
    if nvml is None:
        if are_there:
            raise OSError("nvidia-ml-py is not installed, or libnvidia-ml.so.1 is not there")
        return ""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as problem:
        if are_there:
            raise OSError(f"NVML: {problem}") from None
        return ""
    lines = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            lines += [f"== GPU {index}\n", *_of_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index))]
    except nvml.NVMLError as problem:  # such as a GPU that has fallen off the bus
        lines.append(f"NVML: {problem}\n")
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlShutdown()
    return "".join(lines)


_THROTTLES = {  # NVML's bits that slow a GPU down; idle and the user's own clocks do not
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


def gpu(name: str) -> str:
    """One GPU's clock, throttling and temperature in a phrase; `name` is its index or its UUID."""
    nvml = load_nvml()
    if nvml is None:
        return ""
    try:
        nvml.nvmlInit()
        device = (
            nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
        )
        clock, most = nvml.nvmlDeviceGetClockInfo(device, 1), nvml.nvmlDeviceGetMaxClockInfo(device, 1)
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)
        reasons = [word for bit, word in _THROTTLES.items() if bits & bit]
        throttled = f"throttled ({', '.join(reasons)})" if reasons else "not throttled"
        return f"GPU {name}: {clock} of {most} MHz, {throttled}, {nvml.nvmlDeviceGetTemperature(device, 0)} °C"
    except (nvml.NVMLError, AttributeError):  # also an older library
        return ""
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


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
        "processes": lambda: [one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses(device)],
    }
    for name, ask in asked.items():
        try:
            yield f"{name}: {ask()}\n"
        except (nvml.NVMLError, AttributeError) as problem:  # noqa: PERF203  unsupported, or an older library
            yield f"{name}: {problem}\n"


def nccl_ras(env: Mapping[str, str]) -> str:
    """The report of NCCL's RAS subsystem, where a process of this container serves it (NCCL 2.24 and later).

    The protocol is that of NCCL's `ncclras`: lines of text; each command but the last is answered by one line.

    Raises:
        OSError: it is served, but does not answer as it should.
    """
    host, _, port = env.get("NCCL_RAS_ADDR", f"127.0.0.1:{_RAS_PORT}").rpartition(":")
    data, until_s = b"", time.monotonic() + _RAS_S
    try:
        place = (host.strip("[]") or "127.0.0.1", int(port))
        with socket.create_connection(place, timeout=_RAS_S) as connection:
            connection.sendall(b"CLIENT PROTOCOL 2\nTIMEOUT 2\nVERBOSE STATUS\n")
            while len(data) < _RAS_BYTES and (left_s := until_s - time.monotonic()) > 0:
                connection.settimeout(left_s)
                more = connection.recv(65536)
                if not more:
                    break
                data += more
    except (ConnectionRefusedError, ValueError):  # nobody serves it
        return ""
    except TimeoutError:
        pass  # what has come so far is worth something
    if not data.startswith(b"SERVER PROTOCOL "):
        raise OSError(errno.EPROTO, "no answer of NCCL's RAS protocol", f"{host}:{port}")
    return data.decode(errors="replace").partition("\nOK\n")[2] or data.decode(errors="replace")


def native_stacks(pids: Sequence[int], limit_s: float) -> dict[int, str]:
    """All threads' Python and C frames by py-spy, of all processes at once; or why one has none.

    Raises:
        OSError: py-spy is not installed.
    """
    program = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if program is None:
        raise OSError("py-spy is not installed")
    children = {}
    for pid in pids:
        entry = process_tree.read(pid)
        # Who is suspended must stay so: its memory is read, it is not traced.
        how = "--nonblocking" if entry is not None and entry.state in "Tt" else "--native"
        children[pid] = Child((program, "dump", how, "--pid", str(pid)))
    stop_all(tuple(children.values()), limit_s)
    until_s = time.monotonic() + NATIVE_END_S
    ended = {pid: child.end(max(0.0, until_s - time.monotonic())) for pid, child in children.items()}
    return {pid: one.out or f"no stacks by py-spy: {one.failure or one.err}\n" for pid, one in ended.items()}


def is_python(pid: int) -> bool:
    """Whether a process runs a Python interpreter."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    except OSError:
        return False


def environment(env: Mapping[str, str]) -> str:
    """The variables, without secrets."""
    return "".join(f"{name}={redact(name, value)}\n" for name, value in sorted(env.items()))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[: 1 << 16]
    except OSError:
        return ""
