"""A generation's store: opened on a fresh port, and waited at only as long as its generation lives."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore

from trainer_launch.host import sockets
from trainer_launch.membership import timeouts
from trainer_launch.model import PortRange

STORE_TIMEOUT = timedelta(seconds=timeouts.STORE_S)  # all nodes are there when the store is opened
_REACH_S = 1.0  # for one attempt to connect
_SOON_S, _LOOK_S = 0.002, 0.1  # between two looks at the store, at first and at most
_ADVICE = "the store uses a port of --port-range, or any free port: allow traffic between the job's pods there"
_TRIES = 5  # another program may take a port between our look and our use


def open_store(ports: PortRange | None) -> TCPStore:
    """A store in this process, on a port that nobody has used.

    Raises:
        NodeError: all of `ports` are taken.
    """
    tries = _TRIES
    while True:
        tries -= 1
        port = 0 if ports is None else sockets.free_port(ports)
        try:
            return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
        except RuntimeError:  # what torch raises for a port that is taken
            if not tries:
                raise


def reach_store(host: str, port: int, is_over: Callable[[], int]) -> TCPStore:
    """The store that another node has opened, and which goes with that node.

    Raises:
        DistNetworkError: it is not there, and the generation is over or `STORE_TIMEOUT`.
    """
    # torch's own attempts would last until the timeout, and print a stack of C++ each.
    began_s = time.monotonic()
    while (trouble := _trouble(host, port)) is not None:
        waited_s = time.monotonic() - began_s
        if is_over() or waited_s > STORE_TIMEOUT.total_seconds():
            text = f"the store at {host}:{port} could not be reached for {waited_s:.0f} s ({trouble})"
            raise DistNetworkError(f"{text}; {_ADVICE}")
        time.sleep(_LOOK_S)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)


def _trouble(host: str, port: int) -> OSError | None:
    try:
        socket.create_connection((host, port), _REACH_S).close()
    except OSError as problem:
        return problem
    return None


class GenerationStore(PrefixStore):
    """The agents' view of a generation's store, which nobody waits at once the generation is over.

    torch's agents wait for each other's ranks at the start, and up to 300 s at the end, also for one that will
    never come. Its own waiting sees neither that nor a signal, and short pieces of it print a warning each.
    """

    def __init__(self, prefix: str, store: TCPStore, is_over: Callable[[], int]) -> None:
        super().__init__(prefix, store)
        self._is_over = is_over

    def wait(self, keys: list[str], timeout: timedelta = STORE_TIMEOUT) -> None:
        """Wait for keys, but no longer than the generation lives.

        Raises:
            DistStoreError: they do not come in that time.
        """
        self._came(keys, timeout)

    def get(self, key: str) -> bytes:
        """The value of a key that somebody sets.

        Raises:
            DistStoreError: the generation is over before, or `STORE_TIMEOUT`.
        """
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that others set.

        Raises:
            DistStoreError: the generation is over before, or `STORE_TIMEOUT`.
        """
        if not self._came(keys, STORE_TIMEOUT):
            raise DistStoreError("the generation is over")
        return super().multi_get(keys)

    def _came(self, keys: list[str], timeout: timedelta) -> bool:
        """Whether they are there; False when the generation is over before."""
        began_s = time.monotonic()
        while not self.check(keys):
            waited_s = time.monotonic() - began_s
            if self._is_over():
                return False
            if waited_s > timeout.total_seconds():
                text = f"the other nodes' agents have not answered at the job's store for {waited_s:.0f} s"
                raise DistStoreError(f"{text}; {_ADVICE}")
            time.sleep(min(_LOOK_S, max(_SOON_S, waited_s / 4)))
        return True
