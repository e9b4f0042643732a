"""What the fork server makes of the words of the processes that it forks."""

from __future__ import annotations

import os

import pytest

from trainer_launch.pytorch.fork_server_process import _read_report
from trainer_launch.pytorch.messages import OpenStore, StoreOpen


@pytest.mark.parametrize("told", [b"pid 7\nport 29500\n", b"port 29500\npid 7\n"])
def test_a_store_may_tell_its_port_before_its_pid_is_told(told: bytes) -> None:
    report, to_report = os.pipe()
    os.write(to_report, told)
    os.close(to_report)
    try:
        assert _read_report(OpenStore(), report) == StoreOpen(7, 29500)
    finally:
        os.close(report)
