"""Facts of this node's GPUs by NVIDIA's own library, as a JSON object; started by path.

With `watch SECONDS` in the command line: facts under the load of others. It looks many times a second until its
input ends, and prints the worst of each GPU, and the XID errors that the driver reported meanwhile.

A call may hang in the driver, so this runs in a child that can be killed. A fact that a driver does not give is in
`unknown`, with the reason; a fact that a card does not have is neither there nor among the facts.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib
import json
import os
import select
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

try:
    nvml: Any = importlib.import_module("pynvml")
except ImportError:
    nvml = None

# By what they are called in nvml.h; a library that is older than a name does not have it.
_UNSUPPORTED, _NO_PERMISSION, _NO_FUNCTION, _LOST, _RESET_REQUIRED = 3, 4, 13, 15, 16
_RECOVERY_ACTION = 230
_NVLINK_ERRORS = (161, 162, 163)  # replay, recovery, CRC
_MAX_LINKS = 18
_UNCORRECTED, _VOLATILE = 1, 0
_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # of a field, by its type
_LIMIT_S, _WATCH_LIMIT_S = 60, 600.0
INTERVAL_S = 0.05
_XID_EVENT = 8  # the type of event
_TIMED_OUT = 10
_IDLE = 1  # the bit of the reasons
_MAX_EVENTS = 100
_LAST_MS = 100  # an event may come a moment after what it tells of


def main() -> None:
    """Print all facts."""
    is_watch, limit_s = sys.argv[1:2] == ["watch"], [*map(float, sys.argv[2:]), _WATCH_LIMIT_S][0]
    signal.setitimer(signal.ITIMER_REAL, limit_s if is_watch else _LIMIT_S)  # should our parent die first
    os.write(1, b"\n")  # from here on only the driver can take long
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
    gpus = [of_gpu(index) | {"index": number} for number, index in enumerate(own())]
    driver = Facts()
    driver.ask("version", lambda: text(nvml.nvmlSystemGetDriverVersion()))
    n_all = nvml.nvmlDeviceGetCount()
    counts = {"n_others": n_all - len(gpus), "n_unseen": len(glob.glob("/dev/nvidia[0-9]*")) - n_all}
    return {"trouble": "", "driver": driver.answers.get("version", ""), "gpus": gpus, **counts}


def own() -> Iterator[int]:
    """The numbers of this container's GPUs: the library may count others', too."""
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as problem:
            if getattr(problem, "value", None) == _NO_PERMISSION:
                continue
        yield index


def of_gpu(index: int) -> dict[str, Any]:
    """All facts of one GPU; `lost`: the driver says that it is gone, or must be reset."""
    facts = Facts()
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as problem:
        return {"lost": str(problem)}
    for name, read in AT_REST.items():
        facts.ask(name, partial(read, gpu))
    if facts.answers.get("mig"):
        facts.answers.pop("memory_used", None)  # that of all who share it
    return {"lost": facts.lost, "facts": facts.answers, "unknown": facts.unknown}


class Facts:
    """Answers of calls, and why others gave none."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.unknown: dict[str, str] = {}
        self.lost = ""

    def ask(self, name: str, read: Callable[[], Any]) -> None:
        """Once; the newest answer counts."""
        self.unknown.pop(name, None)
        try:
            self.answers[name] = read()
        except nvml.NVMLError as problem:
            code = getattr(problem, "value", None)
            if code in (_LOST, _RESET_REQUIRED):
                self.lost = self.lost or str(problem)
            if code != _UNSUPPORTED:
                is_old = code == _NO_FUNCTION
                self.unknown[name] = "the driver is too old for it" if is_old else str(problem)
        except AttributeError:
            self.unknown[name] = "nvidia-ml-py is too old for it"
        except Exception as problem:  # noqa: BLE001  the bindings are made of ctypes, and differ by version
            self.unknown[name] = f"{type(problem).__name__}: {problem}"[:200]


def text(value: Any) -> str:
    """Old bindings give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def field(gpu: Any, number: int, link: int | None = None) -> Any:
    """The value of a field."""
    (answer,) = nvml.nvmlDeviceGetFieldValues(gpu, [number if link is None else (number, link)])
    if answer.nvmlReturn:
        raise nvml.NVMLError(answer.nvmlReturn)
    return getattr(answer.value, _VALUES[answer.valueType])


def clock_reasons(gpu: Any) -> int:
    """Bits that say why clocks are below their maximum; bindings and drivers had another name for it once."""
    try:
        return nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
    except (nvml.NVMLError, AttributeError):
        return nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)


def memory(gpu: Any) -> Any:
    """In bytes. The second version of the call does not count as used what the driver keeps for itself."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2)
    except (nvml.NVMLError, AttributeError):
        return nvml.nvmlDeviceGetMemoryInfo(gpu)


def mig_parts(gpu: Any) -> int:
    """How many parts of this GPU the container may use."""
    parts = 0
    for at in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        with contextlib.suppress(nvml.NVMLError):  # it is not there, or another container's
            nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, at)
            parts += 1
    return parts


def nvlinks(gpu: Any) -> list[int]:
    """1 for each link that is up, 0 for each that is down."""
    links = [int(nvml.nvmlDeviceGetNvLinkState(gpu, 0))]
    with contextlib.suppress(nvml.NVMLError):  # it has no more
        for link in range(1, _MAX_LINKS):
            links.append(int(nvml.nvmlDeviceGetNvLinkState(gpu, link)))  # noqa: PERF401  up to the first refusal
    return links


def nvlink_errors(gpu: Any) -> int:
    """All errors of all links since the driver was loaded."""
    links = range(len(nvlinks(gpu)))
    return sum(field(gpu, number, link) for link in links for number in _NVLINK_ERRORS)


def pcie_generation(gpu: Any) -> list[int]:
    """The present PCIe generation, and the best possible."""
    return [nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu), nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu)]


def pcie_lanes(gpu: Any) -> list[int]:
    """The present number of PCIe lanes, and the most possible."""
    return [nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu), nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)]


def fabric(gpu: Any) -> dict[str, Any]:
    """How far this GPU is with joining its NVLink fabric, with whom, and how it fares there."""
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    info.version = nvml.nvmlGpuFabricInfo_v2
    nvml.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(info))
    place = {"cluster": bytes(info.clusterUuid).hex(), "clique": info.cliqueId}
    return {"state": info.state, "status": info.status, "health": info.healthMask, **place}


def sram_threshold(gpu: Any) -> bool:
    """Whether the errors of its SRAM are more than NVIDIA lets a card have."""
    errors = nvml.c_nvmlEccSramErrorStatus_v1_t()
    errors.version = nvml.nvmlEccSramErrorStatus_v1
    nvml.nvmlDeviceGetSramEccErrorStatus(gpu, ctypes.byref(errors))
    return bool(errors.bThresholdExceeded)


# How each fact of a GPU is asked for.
AT_REST: dict[str, Callable[[Any], Any]] = {
    "name": lambda gpu: text(nvml.nvmlDeviceGetName(gpu)),
    "uuid": lambda gpu: text(nvml.nvmlDeviceGetUUID(gpu)),
    "recovery": lambda gpu: field(gpu, _RECOVERY_ACTION),
    "ecc_uncorrected": lambda gpu: nvml.nvmlDeviceGetTotalEccErrors(gpu, _UNCORRECTED, _VOLATILE),
    "remapped": lambda gpu: list(nvml.nvmlDeviceGetRemappedRows(gpu)),
    "retired_pending": lambda gpu: nvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu),
    "mig": lambda gpu: nvml.nvmlDeviceGetMigMode(gpu)[0],
    "mig_parts": mig_parts,
    "memory_total": lambda gpu: memory(gpu).total,
    "memory_used": lambda gpu: memory(gpu).used,
    "power_limit": lambda gpu: [
        nvml.nvmlDeviceGetPowerManagementLimit(gpu),
        nvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu),
    ],
    "nvlinks": nvlinks,
    "fabric": fabric,
    "sram_threshold": sram_threshold,
    "spent_banks": lambda gpu: int(nvml.nvmlDeviceGetRowRemapperHistogram(gpu).none),
}


def watched() -> dict[str, Any]:
    """All that was seen until the input ended."""
    gpus = {}
    for number, index in enumerate(own()):
        with contextlib.suppress(nvml.NVMLError):  # it is lost; the others are there
            gpus[number] = WatchedGpu(index)
    while True:
        for gpu in gpus.values():
            gpu.look()
        if select.select([0], [], [], INTERVAL_S)[0] and not os.read(0, 4096):
            return {"trouble": "", "gpus": [gpu.summary() | {"index": at} for at, gpu in gpus.items()]}


class WatchedGpu:
    """A GPU under load."""

    def __init__(self, index: int) -> None:
        self._gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        self._facts, self._start = Facts(), Facts()
        self._looks, self._times = 0, Counter[int]()
        self._xids: list[int] = []
        self._start.ask("nvlink_errors", partial(nvlink_errors, self._gpu))
        self._start.ask("events", self._register)

    def _register(self) -> Any:
        made = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(self._gpu, _XID_EVENT, made)
        return made

    def look(self) -> None:
        """Once."""
        for name, read in (("load pcie_generation", pcie_generation), ("load pcie_lanes", pcie_lanes)):
            self._facts.ask(name, partial(self._best, name, read))
        self._facts.ask("load clock_reasons", self._clocks)
        self._hear(0)

    def _best(self, name: str, read: Callable[[Any], list[int]]) -> list[int]:
        return max(read(self._gpu), self._facts.answers.get(name, []))

    def _clocks(self) -> dict[str, Any]:
        """How often what slowed the clocks down, while the GPU was busy."""
        bits = int(clock_reasons(self._gpu))
        if not bits & _IDLE:
            self._looks += 1
            self._times.update(1 << bit for bit in range(bits.bit_length()) if bits >> bit & 1)
        return {"looks": self._looks, "times": self._times}

    def _hear(self, wait_ms: int) -> None:
        events = self._start.answers
        while "events" in events and len(self._xids) < _MAX_EVENTS:
            try:
                heard = nvml.nvmlEventSetWait_v2(events["events"], wait_ms)
            except nvml.NVMLError as problem:
                if getattr(problem, "value", None) != _TIMED_OUT:
                    del events["events"]
                    self._start.unknown["events"] = str(problem)
                return
            self._xids += [int(heard.eventData)] if heard.eventType == _XID_EVENT else []

    def summary(self) -> dict[str, Any]:
        """The worst of each fact, and the errors that the driver reported."""
        self._hear(_LAST_MS)
        answers, unknown = self._facts.answers, self._facts.unknown
        if "nvlink_errors" in self._start.answers:
            before = self._start.answers["nvlink_errors"]
            self._facts.ask("load nvlink_errors", lambda: nvlink_errors(self._gpu) - before)
        if "events" in self._start.answers:
            answers["load xids"] = self._xids
        elif "events" in self._start.unknown:
            unknown["load xids"] = self._start.unknown["events"]
        if not self._looks and answers.get("load clock_reasons"):  # an idle card's link is slow and narrow
            for name in ("load clock_reasons", "load pcie_generation", "load pcie_lanes"):
                if answers.pop(name, None):
                    unknown[name] = "it was idle in every sample"
        unknown = {name: why for name, why in unknown.items() if name not in answers}
        return {"facts": answers, "unknown": unknown}


if __name__ == "__main__":
    del sys.path[0]  # this folder: its files are no modules for others to import
    main()
