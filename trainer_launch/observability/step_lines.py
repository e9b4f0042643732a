"""What programs print of their steps, found in output as it passes by: lines such as `step 40`."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

from msgspec import Struct

from trainer_launch.model.value_parsers import MAX_LINE
from trainer_launch.observability.goodput import Signs
from trainer_launch.supervisor.lines import LINE_BYTES

_TAKES_OVER = 20
_MANY = 8  # lines with steps at each end of one block; what lies between is not looked at
MAX_TEXT = 2_000  # characters of a line that are handed on
_WORD = b"step"
# In small letters, and the word first: IGNORECASE or a \b before it would make the search three times slower.
_STEP = re.compile(rb"step(?<![0-9a-z_]step)[ =:]+([0-9]{1,12})(?![0-9])")
_TAG = re.compile(rb"\[[^\]\n]{1,80}\] ")  # in front of a line: whose it is


class ScannedLine(Struct, frozen=True):
    """A line that tells a step, or that somebody waits for."""

    line: str
    step: int | None = None


class OutputScanner:
    """Of one stream of one process."""

    def __init__(self) -> None:
        self.rest = b""  # of a line whose end has not come
        self.speaker: bytes | None = None  # whose steps count: of a pod's workers the first that said one
        self.last = 0  # what that one said last
        self.others = 0  # steps of others since then

    def scan(self, data: bytes, patterns: tuple[re.Pattern[str], ...] = ()) -> list[ScannedLine]:
        """What is worth telling in these bytes."""
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not cut:
            self.rest = (self.rest + data)[-LINE_BYTES:]
            return []
        text, self.rest = self.rest + data[:cut], data[cut:][-LINE_BYTES:]
        heard = [*self._steps(text)]
        if patterns:
            lines = (shown(line) for line in re.split(rb"[\r\n]+", text) if line)
            heard += [ScannedLine(line) for line in lines if _is_wanted(line, patterns)]
        return heard

    def _steps(self, text: bytes) -> Iterator[ScannedLine]:
        """The first step, each one that goes back, and the last one."""
        last = b""
        is_first = True
        for line, step in self._told(text):
            before, self.last, last = self.last, step, line
            if is_first or step < before:
                yield ScannedLine(shown(line), step)
                is_first, last = False, b""
        if last:
            yield ScannedLine(shown(last), self.last)

    def _told(self, text: bytes) -> Iterator[tuple[bytes, int]]:
        """Steps that count, with their lines."""
        for line in _lines_with_steps(text):
            for match in _STEP.finditer(line.lower()):
                if self._counts(line):
                    yield line, int(match[1])

    def _counts(self, line: bytes) -> bool:
        """Whether the speaker says it, or somebody who seems to have taken over."""
        tag = _TAG.match(line)
        who = tag[0] if tag else b""
        if self.speaker is None or self.others >= _TAKES_OVER:
            self.speaker, self.last = who, 0
        if who != self.speaker:
            self.others += 1
            return False
        self.others = 0
        return True


def _lines_with_steps(text: bytes) -> list[bytes]:
    """Lines with the word; of a flood the first and the last ones: nobody begins anew in between.

    What lies between is not even split: a block of 32 KiB must not hold up the output.
    """
    low = text.lower()
    if not _STEP.search(low):  # which is twice as fast as a look for the word
        return []
    low = low.replace(b"\r", b"\n")
    first, last, begin, end = [], [], 0, len(text)
    while len(first) < _MANY and (at := low.find(_WORD, begin)) >= 0:
        start, begin = low.rfind(b"\n", begin, at) + 1 or begin, low.find(b"\n", at) + 1 or end
        first.append(text[start:begin].rstrip(b"\r\n"))
    while len(last) < _MANY and (at := low.rfind(_WORD, begin, end)) >= 0:
        start, stop = low.rfind(b"\n", begin, at) + 1 or begin, low.find(b"\n", at, end)
        last.append(text[start : end if stop < 0 else stop])
        end = start
    return first + last[::-1]


def _is_wanted(line: str, patterns: tuple[re.Pattern[str], ...]) -> bool:
    return any(pattern.search(line[:MAX_LINE]) for pattern in patterns)


def shown(line: bytes) -> str:
    """As text, without what is too long."""
    return line[: 4 * MAX_TEXT].decode(errors="replace")[:MAX_TEXT]


# -- the steps of this node's workers ----------------------------------------------------------


class PrintedSteps:
    """What the present workers have printed; `heard` runs in the output's thread, which has woken up anyway."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """New workers are about to be started."""
        with self._lock:
            self._scanners: dict[tuple[str, int], OutputScanner] = {}
            self._signs: Signs | None = None

    def heard(self, process: str, stream: int, data: bytes) -> None:
        """A block of a process's output."""
        with self._lock:
            scanner = self._scanners.setdefault((process, stream), OutputScanner())
            steps = [one.step for one in scanner.scan(data) if one.step is not None]
            if steps:
                self._note(steps[-1], time.monotonic())

    def signs(self) -> Signs | None:
        """What they come to; None: no step yet."""
        return self._signs

    def _note(self, step: int, now_s: float) -> None:
        first = self._signs
        first_s, first_step = (now_s, step) if first is None else (first.first_s, first.first_step)
        self._signs = Signs(first_s=first_s, last_s=now_s, first_step=first_step, step=step)
