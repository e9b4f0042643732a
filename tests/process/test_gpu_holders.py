"""Who else holds GPU memory, with a library that only pretends to be NVIDIA's."""

from __future__ import annotations

import logging
import os
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from trainer_launch.host import gpu_holders


class Nvml(ModuleType):
    class NVMLError(Exception):
        pass

    def __init__(self, holders=(), *, driver=True):
        super().__init__("pynvml")
        self.holders, self.driver, self.open = holders, driver, 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    def nvmlInit(self):
        if not self.driver:
            raise self.NVMLError
        self.may_answer.wait(10)
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.holders)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, device):
        return f"GPU-{device}abc"

    def nvmlDeviceGetComputeRunningProcesses(self, device):
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.holders[device]]


@pytest.fixture
def nvml(monkeypatch):
    def install(*args, **more):
        made = Nvml(*args, **more)
        monkeypatch.setitem(sys.modules, "pynvml", made)
        return made

    return install


def test_a_holder_is_named_and_we_are_none(nvml):
    library = nvml([[(41, 3 << 30)], [(os.getpid(), 1), (42, None)]])
    assert gpu_holders.holders({}) == [
        "GPU 0: process 41 (as the driver numbers it) holds 3072 MiB while none of our workers runs",
        "GPU 1: process 42 (as the driver numbers it) holds memory while none of our workers runs",
    ]
    assert library.open == 0


@pytest.mark.parametrize(("visible", "pids"), [("0", ["41"]), ("GPU-1", ["42"]), ("1, 0", ["41", "42"]), ("", [])])
def test_only_the_gpus_that_we_see_count(nvml, visible, pids):
    nvml([[(41, 1)], [(42, 1)]])
    found = gpu_holders.holders({"CUDA_VISIBLE_DEVICES": visible})
    assert [text.split()[3] for text in found] == pids


def test_without_library_or_driver_nothing_is_said(nvml, monkeypatch):
    nvml([[(41, 1)]], driver=False)
    assert gpu_holders.holders({}) == []
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert gpu_holders.holders({}) == []


def test_it_is_told_before_the_first_start_and_before_later_ones(nvml, caplog):
    library = nvml([[(41, 1 << 20)]])
    watch = gpu_holders.GpuHolders({})
    assert watch._thread is not None
    watch._thread.join(10)
    with caplog.at_level(logging.WARNING):
        watch.tell(is_first=True)
        assert caplog.text.count("process 41") == 1
        library.holders = [[(42, 1 << 20)]]
        watch.tell(is_first=False)
    assert caplog.text.count("process 41") == 1
    assert caplog.text.count("process 42") == 1


def test_a_driver_that_hangs_holds_nobody_up(nvml, caplog):
    library = nvml([[(41, 1 << 20)]])
    library.may_answer.clear()
    watch = gpu_holders.GpuHolders({})
    watch.tell(is_first=True)
    watch.tell(is_first=False)
    assert caplog.text == ""
    library.may_answer.set()
    assert watch._thread is not None
    watch._thread.join(10)
