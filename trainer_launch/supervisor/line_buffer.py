r"""Turn the bytes of many sources into whole, prefixed lines. Knows no descriptor and no clock.

Lines end with \n or \r: a progress bar stays live, its line is redrawn with its prefix. `open_by` remembers who
left our stream in the middle of a line (after \r, or by a partial line shown because its source paused); whoever
else writes then begins with \n, so that two sources never share a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

LINE_BYTES = 64 * 1024  # longer lines are cut into pieces, each but the last ends with CUT
CUT = b" [...]\n"
TAIL_BYTES = 16 * 1024  # kept per source, for the termination message


class Stream:
    """One of our own streams: what has been written to it last, and by whom."""

    def __init__(self) -> None:
        self.open_by: Source | None = None

    def admit(self, source: Source, data: bytes) -> bytes:
        """Return what to write so that `data` of `source` does not land in somebody else's line."""
        if self.open_by not in (None, source):
            data = b"\n" + data
        self.open_by = None if data.endswith(b"\n") else source
        return data


class Source:
    """One pipe's text."""

    def __init__(self, prefix: bytes, stream: Stream) -> None:
        self.tail = b""
        self.gate: Callable[[bytes], bytes] | None = None  # leaves lines out
        self._prefix = prefix
        self._stream = stream
        self._pending = b""  # the begin of a line whose end has not come
        self._mid_line = False  # a partial line of ours was shown
        self._after_cr = False  # the last line ended with \r, perhaps the first half of \r\n

    @property
    def paused_in_line(self) -> bool:
        """Whether a partial line is held back that may be shown now."""
        return bool(self._pending) and self._stream.open_by in (None, self)

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
        if body and self.gate is not None:
            rest = body.find(b"\n") + 1 if self._mid_line else 0  # of a line whose begin was shown
            body = body[:rest] + self.gate(body[rest:])
        out = start + self._prefixed(body)
        return self._stream.admit(self, out) if out else b""

    def flush(self, *, end: bool = False) -> bytes:
        """Return the partial line, as it is after a pause, or with a line end when nothing will follow."""
        text, self._pending = self._pending, b""
        if not text:
            return b""
        out = self._prefixed(text + (b"\n" if end else b""))
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
            body, self._pending = _fold(self._pending + data[:cut]), data[cut:]
            self._after_cr = body.endswith(b"\r") and not self._pending
        else:
            body, self._pending = b"", self._pending + data
        if len(self._pending) > LINE_BYTES:
            whole = len(self._pending) // LINE_BYTES * LINE_BYTES
            body += b"".join(piece + CUT for piece in _pieces(self._pending[:whole]))
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


class Untouched(Source):
    """One pipe's text, passed on byte for byte as it comes."""

    def feed(self, data: bytes) -> bytes:
        """Remember the last of it; whoever is not a source of this kind does not go on in its line."""
        self._remember(data)
        if data:
            self._stream.open_by = None if data.endswith(b"\n") else self
        return data


def _pieces(text: bytes) -> Iterator[bytes]:
    for start in range(0, len(text), LINE_BYTES):
        yield text[start : start + LINE_BYTES]


def _fold(text: bytes) -> bytes:
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
