"""Which processes hold memory on the GPUs that our workers are about to use."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from trainer_launch.host import incident_facts
from trainer_launch.host.deadline_subprocess import begin_thread

PATIENCE_S = 0.2  # with a driver that hangs, at a restart; the first start does not wait at all
_log = logging.getLogger(__name__)


class GpuHolders:
    """Looks once at its making, and again before each later start."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._answer: list[str] = []
        self._look()

    def tell(self, *, is_first: bool) -> None:
        """Warn of each holder."""
        if not is_first:
            self._answer = []
            self._look()
            if self._thread is not None:
                self._thread.join(PATIENCE_S)
        if self._thread is None or not self._thread.is_alive():
            for text in self._answer:
                _log.warning("%s", text)

    def _look(self) -> None:
        self._thread = begin_thread("gpu-holders", self._ask)

    def _ask(self) -> None:
        self._answer = holders(self._env)


def holders(env: Mapping[str, str]) -> list[str]:
    """One sentence for each process that holds memory on a GPU that we see; none when nothing can be told."""
    nvml = incident_facts.load_nvml()
    if nvml is None:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver here
        return []
    try:
        return [text for index in range(nvml.nvmlDeviceGetCount()) for text in _on(nvml, index, env)]
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()


def _on(nvml: Any, index: int, env: Mapping[str, str]) -> list[str]:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = nvml.nvmlDeviceGetUUID(device)
    uuid = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
    shown = [word.strip() for word in env.get("CUDA_VISIBLE_DEVICES", str(index)).split(",")]
    if not any(word == str(index) or (word and uuid.startswith(word)) for word in shown):
        return []
    me = os.getpid()
    return [
        f"GPU {index}: process {process.pid} (as the driver numbers it) holds"
        f" {_in_mib(process.usedGpuMemory)} while none of our workers runs"
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(device)
        if process.pid != me
    ]


def _in_mib(size: int | None) -> str:
    return "memory" if size is None else f"{size >> 20} MiB"
