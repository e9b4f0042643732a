"""NVIDIA's library, played: the file that FAKE_NVML names says what each card tells, and what goes wrong."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

NODE = json.loads(Path(os.environ["FAKE_NVML"]).read_text())
IS_UNDER_LOAD = sys.argv[1:2] == ["watch"]
NVML_ERROR_TIMEOUT = 10
nvmlMemory_v2 = 0x02000028
nvmlGpuFabricInfo_v2 = 0x02000024
nvmlEccSramErrorStatus_v1 = 0x01000068


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(
            {3: "Not Supported", 13: "Function Not Found", 15: "GPU is lost"}.get(value, f"error {value}")
        )
        self.value = value


class c_nvmlGpuFabricInfo_v2_t(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_ubyte * 16),
        *((name, ctypes.c_uint) for name in ("status", "cliqueId", "state", "healthMask")),
    )


class c_nvmlEccSramErrorStatus_v1_t(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint), ("bThresholdExceeded", ctypes.c_uint))


def asked(name, gpu=None):
    """The value of a fact; it may be an error, or never come."""
    if NODE.get("hangs") == name:
        time.sleep(600)
    if name in NODE.get("missing", ()):
        raise NVMLError(13)
    found = (gpu["load"] if gpu is not None and IS_UNDER_LOAD and name in gpu["load"] else (gpu or NODE)).get(name)
    if name == "nvlink_errors" and isinstance(found, list):  # at first, and later
        return found.pop(0) if len(found) > 1 else found[0]
    if isinstance(found, dict):
        raise NVMLError(found["error"])
    return found


def nvmlInit():
    asked("init")


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return len(NODE["gpus"])


def nvmlDeviceGetHandleByIndex(index):
    asked("handle", NODE["gpus"][index])
    return NODE["gpus"][index]


def nvmlSystemGetDriverVersion():
    return asked("driver")


def nvmlDeviceGetTotalEccErrors(gpu, kind, counter):
    assert (kind, counter) == (1, 0)
    return asked("uncorrected", gpu)


def nvmlDeviceGetMigMode(gpu):
    return [asked("mig", gpu)] * 2


def nvmlDeviceGetMaxMigDeviceCount(gpu):
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(gpu, index):
    if index >= asked("mig_parts", gpu):
        raise NVMLError(6)


def nvmlDeviceGetMemoryInfo(gpu, version=None):
    used = asked("memory_used", gpu)
    if isinstance(used, list):  # one for each second that has passed since the file was written
        age_s = time.time() - Path(os.environ["FAKE_NVML"]).stat().st_mtime
        used = used[min(int(age_s), len(used) - 1)]
    return SimpleNamespace(total=asked("memory_total", gpu), used=used)


def nvmlDeviceGetNvLinkState(gpu, link):
    links = asked("nvlinks", gpu)
    if link >= len(links):
        raise NVMLError(2)
    return links[link]


def nvmlDeviceGetFieldValues(gpu, fields):
    value = SimpleNamespace(uiVal=0)
    found = SimpleNamespace(nvmlReturn=0, valueType=1, value=value)
    number = fields[0][0] if isinstance(fields[0], tuple) else fields[0]
    try:
        value.uiVal = asked({230: "recovery"}.get(number, "nvlink_errors"), gpu)
    except NVMLError as problem:
        found.nvmlReturn = problem.value
    return [found]


def nvmlDeviceGetGpuFabricInfoV(gpu, pointer):
    info = pointer._obj
    info.state, info.status, info.healthMask, info.cliqueId = asked("fabric", gpu)
    info.clusterUuid[0] = 0xAB


def nvmlDeviceGetSramEccErrorStatus(gpu, pointer):
    pointer._obj.bThresholdExceeded = asked("sram_threshold", gpu)


def nvmlDeviceGetRowRemapperHistogram(gpu):
    return SimpleNamespace(none=asked("spent_banks", gpu))


def nvmlEventSetCreate():
    asked("events")
    return []


def nvmlDeviceRegisterEvents(gpu, kinds, event_set):
    event_set += [SimpleNamespace(eventType=8, eventData=xid) for xid in asked("xids", gpu)]


def nvmlEventSetWait_v2(event_set, wait_ms):
    if not event_set:
        raise NVMLError(NVML_ERROR_TIMEOUT)
    return event_set.pop()


_PLAIN = {
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetUUID": "uuid",
    "nvmlDeviceGetPowerManagementLimit": "power_limit",
    "nvmlDeviceGetPowerManagementDefaultLimit": "power_default",
    "nvmlDeviceGetRemappedRows": "remapped",
    "nvmlDeviceGetRetiredPagesPendingStatus": "retired_pending",
    "nvmlDeviceGetCurrPcieLinkGeneration": "pcie_gen",
    "nvmlDeviceGetMaxPcieLinkGeneration": "pcie_gen_max",
    "nvmlDeviceGetCurrPcieLinkWidth": "pcie_width",
    "nvmlDeviceGetMaxPcieLinkWidth": "pcie_width_max",
    "nvmlDeviceGetCurrentClocksEventReasons": "reasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons": "old_reasons",
}


def _plain(fact):
    return lambda gpu: asked(fact, gpu)


for _name, _fact in _PLAIN.items():
    globals()[_name] = _plain(_fact)
