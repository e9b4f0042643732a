"""PID 1's side of `generations()`: workers that leave a generation which is over, and enter the next one."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Mapping, Sequence

from trainer_launch.model.codec import MessageError
from trainer_launch.pytorch.generations import (
    MAX_BYTES,
    EnterGeneration,
    Inside,
    LeaveGeneration,
    OfLauncher,
    OfWorker,
    Outside,
    of_launcher,
    of_worker,
)
from trainer_launch.supervisor.system import System


class Survivors:
    """The connections to the workers that may keep their state, by the names of their processes."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._connections: dict[str, socket.socket] = {}
        self.able: set[str] = set()  # inside of their loops

    def open(self, names: Sequence[str]) -> list[int]:
        """Make a connection for each worker; their ends are the caller's.

        Raises:
            OSError: there are too few descriptors.
        """
        theirs = []
        for name in names:
            ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            self._connections[name] = ours
            self._system.listen(ours.fileno())
            theirs.append(other.detach())
        return theirs

    def close(self, but: Mapping[str, str] | None = None) -> None:
        """Workers of these names go on, under others; all others have ended."""
        but = but or {}
        for name in self._connections.keys() - but.keys():
            self._close(name)
        self._connections = {but[name]: connection for name, connection in self._connections.items()}
        self.able = {but[name] for name in self.able}

    def _close(self, name: str) -> None:
        connection = self._connections.pop(name)
        self._system.listen(connection.fileno(), wanted=False)
        connection.close()
        self.able.discard(name)

    def leave(self, names: Collection[str], generation: int) -> None:
        """Tell them that the generation is over."""
        for name in names:
            self._tell(name, LeaveGeneration(generation))

    def dismiss(self, names: Collection[str]) -> None:
        """End workers that wait in vain for a generation, also those that only note a request to stop."""
        for name in self._connections.keys() & names:
            self._close(name)

    def enter(self, name: str, environment: Mapping[str, str], *, has_state: bool) -> None:
        """Tell a worker who it is in the next one, and whether its state is that of the last one."""
        self._tell(name, EnterGeneration(environment, has_state))

    def _tell(self, name: str, message: OfLauncher) -> None:
        with contextlib.suppress(OSError, KeyError):  # it has ended, or does not read: its time will be over
            self._connections[name].send(of_launcher.encode(message))

    def hear(self) -> list[tuple[str, OfWorker]]:
        """The messages of workers since the last time, with their names."""
        messages: list[tuple[str, OfWorker]] = []
        for name in [*self._connections]:
            while (message := self._next_of(name)) is not None:
                if isinstance(message, Inside):
                    self.able.add(name)
                    continue
                if isinstance(message, Outside):
                    self.able.discard(name)
                messages.append((name, message))
        return messages

    def _next_of(self, name: str) -> OfWorker | None:
        connection = self._connections.get(name)
        try:
            data = b"" if connection is None else connection.recv(MAX_BYTES)
            if data:
                return of_worker.decode(data)
        except BlockingIOError:
            return None
        except (OSError, MessageError):
            pass  # whatever it is, it has no business here
        if connection is not None:
            self._close(name)
        return None
