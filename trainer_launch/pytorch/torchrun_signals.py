"""Signals that reach a torchrun: the other nodes hear of its end, and the workers get what it would die of."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping

from trainer_launch.model.signal_policy import RELAYED, STOP_SIGNALS

_NAMES = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # set by torch from its option, where it has one


def stopping(env: Mapping[str, str]) -> frozenset[int]:
    """The signals on which torchrun stops its workers and ends."""
    names = [name.strip() for name in env.get(_NAMES, "").split(",")]
    numbers = {int(signal.Signals[name]) for name in names if name in signal.Signals.__members__}
    return frozenset(numbers) or frozenset(map(int, STOP_SIGNALS))


class StopRequest:
    """Calls a function, in a thread, when torchrun is asked to stop.

    The interpreter writes the number of each signal to a descriptor, whoever handles it, so that no handler of
    torch's is replaced.
    """

    def __init__(self, numbers: frozenset[int], asked: Callable[[], None]) -> None:
        self._numbers, self._asked = numbers, asked
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write, False)
        with contextlib.suppress(ValueError):  # not in the main thread: somebody else's program
            before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            if before != -1:
                signal.set_wakeup_fd(before)
        threading.Thread(target=self._look, name="stop request", daemon=True).start()

    def _look(self) -> None:
        while self._numbers.isdisjoint(os.read(self._read, 64)):
            pass
        self._asked()


class Relay:
    """Hands signals on to the workers that torchrun itself would die of; `given` tells whether it has."""

    def __init__(self, numbers: frozenset[int], workers: Callable[[], list[int]]) -> None:
        self._workers = workers
        self.given = False
        for number in numbers:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, self._hand_on)

    def _hand_on(self, number: int, _frame: object) -> None:
        self.given = True
        for pid in self._workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def relayed(env: Mapping[str, str]) -> frozenset[int]:
    """The signals that a launcher hands on and torchrun does not handle."""
    return frozenset(map(int, RELAYED)) - stopping(env)
