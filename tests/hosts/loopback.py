"""The hosts of a machine where we are not root: plain processes, told apart by host name in the environment only.

They share one network and one process table, so nothing can move, be cut off, or look up a name.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence

import psutil

from tests.cli.launching import clean_env
from trainer_launch.rehearsal.controllers.local_jobs import address_of


class LoopbackHost:
    """One host, as far as its programs can be made to believe it."""

    def __init__(self, number: int, name: str) -> None:
        self.name, self.address = name, address_of(number)

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a program; it is to end with `kill`."""
        return subprocess.Popen(
            argv,
            env=clean_env({"HOSTNAME": self.name, "GLOO_SOCKET_IFNAME": "lo", **env}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def process_1(self, started: subprocess.Popen[str]) -> psutil.Process:
        """The program that was started."""
        return psutil.Process(started.pid)

    def kill(self, started: subprocess.Popen[str]) -> None:
        """Kill the program and all below it, as the end of a process namespace does."""
        program = psutil.Process(started.pid)
        for process in (program, *program.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
