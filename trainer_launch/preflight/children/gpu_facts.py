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
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

try:
    nvml: Any = importlib.import_module("pynvml")
except ImportError:
    nvml = None

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
_RECENT_S, _RECORD_BYTES = 7200, 8192
INTERVAL_S = 0.05
_XID_EVENT = 8  # the type of event
_TIMED_OUT = 10
_IDLE = 1  # the bit of the reasons
_MAX_EVENTS = 100
_LAST_MS = 100  # an event may come a moment after what it tells of

Fact = list[Any]


def main() -> None:
    """Print all facts."""
    is_watch = sys.argv[1:] == ["watch"]
    signal.setitimer(signal.ITIMER_REAL, _WATCH_LIMIT_S if is_watch else _LIMIT_S)  # should our parent die first
    os.write(1, json.dumps(answer(watched if is_watch else at_rest)).encode())


def answer(question: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Open the library and ask, or say what is in the way of that."""
    if nvml is None:
        return {"trouble": "nvidia-ml-py is not installed"}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as problem:
        return {"trouble": f"NVIDIA's library cannot be opened: {problem}"}
    try:
        return question()
    except nvml.NVMLError as problem:
        return {"trouble": f"the GPUs cannot be counted: {problem}"}


def at_rest() -> dict[str, Any]:
    """All facts."""
    gpus = [of_gpu(index) for index in range(nvml.nvmlDeviceGetCount())]
    state, *version = fact(lambda: text(nvml.nvmlSystemGetDriverVersion()))
    driver = version[0] if state == "known" else ""
    return {"trouble": "", "driver": driver, "gpus": gpus, "log": earlier_xids()}


def of_gpu(index: int) -> dict[str, Any]:
    """All facts of one GPU; `lost`: the driver says that it is gone, or must be reset."""
    lost: list[str] = []
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as problem:
        return {"index": index, "lost": str(problem)}
    facts = {name: fact(partial(read, gpu), lost) for name, read in {**AT_REST, **TEMPERATURES}.items()}
    return {"index": index, "lost": lost[0] if lost else "", "facts": facts}


def fact(read: Callable[[], Any], lost: list[str] | None = None) -> Fact:
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


def text(value: Any) -> str:
    """Old bindings give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def pci(gpu: Any) -> str:
    """The address on the bus, as the kernel writes it."""
    domain, _, rest = text(nvml.nvmlDeviceGetPciInfo(gpu).busId).lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def field(gpu: Any, number: int, link: int | None = None) -> Any:
    """The value of a field."""
    (answer,) = nvml.nvmlDeviceGetFieldValues(gpu, [number if link is None else (number, link)])
    if answer.nvmlReturn:
        raise nvml.NVMLError(answer.nvmlReturn)
    return getattr(answer.value, _VALUES[answer.valueType])


def clock_reasons(gpu: Any) -> int:
    """Bits that say why clocks are below their maximum; the call had another name once."""
    try:
        return nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
    except AttributeError:
        return nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    except nvml.NVMLError as problem:
        if getattr(problem, "value", None) != _FUNCTION_NOT_FOUND:
            raise
        return nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)


def memory(gpu: Any) -> Any:
    """In bytes. The second version of the call does not count as used what the driver keeps for itself."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2)
    except (nvml.NVMLError, AttributeError):
        return nvml.nvmlDeviceGetMemoryInfo(gpu)


def nvlinks(gpu: Any) -> list[int]:
    """1 for each link that is up, 0 for each that is down."""
    links = [int(nvml.nvmlDeviceGetNvLinkState(gpu, 0))]
    with contextlib.suppress(nvml.NVMLError):  # it has no more
        for link in range(1, _MAX_LINKS):
            links.append(int(nvml.nvmlDeviceGetNvLinkState(gpu, link)))  # noqa: PERF401  up to the first refusal
    return links


def nvlink_mbps(gpu: Any) -> int:
    """Of the slowest link that is up."""
    up = [link for link, is_up in enumerate(nvlinks(gpu)) if is_up]
    if not up:
        raise nvml.NVMLError(_UNSUPPORTED)
    try:
        return min(field(gpu, _NVLINK_SPEED, link) for link in up)
    except nvml.NVMLError:
        return field(gpu, _NVLINK_SPEED_COMMON)


def nvlink_errors(gpu: Any) -> int:
    """All errors of all links since the driver was loaded."""
    links = range(len(nvlinks(gpu)))
    try:
        return sum(field(gpu, number, link) for link in links for number in _NVLINK_ERRORS)
    except nvml.NVMLError:
        return sum(
            nvml.nvmlDeviceGetNvLinkErrorCounter(gpu, link, number)
            for link in links
            for number in _OLD_NVLINK_ERRORS
        )


def pcie_generation(gpu: Any) -> list[int]:
    """What it is at, and what it could be at."""
    return [nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu), nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu)]


def pcie_lanes(gpu: Any) -> list[int]:
    """What it has, and what it could have."""
    return [nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu), nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)]


def fabric_error(gpu: Any) -> int:
    """The error with which this GPU ended joining its fabric; 0 where it joined, has none, or is not ready."""
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    info.version = nvml.nvmlGpuFabricInfo_v2
    nvml.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(info))
    return int(info.status) if info.state == _FABRIC_DONE else 0


def earlier_xids(path: str = "/dev/kmsg") -> Fact:
    """Errors of the last hours by the kernel's log, where a container may read it: place, number, seconds ago."""
    xids: list[list[Any]] = []
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as problem:
        return ["unknown", f"{path}: {problem.strerror}"]
    with open(log, "rb", buffering=0) as file, contextlib.suppress(OSError):  # there is no more of it now
        while (record := file.read(_RECORD_BYTES)) and len(xids) < _MAX_EVENTS:
            if match := _XID.match(record.decode(errors="replace")):
                ago_s = time.clock_gettime(time.CLOCK_MONOTONIC) - int(match[1]) / 1e6
                xids += [[match[2].lower(), int(match[3]), round(ago_s)]] if ago_s < _RECENT_S else []
    return ["known", xids]


# How each fact of a GPU is asked for.
AT_REST: dict[str, Callable[[Any], Any]] = {
    "name": lambda gpu: text(nvml.nvmlDeviceGetName(gpu)),
    "uuid": lambda gpu: text(nvml.nvmlDeviceGetUUID(gpu)),
    "pci": pci,
    "recovery": lambda gpu: field(gpu, _RECOVERY_ACTION),
    "ecc_uncorrected": lambda gpu: nvml.nvmlDeviceGetTotalEccErrors(gpu, _UNCORRECTED, _VOLATILE),
    "ecc_uncorrected_ever": lambda gpu: nvml.nvmlDeviceGetTotalEccErrors(gpu, _UNCORRECTED, _AGGREGATE),
    "remapped": lambda gpu: list(nvml.nvmlDeviceGetRemappedRows(gpu)),
    "retired_pending": lambda gpu: nvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu),
    "mig": lambda gpu: nvml.nvmlDeviceGetMigMode(gpu)[0],
    "memory_total": lambda gpu: memory(gpu).total,
    "memory_used": lambda gpu: memory(gpu).used,
    "slowdown_c": lambda gpu: nvml.nvmlDeviceGetTemperatureThreshold(gpu, _SLOWDOWN),
    "nvlinks": nvlinks,
    "nvlink_mbps": nvlink_mbps,
    "fabric_error": fabric_error,
}
TEMPERATURES: dict[str, Callable[[Any], Any]] = {
    "temperature_c": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, 0),
    "margin_c": lambda gpu: nvml.nvmlDeviceGetMarginTemperature(gpu),
}
COUNTERS: dict[str, Callable[[Any], Any]] = {  # many calls, and only their growth matters
    "pcie_replays": lambda gpu: nvml.nvmlDeviceGetPcieReplayCounter(gpu),
    "nvlink_errors": nvlink_errors,
}
MOVING: dict[str, Callable[[Any], Any]] = {
    **TEMPERATURES,
    **COUNTERS,
    "clock_reasons": clock_reasons,
    "pcie_generation": pcie_generation,
    "pcie_lanes": pcie_lanes,
}


def watched() -> dict[str, Any]:
    """All that was seen until the input ended."""
    gpus = [WatchedGpu(index) for index in range(nvml.nvmlDeviceGetCount())]
    while True:
        for gpu in gpus:
            gpu.look()
        if select.select([0], [], [], INTERVAL_S)[0] and not os.read(0, 4096):
            return {"trouble": "", "gpus": [gpu.summary() for gpu in gpus]}


class WatchedGpu:
    """One GPU under load."""

    def __init__(self, index: int) -> None:
        self._index, self._gpu = index, nvml.nvmlDeviceGetHandleByIndex(index)
        self._last: dict[str, Fact] = {}
        self._values: dict[str, list[Any]] = {name: [] for name in MOVING}
        self._xids: list[int] = []
        self._event_set = fact(self._register)
        self._see(COUNTERS)

    def _register(self) -> Any:
        made = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(self._gpu, _XID_EVENT, made)
        return made

    def look(self) -> None:
        """Once."""
        self._see([name for name in MOVING if name not in COUNTERS])
        self._hear(0)

    def _see(self, names: Iterable[str]) -> None:
        for name in names:
            if self._last.get(name) != ["unsupported"]:
                self._last[name] = fact(partial(MOVING[name], self._gpu))
                self._values[name] += self._last[name][1:] if self._last[name][0] == "known" else []

    def _hear(self, wait_ms: int) -> None:
        while self._event_set[0] == "known" and len(self._xids) < _MAX_EVENTS:
            try:
                heard = nvml.nvmlEventSetWait_v2(self._event_set[1], wait_ms)
            except nvml.NVMLError as problem:
                if getattr(problem, "value", None) != _TIMED_OUT:
                    self._event_set = ["unknown", str(problem)]
                return
            if heard.eventType == _XID_EVENT:
                self._xids.append(int(heard.eventData))

    def summary(self) -> dict[str, Any]:
        """The worst of each fact, and the errors that the driver told."""
        self._hear(_LAST_MS)
        self._see(COUNTERS)
        facts = {name: worst(name, self._values[name]) or last for name, last in self._last.items()}
        facts["xids"] = ["known", self._xids] if self._event_set[0] == "known" else self._event_set
        return {"index": self._index, "facts": facts}


def worst(name: str, values: list[Any]) -> Fact:
    """The worst of what was seen; how much a counter grew; how often what slowed the clocks down."""
    if not values:
        return []
    if name in COUNTERS:
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
