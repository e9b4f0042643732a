"""PID 1's side of the workers' flight recorders: asks all at once, and takes what comes in time."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Collection, Mapping, Sequence

from trainer_launch.diagnosis.collectives import MAX_BYTES, Recorded
from trainer_launch.model.codec import MessageError, decode

_READ_BYTES = 65536
_FAR_S = 0.1  # for all to say how far they are; who is stopped does not


class Recorders:
    """The connections to the workers of one generation, by the names of their processes."""

    def __init__(self) -> None:
        self.at_end: dict[str, Recorded] = {}  # of workers that have ended by themselves, as far as read
        self._connections: dict[str, socket.socket] = {}
        self._unread: dict[str, bytes] = {}
        self._number = 0
        self._far: dict[str, int] = {}
        self._bytes: dict[str, int] = {}  # that each has written to answer
        self._sampled: dict[str, Recorded] = {}  # answers to the last question for entries
        self._sample = 0  # its number

    def open(self, names: Sequence[str]) -> list[int]:
        """Make a connection for each worker; their ends are the caller's.

        Raises:
            OSError: there are too few descriptors.
        """
        theirs = []
        for name in names:
            ours, other = socket.socketpair()
            ours.setblocking(False)
            self._connections[name] = ours
            theirs.append(other.detach())
        return theirs

    def close(self) -> None:
        """The generation is over."""
        for connection in self._connections.values():
            connection.close()
        self._connections, self._unread, self._far, self._bytes, self.at_end = {}, {}, {}, {}, {}

    def how_far(self) -> dict[str, int]:
        """How many collectives each worker has entered and ended, as far as it has told."""
        told = self.answers(self.question(only_far=True), time.monotonic() + _FAR_S) if self._connections else {}
        for name, said in told.items():
            self._far[name] = sum(group.entered + group.done for group in said.groups.values())
        return dict(self._far)

    @property
    def farthest(self) -> int:
        """The most that one has told when all were asked last; nobody is asked now."""
        return max(self._far.values(), default=0)

    def answered(self, name: str) -> int:
        """Bytes that a worker has written to answer, its dumps included."""
        return self._bytes.get(name, 0)

    def question(self, folder: str | None = None, until_s: float | None = None, *, only_far: bool = False) -> int:
        """Ask all for what they have recorded; with a `folder` each saves its dump there, but not after `until_s`.

        Return the question's number.
        """
        self._number += 1
        for name in self._asked():
            about = {"folder": folder, "until_s": until_s, "only_far": only_far}
            self._ask(name, {"number": self._number, **about})
        return self._number

    def ask_entries(self, most: int, after_us: int = 0, looked_at: Collection[str] = ()) -> None:
        """Ask all when they will have entered their last collectives then, and some where they are until then."""
        self._number += 1
        self._sample, self._sampled = self._number, {}
        for name in self._asked():
            looks = name in looked_at
            self._ask(name, {"number": self._number, "entries": most, "after_us": after_us, "looks": looks})

    def entries(self) -> tuple[Mapping[str, Recorded], bool]:
        """What has come of it so far, and whether that is all; does not wait."""
        names = {self._connections[name].fileno(): name for name in self._bytes}
        poll = select.poll()
        for fd in names:
            poll.register(fd, select.POLLIN)
        while ready := poll.poll(0):
            for fd, _ in ready:
                if self._read(names[fd], self._sample)[1]:
                    poll.unregister(fd)
        return self._sampled, len(self._sampled) == len(names)

    def _asked(self) -> list[str]:
        """Those that can answer: each says so, by an empty line, when it has made its first process group."""
        for name in self._connections.keys() - self._bytes.keys():
            self._read(name, -1)
        return [name for name in self._connections if name in self._bytes]

    def _ask(self, name: str, question: Mapping[str, object]) -> None:
        with contextlib.suppress(OSError):  # it has ended, or has not read for long
            self._connections[name].send(json.dumps(question).encode() + b"\n")

    def answers(self, number: int, until_s: float) -> dict[str, Recorded]:
        """The answers to a question; those who do not answer are missing.

        Those that have no process group have nothing to tell, and are not waited for.
        """
        asked = self._asked()
        found = {name: Recorded(number=number) for name in self._connections.keys() - asked}
        waiting = {self._connections[name].fileno(): name for name in asked}
        poll = select.poll()
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        while waiting and (left_s := until_s - time.monotonic()) > 0:
            for fd, _ in poll.poll(left_s * 1000):
                name = waiting[fd]
                answer, is_over = self._read(name, number)
                if answer is not None:
                    found[name] = answer
                if answer is not None or is_over:
                    poll.unregister(fd)
                    del waiting[fd]
        return found

    def _read(self, name: str, number: int) -> tuple[Recorded | None, bool]:
        """An answer to this question if there is one, and whether no more will come."""
        try:
            data = self._connections[name].recv(_READ_BYTES)
        except BlockingIOError:
            return None, False
        except OSError:
            return None, True
        self._bytes[name] = self._bytes.get(name, 0) + len(data)
        before = self._unread.get(name, b"")
        *lines, rest = (before + data).split(b"\n")
        self._unread[name] = rest[: MAX_BYTES + 1]  # the rest of a line that is too long is not kept
        found = None
        for line in lines:
            with contextlib.suppress(MessageError):
                said = decode(Recorded, line, MAX_BYTES)
                self._bytes[name] += said.saved
                if said.number == 0:
                    self.at_end[name] = said
                elif said.number == self._sample:
                    self._sampled[name] = said
                if said.number == number:
                    found = said
        if found is not None:
            return found, False
        if len(rest) > MAX_BYTES >= len(before):
            return Recorded(number=number, why="its answer is too long"), True
        return None, not data
