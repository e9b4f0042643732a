"""Bytes of many pipes in, whole lines of one stream out: with prefixes, none too long, at most so many a second.

The lines kept for the diagnosis are complete, whatever is left out here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from trainer_launch.model.units import counted

LINE_BYTES = 64 * 1024  # longer lines are cut into pieces, each but the last ends with CUT
CUT = b" [...]\n"
TAIL_BYTES = 16 * 1024  # kept per source, for the termination message
_SECOND_S = 1.0


class LineLimit:
    """So many lines a second of one pipe; how many were dropped is told when the second is over."""

    def __init__(self, lines_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines_per_s = lines_per_s
        self._clock = clock
        self._since_s = float("-inf")
        self._used = 0
        self._dropped = 0

    def pass_on(self, body: bytes) -> bytes:
        """Whole lines, as many as there is room for."""
        told = self.told()
        if self._clock() >= self._since_s + _SECOND_S:
            self._since_s, self._used = self._clock(), 0
        lines = body.splitlines(keepends=True)
        shown = lines[: self._lines_per_s - self._used]
        self._used += len(shown)
        self._dropped += len(lines) - len(shown)
        return told + b"".join(shown)

    @property
    def due_s(self) -> float | None:
        """When the number of dropped lines is told, None: there are none."""
        return self._since_s + _SECOND_S if self._dropped else None

    def told(self, *, now: bool = False) -> bytes:
        """The number of dropped lines, when it is due, or now."""
        due_s = self.due_s
        if due_s is None or not (now or self._clock() >= due_s):
            return b""
        dropped, self._dropped = self._dropped, 0
        return f"... {counted(dropped, 'line')} dropped (--output-limit {self._lines_per_s})\n".encode()


class Stream:
    """One of our own streams: what has been written to it last, and by whom."""

    def __init__(self) -> None:
        self.open_by: PipeText | None = None

    def admit(self, source: PipeText, data: bytes) -> bytes:
        """Return what to write so that `data` of `source` does not land in somebody else's line."""
        if self.open_by not in (None, source):
            data = b"\n" + data
        self.open_by = None if data.endswith(b"\n") else source
        return data


class PipeText:
    """One pipe's text."""

    def __init__(self, prefix: bytes, stream: Stream) -> None:
        self.tail = b""
        self.limit: LineLimit | None = None
        self._prefix = prefix
        self._stream = stream
        self._pending = b""  # the begin of a line whose end has not come
        self._mid_line = False  # a partial line of ours was shown
        self._after_cr = False  # the last line ended with \r, perhaps the first half of \r\n

    @property
    def paused_in_line(self) -> bool:
        """Whether a partial line is held back that may be shown now."""
        return bool(self._pending) and self._stream.open_by in (None, self)

    @property
    def due_s(self) -> float | None:
        """When `dropped` has something to tell."""
        return None if self.limit is None else self.limit.due_s

    def dropped(self) -> bytes:
        """How many lines were left out, when that is due."""
        text = self._prefixed(self.limit.told()) if self.limit is not None else b""
        return self._stream.admit(self, text) if text else b""

    def feed(self, data: bytes) -> bytes:
        """Take in new bytes; return the whole lines to write now."""
        self._remember(data)
        start = b""
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
            start = b"\n" if self._stream.open_by is self else b""
        if data:
            self._after_cr = False
        body = self._whole_lines(data)
        if body and self.limit is not None:
            rest = body.find(b"\n") + 1 if self._mid_line else 0  # of a line whose begin was shown
            body = body[:rest] + self.limit.pass_on(body[rest:])
        out = start + self._prefixed(body)
        return self._stream.admit(self, out) if out else b""

    def flush(self, *, end: bool = False) -> bytes:
        """Return the partial line, as it is after a pause, or with a line end when nothing will follow."""
        text, self._pending = self._pending, b""
        text += b"\n" if text and end else b""
        if end and self.limit is not None:
            text += self.limit.told(now=True)
        if not text:
            return b""
        out = self._prefixed(text)
        self._mid_line = not end
        return self._stream.admit(self, out)

    def last_lines(self, count: int) -> tuple[str, ...]:
        """Return the last non-empty lines; of a progress bar only its last state."""
        lines = self.tail.decode(errors="replace").replace("\r\n", "\n").split("\n")
        if len(self.tail) == TAIL_BYTES:
            lines = lines[1:] or lines  # the first is cut somewhere
        shown = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in lines)
        return tuple([line for line in shown if line][-count:])

    def _remember(self, data: bytes) -> None:
        self.tail = data[-TAIL_BYTES:] if len(data) >= TAIL_BYTES else (self.tail + data)[-TAIL_BYTES:]

    def _whole_lines(self, data: bytes) -> bytes:
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if cut:
            body, self._pending = _cut(self._pending + data[:cut]), data[cut:]
            self._after_cr = body.endswith(b"\r") and not self._pending
        else:
            body, self._pending = b"", self._pending + data
        if len(self._pending) > LINE_BYTES:
            whole = len(self._pending) // LINE_BYTES * LINE_BYTES
            body += b"".join(self._pending[at : at + LINE_BYTES] + CUT for at in range(0, whole, LINE_BYTES))
            self._pending = self._pending[whole:]
        return body

    def _prefixed(self, body: bytes) -> bytes:
        if not body:
            return b""
        goes_on = self._mid_line and self._stream.open_by is self
        self._mid_line = False
        inner, last = body[:-1], body[-1:]
        if b"\r" in inner:
            inner = inner.replace(b"\r", b"\r" + self._prefix)
        if self._prefix:
            inner = inner.replace(b"\n", b"\n" + self._prefix)
        return inner + last if goes_on else self._prefix + inner + last


class Untouched(PipeText):
    """One pipe's text, passed on byte for byte as it comes."""

    def feed(self, data: bytes) -> bytes:
        """Remember the last of it; whoever is not a source of this kind does not go on in its line."""
        self._remember(data)
        if data:
            self._stream.open_by = None if data.endswith(b"\n") else self
        return data


def _cut(text: bytes) -> bytes:
    """Cut lines that are too long; nearly always there are none and nothing is copied."""
    if len(text) <= LINE_BYTES:
        return text
    out, start, copied = [], 0, 0
    while len(text) - start > LINE_BYTES:
        limit = start + LINE_BYTES
        end = max(text.rfind(b"\n", start, limit), text.rfind(b"\r", start, limit)) + 1
        if end:
            start = end
        else:
            out += [text[copied:limit], CUT]
            start = copied = limit
    return b"".join([*out, text[copied:]]) if out else text
