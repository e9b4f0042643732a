"""PID 1's side of the workers' flight recorders: asks all at once, and takes what comes in time."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

from trainer_launch.diagnosis.collectives import MAX_BYTES, Recorded, Stage
from trainer_launch.model.codec import MessageError, decode

_READ_BYTES = 65536
_FAR_S = 0.1  # for all to say how far they are; who is stopped does not


_T = TypeVar("_T")


def _renamed(values: Mapping[str, _T], names: Mapping[str, str]) -> dict[str, _T]:
    return {names[name]: value for name, value in values.items() if name in names}


class Recorders:
    """The connections to the workers of one generation, by the names of their processes."""

    def __init__(self) -> None:
        self.at_end: dict[str, Recorded] = {}  # of workers that have ended by themselves, as far as read
        self._connections: dict[str, socket.socket] = {}
        self._unread: dict[str, bytes] = {}
        self._number = 0
        self._far: dict[str, int] = {}
        self._bytes: dict[str, int] = {}  # that each has written to answer
        self._answers: dict[int, dict[str, Recorded]] = {}  # by question; to the last one

    @property
    def names(self) -> set[str]:
        """The workers that could answer."""
        return {*self._connections}

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

    def close(self, but: Mapping[str, str] | None = None) -> None:
        """The generation is over; workers of these names go on in the next one, under others."""
        but = but or {}
        for name in self._connections.keys() - but.keys():
            self._connections.pop(name).close()
        self._connections, self._unread = _renamed(self._connections, but), _renamed(self._unread, but)
        self._far, self._bytes, self.at_end = _renamed(self._far, but), _renamed(self._bytes, but), {}

    def how_far(self) -> dict[str, int]:
        """How many collectives each worker has entered and ended, as far as it has told."""
        if self._connections:
            answers = self.answers(self.question(only_far=True), time.monotonic() + _FAR_S)
            self._far |= {name: answer.far for name, answer in answers.items()}
        return dict(self._far)

    @property
    def farthest(self) -> int:
        """The most that a worker has told when all were asked last; nobody is asked now."""
        return max(self._far.values(), default=0)

    def answered(self, name: str) -> int:
        """Bytes that a worker has written to answer, its dumps included."""
        return self._bytes.get(name, 0)

    def question(
        self,
        folder: str | None = None,
        until_s: float | None = None,
        *,
        only_far: bool = False,
        stacks: bool = False,
    ) -> int:
        """Ask all for what they have recorded; with a `folder` each saves its dump there, but not after `until_s`.

        With `stacks` each answers with those of its threads as well. Return the question's number.
        """
        question = {"folder": folder, "until_s": until_s, "only_far": only_far, "stacks": stacks}
        return self._ask(dict.fromkeys(self._able(), question))

    def entries(self, most: int, until_s: float) -> dict[str, Recorded]:
        """Ask all when they entered their last collectives; the answers that come until then."""
        return self.answers(self._ask({name: {"entries": most} for name in self._able()}), until_s)

    def answers(self, number: int, until_s: float) -> dict[str, Recorded]:
        """The answers to a question; those who do not answer are missing.

        Those that have no process group have nothing to tell, and are not waited for.
        """
        able = self._able()
        answers = self._answers.setdefault(number, {})
        waiting = {self._connections[name].fileno(): name for name in able if name not in answers}
        poll = select.poll()
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        while waiting and (left_s := until_s - time.monotonic()) > 0:
            for fd, _ in poll.poll(left_s * 1000):
                if self._read(waiting[fd]) is False or waiting[fd] in answers:
                    poll.unregister(fd)
                    del waiting[fd]
        return {
            name: Recorded(number=number, stage=Stage.OUTSIDE) for name in self._connections.keys() - able
        } | answers

    def _able(self) -> list[str]:
        """The workers that can answer: each says so, by an empty line, when it has made its first process group."""
        for name in self._connections.keys() - self._bytes.keys():
            self._read(name)
        return [name for name in self._connections if name in self._bytes]

    def _ask(self, questions: Mapping[str, Mapping[str, object]]) -> int:
        self._number += 1
        self._answers = {self._number: {}}
        for name, question in questions.items():
            with contextlib.suppress(OSError):  # it has ended, or has not read for long
                self._connections[name].send(json.dumps({"number": self._number, **question}).encode() + b"\n")
        return self._number

    def _read(self, name: str) -> bool | None:
        """Take what a worker has said; None: nothing is there, False: nothing more will come that can be read."""
        try:
            data = self._connections[name].recv(_READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return False
        self._bytes[name] = self._bytes.get(name, 0) + len(data)
        before = self._unread.get(name, b"")
        *lines, rest = (before + data).split(b"\n")
        self._unread[name] = rest[: MAX_BYTES + 1]  # the rest of a line that is too long is not kept
        for line in lines:
            with contextlib.suppress(MessageError):
                answer = decode(Recorded, line, MAX_BYTES)
                self._bytes[name] += answer.saved
                if answer.number == 0:
                    self.at_end[name] = answer
                elif answer.number in self._answers:
                    self._answers[answer.number][name] = answer
        if len(rest) > MAX_BYTES >= len(before) and self._number in self._answers:
            self._answers[self._number][name] = Recorded(number=self._number, why="its answer is too long")
        return bool(data)
