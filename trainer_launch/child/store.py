"""A generation's store: opened on a fresh port, and waited at only as long as its generation lives."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, TCPStore

from trainer_launch.host import net
from trainer_launch.model import PortRange

STORE_TIMEOUT = timedelta(seconds=60)  # all nodes are there when the store is opened
_LOOK_S = 1.0  # how long one look may sleep: a signal wakes it at once
_TRIES = 5  # another program may take a port between our look and our use


def open_store(ports: PortRange | None) -> TCPStore:
    """A store in this process, on a port that nobody has used.

    Raises:
        NodeError: all of `ports` are taken.
    """
    tries = _TRIES
    while True:
        tries -= 1
        port = 0 if ports is None else net.free_port(ports)
        try:
            return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
        except RuntimeError:  # what torch raises for a port that is taken
            if not tries:
                raise


def reach_store(host: str, port: int) -> TCPStore:
    """The store that another node has opened."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)


class GenerationStore(PrefixStore):
    """The agents' view of a generation's store, which nobody waits at once the generation is over.

    torch's agents wait up to 300 s at the end for each other, also for one that will never come.
    """

    def __init__(self, prefix: str, store: TCPStore, is_over: Callable[[], int]) -> None:
        super().__init__(prefix, store)
        self._is_over = is_over

    def wait(self, keys: list[str], timeout: timedelta = STORE_TIMEOUT) -> None:
        """Wait for keys, but no longer than the generation lives."""
        end_s = time.monotonic() + timeout.total_seconds()
        while not self._is_over() and not self._came(keys, is_last_look=time.monotonic() > end_s):
            pass

    def _came(self, keys: list[str], *, is_last_look: bool) -> bool:
        try:
            super().wait(keys, timedelta(seconds=_LOOK_S))
        except DistStoreError:
            if is_last_look:
                raise
            return False
        return True
