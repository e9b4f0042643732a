"""What happens to this node's GPUs while others load them: started by path, ends when its input does.

Looks many times a second, and prints one JSON object at the end: for each GPU the worst, and the XID errors that
the driver told meanwhile. What the kernel's log has from earlier is not asked for: a container cannot read it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from trainer_launch.preflight.children import gpu_facts

INTERVAL_S = 0.05
_XID = 8  # the type of event
_TIMED_OUT = 10
_IDLE = 1  # the bit of the reasons
_MAX_EVENTS = 100
_LAST_MS = 100  # an event may come a moment after what it tells of
_COUNTERS = ("pcie_replays", "nvlink_errors")  # many calls, and only their growth matters
_LIMIT_S = 600


def main() -> None:
    """Watch until the input ends."""
    signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
    nvml, trouble = gpu_facts.opened()
    if nvml is None:
        said: dict[str, Any] = {"trouble": trouble}
    else:
        said = watched(nvml)
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    os.write(1, json.dumps(said).encode())


def watched(nvml: Any) -> dict[str, Any]:
    """All that was seen until the input ended."""
    try:
        gpus = [Gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as problem:
        return {"trouble": f"the GPUs cannot be watched: {problem}"}
    while True:
        for gpu in gpus:
            gpu.look()
        if select.select([0], [], [], INTERVAL_S)[0] and not os.read(0, 4096):
            return {"trouble": "", "gpus": [gpu.told() for gpu in gpus]}


class Gpu:
    """One GPU under watch."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml, self._index = nvml, index
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self._reads = gpu_facts.moving(nvml, self._handle)
        self._reasons: Counter[int] = Counter()
        self._busy = 0
        self._last: dict[str, gpu_facts.Fact] = {}
        self._first: dict[str, gpu_facts.Fact] = {}
        self._most: dict[str, float] = {}
        self._least: dict[str, float] = {}
        self._events: list[int] = []
        self._event_set = gpu_facts.fact(nvml, self._register)

    def _register(self) -> Any:
        made = self._nvml.nvmlEventSetCreate()
        self._nvml.nvmlDeviceRegisterEvents(self._handle, _XID, made)
        return made

    def look(self) -> None:
        """Once."""
        for name, read in self._reads.items():
            if name not in _COUNTERS or name not in self._last:
                self._see(name, read)
        state, *rest = self._last["clock_reasons"]
        if state == "known" and not rest[0] & _IDLE:
            self._busy += 1
            self._reasons.update(1 << bit for bit in range(int(rest[0]).bit_length()) if rest[0] >> bit & 1)
        self._hear(0)

    def _see(self, name: str, read: Callable[[], Any]) -> None:
        if self._last.get(name) == ["unsupported"]:
            return
        found = self._last[name] = gpu_facts.fact(self._nvml, read)
        if found[0] == "known":
            self._first.setdefault(name, found)
            self._most[name] = max(found[1], self._most.get(name, found[1]))
            self._least[name] = min(found[1], self._least.get(name, found[1]))

    def _hear(self, wait_ms: int) -> None:
        while self._event_set[0] == "known" and len(self._events) < _MAX_EVENTS:
            try:
                heard = self._nvml.nvmlEventSetWait_v2(self._event_set[1], wait_ms)
            except self._nvml.NVMLError as problem:
                if getattr(problem, "value", None) != _TIMED_OUT:
                    self._event_set = ["unknown", str(problem)]
                return
            if heard.eventType == _XID:
                self._events.append(int(heard.eventData))

    def told(self) -> dict[str, Any]:
        """What was seen."""
        self._hear(_LAST_MS)
        for name in _COUNTERS:
            self._see(name, self._reads[name])
        return {
            "index": self._index,
            "uuid": gpu_facts.fact(self._nvml, lambda: gpu_facts.text(self._nvml.nvmlDeviceGetUUID(self._handle))),
            "busy": self._busy,
            "xids": ["known", self._events] if self._event_set[0] == "known" else self._event_set,
            "reasons": {str(bit): count for bit, count in self._reasons.items()},
            "facts": {name: self._summary(name, found) for name, found in self._last.items()},
        }

    def _summary(self, name: str, found: gpu_facts.Fact) -> gpu_facts.Fact:
        """Least, most, and how much it grew."""
        if name not in self._most:
            return found
        return ["known", [self._least[name], self._most[name], self._most[name] - self._first[name][1]]]


if __name__ == "__main__":
    del sys.path[0]
    main()
