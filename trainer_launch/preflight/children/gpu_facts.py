"""What NVIDIA's own library says of this node's GPUs, as one JSON object; started by path.

`watch` in its command line: what happens to them while others load them. It looks many times a second until its
input ends, and tells the worst of each GPU, and the XID errors that the driver told meanwhile.

A call may hang in the driver, so this runs in a child that can be killed. Every fact is ["known", value],
["unsupported"] or ["unknown", why]: what a card or a driver does not tell is no fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import re
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

# By what they are called in nvml.h; a library that is older than a name does not have it.
_UNSUPPORTED, _FUNCTION_NOT_FOUND, _LOST, _RESET_REQUIRED = 3, 13, 15, 16
_RECOVERY_ACTION = 230
_NVLINK_SPEED, _NVLINK_SPEED_COMMON = 164, 90
_NVLINK_ERRORS = (161, 162, 163)  # replay, recovery, CRC
_OLD_NVLINK_ERRORS = (0, 1, 2, 3)  # replay, recovery, CRC of flits and of data
_MAX_LINKS = 18
_FABRIC_DONE = 3
_UNCORRECTED, _VOLATILE, _AGGREGATE = 1, 0, 1
_SLOWDOWN = 1  # a temperature
_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # of a field, by its type
_LIMIT_S, _WATCH_LIMIT_S = 60, 600
_XID = re.compile(r"^[^;]*?,[^;]*?,(\d+)[^;]*;NVRM: Xid \(PCI:([0-9A-Fa-f:]+)[^)]*\): (\d+)")
_RECENT_S, _MAX_RECORDS, _RECORD_BYTES = 7200, 50_000, 8192
INTERVAL_S = 0.05
_XID_EVENT = 8  # the type of event
_TIMED_OUT = 10
_IDLE = 1  # the bit of the reasons
_MAX_EVENTS = 100
_LAST_MS = 100  # an event may come a moment after what it tells of
_COUNTERS = ("pcie_replays", "nvlink_errors")  # many calls, and only their growth matters

Fact = list[Any]


def main() -> None:
    """Print all facts."""
    is_watch = sys.argv[1:] == ["watch"]
    signal.setitimer(signal.ITIMER_REAL, _WATCH_LIMIT_S if is_watch else _LIMIT_S)  # should our parent die first
    os.write(1, json.dumps(asked(watched if is_watch else told)).encode())


def asked(question: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Open the library, ask, close it; or the trouble in the way of that."""
    nvml, trouble = opened()
    if nvml is None:
        return {"trouble": trouble}
    try:
        return question(nvml)
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def told(nvml: Any) -> dict[str, Any]:
    """All facts."""
    try:
        gpus = [of_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        driver = fact(nvml, lambda: text(nvml.nvmlSystemGetDriverVersion()))
        return {
            "trouble": "",
            "driver": driver[1] if driver[0] == "known" else "",
            "gpus": gpus,
            "log": earlier_xids(),
        }
    except nvml.NVMLError as problem:
        return {"trouble": f"the GPUs cannot be counted: {problem}"}


def opened() -> tuple[Any, str]:
    """The library, ready for use; or None, and why."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as problem:
        return None, f"NVIDIA's library cannot be opened: {problem}"
    return nvml, ""


def of_gpu(nvml: Any, index: int) -> dict[str, Any]:
    """All facts of one GPU; `lost`: the driver says that it is gone, or must be reset."""
    lost: list[str] = []
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as problem:
        return {"index": index, "lost": str(problem), "facts": {}}
    facts = {name: fact(nvml, read, lost) for name, read in readings(nvml, handle).items()}
    return {"index": index, "lost": lost[0] if lost else "", "facts": facts}


def fact(nvml: Any, read: Callable[[], Any], lost: list[str] | None = None) -> Fact:
    """What a call gives, or why it gives nothing."""
    try:
        return ["known", read()]
    except nvml.NVMLError as problem:
        code = getattr(problem, "value", None)
        if code == _UNSUPPORTED:
            return ["unsupported"]
        if code in (_LOST, _RESET_REQUIRED) and lost is not None:
            lost.append(str(problem))
        return ["unknown", "the driver is too old for it" if code == _FUNCTION_NOT_FOUND else str(problem)]
    except AttributeError:
        return ["unknown", "nvidia-ml-py is too old for it"]
    except Exception as problem:  # noqa: BLE001  the bindings are made of ctypes, and differ by version
        return ["unknown", f"{type(problem).__name__}: {problem}"[:200]]


def readings(nvml: Any, handle: Any) -> dict[str, Callable[[], Any]]:
    """How each fact is asked for."""
    return {
        "name": lambda: text(nvml.nvmlDeviceGetName(handle)),
        "uuid": lambda: text(nvml.nvmlDeviceGetUUID(handle)),
        "pci": lambda: pci(nvml, handle),
        "recovery": lambda: field(nvml, handle, _RECOVERY_ACTION),
        "ecc_uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _VOLATILE),
        "ecc_uncorrected_ever": lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _AGGREGATE),
        "remapped": lambda: list(nvml.nvmlDeviceGetRemappedRows(handle)),
        "retired_pending": lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle),
        "mig": lambda: nvml.nvmlDeviceGetMigMode(handle)[0],
        "memory_total": lambda: memory(nvml, handle).total,
        "memory_used": lambda: memory(nvml, handle).used,
        "slowdown_c": lambda: nvml.nvmlDeviceGetTemperatureThreshold(handle, _SLOWDOWN),
        "nvlinks": lambda: nvlinks(nvml, handle),
        "nvlink_mbps": lambda: nvlink_mbps(nvml, handle),
        "fabric_error": lambda: fabric_error(nvml, handle),
        **temperatures(nvml, handle),
    }


def temperatures(nvml: Any, handle: Any) -> dict[str, Callable[[], Any]]:
    """What changes under load, and matters at rest, too."""
    return {
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, 0),
        "margin_c": lambda: nvml.nvmlDeviceGetMarginTemperature(handle),
    }


def moving(nvml: Any, handle: Any) -> dict[str, Callable[[], Any]]:
    """What changes under load; of lanes and generation, what there is and what there could be."""
    return {
        **temperatures(nvml, handle),
        "clock_reasons": lambda: clock_reasons(nvml, handle),
        "pcie_generation": lambda: [
            nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
            nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        ],
        "pcie_lanes": lambda: [
            nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
            nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
        ],
        "pcie_replays": lambda: nvml.nvmlDeviceGetPcieReplayCounter(handle),
        "nvlink_errors": lambda: nvlink_errors(nvml, handle),
    }


def text(value: Any) -> str:
    """Old bindings give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def pci(nvml: Any, handle: Any) -> str:
    """The address on the bus, as the kernel writes it."""
    domain, _, rest = text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def field(nvml: Any, handle: Any, number: int, link: int | None = None) -> Any:
    """The value of a field."""
    (found,) = nvml.nvmlDeviceGetFieldValues(handle, [number if link is None else (number, link)])
    if found.nvmlReturn:
        raise nvml.NVMLError(found.nvmlReturn)
    return getattr(found.value, _VALUES[found.valueType])


def clock_reasons(nvml: Any, handle: Any) -> int:
    """Bits that say why clocks are below their maximum; the call had another name once."""
    try:
        return nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except AttributeError:
        return nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except nvml.NVMLError as problem:
        if getattr(problem, "value", None) != _FUNCTION_NOT_FOUND:
            raise
        return nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)


def memory(nvml: Any, handle: Any) -> Any:
    """In bytes. The second version of the call does not count as used what the driver keeps for itself."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
    except (nvml.NVMLError, AttributeError):
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def nvlinks(nvml: Any, handle: Any) -> list[int]:
    """1 for each link that is up, 0 for each that is down."""
    found = [int(nvml.nvmlDeviceGetNvLinkState(handle, 0))]
    with contextlib.suppress(nvml.NVMLError):  # it has no more
        for link in range(1, _MAX_LINKS):
            found.append(int(nvml.nvmlDeviceGetNvLinkState(handle, link)))  # noqa: PERF401  up to the first refusal
    return found


def nvlink_mbps(nvml: Any, handle: Any) -> int:
    """Of the slowest link that is up."""
    up = [link for link, is_up in enumerate(nvlinks(nvml, handle)) if is_up]
    if not up:
        raise nvml.NVMLError(_UNSUPPORTED)
    try:
        return min(field(nvml, handle, _NVLINK_SPEED, link) for link in up)
    except nvml.NVMLError:
        return field(nvml, handle, _NVLINK_SPEED_COMMON)


def nvlink_errors(nvml: Any, handle: Any) -> int:
    """All errors of all links since the driver was loaded."""
    links = range(len(nvlinks(nvml, handle)))
    try:
        return sum(field(nvml, handle, number, link) for link in links for number in _NVLINK_ERRORS)
    except nvml.NVMLError:
        return sum(
            nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, number)
            for link in links
            for number in _OLD_NVLINK_ERRORS
        )


def fabric_error(nvml: Any, handle: Any) -> int:
    """The error with which this GPU ended joining its fabric; 0 where it joined, has none, or is not ready."""
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    info.version = nvml.nvmlGpuFabricInfo_v2
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    return int(info.status) if info.state == _FABRIC_DONE else 0


def earlier_xids(path: str = "/dev/kmsg") -> Fact:
    """Errors of the last hours by the kernel's log, where a container may read it: place, number, seconds ago."""
    found: list[list[Any]] = []
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as problem:
        return ["unknown", f"{path}: {problem.strerror}"]
    try:
        for _ in range(_MAX_RECORDS):
            record = os.read(log, _RECORD_BYTES)
            match = _XID.match(record.decode(errors="replace"))
            ago_s = time.clock_gettime(time.CLOCK_MONOTONIC) - int(match[1]) / 1e6 if match else 0.0
            if match and ago_s < _RECENT_S:
                found.append([match[2].lower(), int(match[3]), round(ago_s)])
            if not record:
                break
    except OSError:  # there is no more of it now
        pass
    finally:
        os.close(log)
    return ["known", found[-100:]]


def watched(nvml: Any) -> dict[str, Any]:
    """All that was seen until the input ended."""
    try:
        gpus = [WatchedGpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as problem:
        return {"trouble": f"the GPUs cannot be watched: {problem}"}
    while True:
        for gpu in gpus:
            gpu.look()
        if select.select([0], [], [], INTERVAL_S)[0] and not os.read(0, 4096):
            return {"trouble": "", "gpus": [gpu.seen() for gpu in gpus]}


class WatchedGpu:
    """One GPU under load."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml, self._index = nvml, index
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self._reads = moving(nvml, self._handle)
        self._last: dict[str, Fact] = {}
        self._values: dict[str, list[Any]] = {name: [] for name in self._reads}
        self._xids: list[int] = []
        self._event_set = fact(nvml, self._register)
        self._see(*_COUNTERS)

    def _register(self) -> Any:
        made = self._nvml.nvmlEventSetCreate()
        self._nvml.nvmlDeviceRegisterEvents(self._handle, _XID_EVENT, made)
        return made

    def look(self) -> None:
        """Once."""
        self._see(*(name for name in self._reads if name not in _COUNTERS))
        self._hear(0)

    def _see(self, *names: str) -> None:
        for name in names:
            if self._last.get(name) != ["unsupported"]:
                self._last[name] = fact(self._nvml, self._reads[name])
                self._values[name] += self._last[name][1:] if self._last[name][0] == "known" else []

    def _hear(self, wait_ms: int) -> None:
        while self._event_set[0] == "known" and len(self._xids) < _MAX_EVENTS:
            try:
                heard = self._nvml.nvmlEventSetWait_v2(self._event_set[1], wait_ms)
            except self._nvml.NVMLError as problem:
                if getattr(problem, "value", None) != _TIMED_OUT:
                    self._event_set = ["unknown", str(problem)]
                return
            if heard.eventType == _XID_EVENT:
                self._xids.append(int(heard.eventData))

    def seen(self) -> dict[str, Any]:
        """The worst of each fact, and the errors that the driver told."""
        self._hear(_LAST_MS)
        self._see(*_COUNTERS)
        facts = {name: summary(name, self._values[name]) or last for name, last in self._last.items()}
        facts["xids"] = ["known", self._xids] if self._event_set[0] == "known" else self._event_set
        return {"index": self._index, "facts": facts}


def summary(name: str, values: list[Any]) -> Fact:
    """The worst of what was seen; how much a counter grew; how often what slowed the clocks down."""
    if not values:
        return []
    if name in _COUNTERS:
        return ["known", values[-1] - values[0]]
    if name != "clock_reasons":
        return ["known", min(values) if name == "margin_c" else max(values)]
    busy = [bits for bits in values if not bits & _IDLE]
    times = Counter(1 << bit for bits in busy for bit in range(int(bits).bit_length()) if bits >> bit & 1)
    return (
        ["known", {"looks": len(busy), "times": times}] if busy else ["unknown", "it was idle whenever we looked"]
    )


if __name__ == "__main__":
    del sys.path[0]  # this folder: its files are no modules for others to import
    main()
