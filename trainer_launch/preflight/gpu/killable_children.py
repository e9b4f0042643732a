"""Children that may hang inside a driver: killed when their time is up, and left behind when even that fails."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

MAX_BYTES = 1 << 20  # of what a child says
REAP_S = 5.0  # what SIGKILL may take: the driver tears down what the child had
KILL: Callable[[subprocess.Popen[bytes]], None] = subprocess.Popen.kill  # tests play that it does not help


@dataclass(frozen=True, slots=True)
class Ended:
    """How it went."""

    said: bytes
    status: int | None  # None: not even SIGKILL ended it
    timed_out: bool = False


class Child:
    """One that was started; its output goes to a file, so nobody waits for who reads it.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._timed_out = False
        self._output: IO[bytes] = open(os.memfd_create("said"), "w+b")  # noqa: SIM115  closed in `end`
        try:
            self._process = subprocess.Popen(
                argv, env=dict(env), stdin=subprocess.PIPE, stdout=self._output, stderr=subprocess.DEVNULL
            )
        except OSError:
            self._output.close()
            raise

    def close_input(self) -> None:
        """Tell who reads its input that it is time to end."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def stop(self, limit_s: float) -> None:
        """Wait for its end for so long, then kill it."""
        if self._wait(limit_s) is None:
            self._timed_out = True
            KILL(self._process)

    def end(self, limit_s: float | None = None) -> Ended:
        """How it went; one that was not stopped before is left behind when the time is up."""
        status = self._wait(REAP_S if limit_s is None else limit_s)
        self.close_input()
        with self._output as file:
            file.seek(0)
            return Ended(file.read(MAX_BYTES), status, self._timed_out)

    def _wait(self, limit_s: float) -> int | None:
        try:
            return self._process.wait(max(0.0, limit_s))
        except subprocess.TimeoutExpired:
            return None


def run(argv: Sequence[str], env: Mapping[str, str], limit_s: float) -> Ended:
    """Start it and wait for it.

    Raises:
        OSError: it cannot be started.
    """
    child = Child(argv, env)
    child.stop(limit_s)
    return child.end()
