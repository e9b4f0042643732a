"""Carry the output of processes to our own stdout and stderr, and remember its last lines.

The lines of a process with a label get a prefix. The others' stderr is passed on byte for byte, and their stdout is
inherited; a terminal is always inherited, so that a program still sees one. Whoever watches for hangs gets both
streams carried. One thread reads all pipes and writes: it blocks when our reader is slow, and with it the writers,
as without us; the supervisor's loop does not.

Lines kept for the diagnosis are complete, whatever `--output-limit` leaves out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from trainer_launch.host import files, runtime_directory
from trainer_launch.host.logs import PATIENCE_S
from trainer_launch.host.slow_files import file_behind, within
from trainer_launch.model import Destination, Process
from trainer_launch.model.units import counted
from trainer_launch.planning.torchrun_options import PLAIN
from trainer_launch.supervisor.error_lines import latest

LINE_BYTES = 64 * 1024  # the pieces of longer lines, and up to a read more; each but the last ends with CUT
CUT = b" [...]\n"
TAIL_BYTES = 16 * 1024  # kept per source, for the termination message
_SECOND_S = 1.0
_READ_BYTES = 32 * 1024  # larger blocks come from mmap each time, which made it three times slower
_PIPE_BYTES = 1024 * 1024  # what an unprivileged user may ask for; refused beyond the user's share
_AT_ONCE = 32  # reads of one pipe before the next has its turn
_WRITE_S = 0.5  # for the last line to be written
_CATCH_UP_S, _LOOK_S = 0.2, 0.001  # for what a process has left in its pipes
_PAUSE_S = 0.2  # after which a partial line, such as a prompt, is shown
_LAST_LINES = 60  # the error that ended a program may stand before many C++ frames
_COLORS = (36, 33, 32, 35, 34, 31)  # ANSI foregrounds, told apart best in this order
_STDOUT, _STDERR = 1, 2

_log = logging.getLogger(__name__)

Listener = Callable[[str, int, bytes], None]  # process, its stream (1, 2), what it has written; never waits
Sieve = Callable[[bytes], bytes]  # what was written, b"" at its end, becomes what is shown; in the pump's thread


def use_color() -> bool:
    """Whether prefixes are colored: on a terminal, unless NO_COLOR is set (no-color.org)."""
    if runtime_directory.IN_COLOR in os.environ:
        return True
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Output:
    """Pumps pipes into our stdout and stderr, line by line; a listener hears all of it, in the pump's thread."""

    def __init__(
        self,
        *,
        watched: bool = False,
        lines_per_s: int = 0,  # 0: no limit
        listener: Listener | None = None,
        sieve: Sieve | None = None,
    ) -> None:
        self._color = use_color()
        self._watched = watched  # nothing is inherited
        self._sieve = sieve
        self._lines_per_s = lines_per_s
        self._listener = listener
        self._sinks = _sinks()
        self._own = {stream: PipeText(b"", sink.stream) for stream, sink in self._sinks.items()}
        self._pipes: dict[tuple[str, int], _Pipe] = {}  # by process and stream
        self._arrivals: deque[_Pipe] = deque()
        self._catch_up_s = _CATCH_UP_S  # left for the processes that run
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._stop_at_s: float | None = None
        self._thread: threading.Thread | None = None

    def open(
        self,
        process: str,
        label: str | None,
        to: Mapping[int, Destination] | None = None,
    ) -> dict[int, int]:
        """Make the pipes of a process; return their write ends, the caller's, by stream.

        A stream that is not among them is inherited. Without a label, streams that are one file share a pipe.
        `to` has the streams that go elsewhere than to our own, or to files, too.

        Raises:
            OSError: there are too many open files, or a file of `to` cannot be opened.
        """
        to = to or {}
        if label is None and self._lines_per_s:
            label = ""
        carried: list[tuple[int, ...]] = [(_STDOUT,), (_STDERR,)]
        if label is None:
            carried = self._carried(to)
        ends: dict[int, int] = {}
        try:
            for streams in carried:
                ends |= dict.fromkeys(streams, self._open(process, label, streams, to.get(streams[-1], PLAIN)))
        except OSError:
            for fd in {*ends.values()}:
                os.close(fd)
            raise
        return ends

    def _carried(self, to: Mapping[int, Destination]) -> list[tuple[int, ...]]:
        """The streams of an unlabelled process that pass through us; those of one pipe together."""
        if _same_file() and not to:
            return [(_STDOUT, _STDERR)] if self._watched or not os.isatty(_STDERR) else []
        streams = [stream for stream in (_STDOUT, _STDERR) if self._watched or stream == _STDERR or stream in to]
        return [(stream,) for stream in streams if self._watched or stream in to or not os.isatty(stream)]

    def _open(
        self,
        process: str,
        label: str | None,
        streams: tuple[int, ...],
        to: Destination,
    ) -> int:
        copy = None if to.file is None else _File(to.file)
        try:
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
        except OSError:
            if copy is not None:
                copy.close()
            raise
        os.set_blocking(read_end, False)
        sink = self._sinks[streams[-1]]
        prefix = self._prefix(label or "") + to.prefix.encode()
        if not to.is_shown:
            source: PipeText = Untouched(b"", Stream())
        elif label is None and not prefix:
            source = Untouched(b"", sink.stream)
        else:
            source = PipeText(prefix, sink.stream)
            source.limit = LineLimit(self._lines_per_s) if self._lines_per_s else None
            with contextlib.suppress(OSError):  # the user's share of pipe memory is used up: slower, not wrong
                fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        pipe = _Pipe(read_end, source, sink if to.is_shown else None, copy)
        pipe.sieve = self._sieve
        if self._listener is not None:
            pipe.listener = partial(self._listener, process, streams[-1])
        self._pipes |= {(process, stream): pipe for stream in streams}
        self._catch_up_s = _CATCH_UP_S
        self._arrivals.append(pipe)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="output", daemon=True)
            self._thread.start()
        self._wake()
        return write_end

    def rename(self, processes: Mapping[str, Process]) -> None:
        """Processes of these names go on as those, all at once."""
        pipes = self._pipes.items()
        going = [(processes[name], stream, pipe) for (name, stream), pipe in pipes if name in processes]
        moved = {(process.name, stream): pipe for process, stream, pipe in going}
        self._pipes = {key: pipe for key, pipe in pipes if key[0] not in processes} | moved
        for process, stream, pipe in going:
            to = process.streams.get(stream, PLAIN)
            pipe.source.prefix = self._prefix(process.label or "") + to.prefix.encode()
            if self._listener is not None:
                pipe.listener = partial(self._listener, process.name, stream)

    def catch_up(self, process: str) -> None:
        """Wait a moment until what a process that has ended left in its pipes is read.

        On a busy machine the thread is late, and the last words say why the process ended. Where they never come,
        PID 1 waits once for all that end together.
        """
        pipes = self._pipes_of(process)
        begun_s = time.monotonic()
        until_s = begun_s + self._catch_up_s
        while any(pipe.has_more() for pipe in pipes) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        self._catch_up_s -= min(self._catch_up_s, time.monotonic() - begun_s)

    def last_lines(self, process: str) -> tuple[str, ...]:
        """Return what a process wrote last: its errors, and before them its output."""
        *output, errors = [(), *(pipe.source.last_lines(_LAST_LINES) for pipe in self._pipes_of(process))]
        lines = [line for lines in (*output, errors) for line in lines]
        return tuple(lines[-max(_LAST_LINES, len(errors)) :])

    def last_errors(self, process: str) -> tuple[str, ...]:
        """Return what a process wrote last to stderr alone; nothing where both streams share a pipe."""
        pipe = self._pipes.get((process, _STDERR))
        is_shared = pipe is self._pipes.get((process, _STDOUT))
        return () if pipe is None or is_shared else pipe.source.last_lines(_LAST_LINES)

    def last_line(self, process: str) -> str:
        """Return the newest line of a process: of the stream that it wrote to last."""
        newest = sorted(self._pipes_of(process), key=lambda pipe: pipe.heard_at_s, reverse=True)
        return next((line for pipe in newest for line in pipe.source.last_lines(1)), "")

    def heard(self, process: str) -> int:
        """How many bytes a process has written so far: changes are what counts."""
        return sum(pipe.bytes for pipe in self._pipes_of(process))

    def say(self, line: bytes, stream: int = _STDERR) -> None:
        """Write a whole line of the launcher's own, between the lines of others."""
        self._sinks[stream].put(lambda: self._own[stream].feed(line), PATIENCE_S)

    def close(self, wait_s: float) -> bool:
        """Read what is left, at most for `wait_s`: a survivor may hold a pipe open. False: our reader hangs."""
        if self._thread is None:
            return True
        more_s = _WRITE_S if self._stop_at_s is None else 0.0  # whoever hangs has had it
        self._stop_at_s = time.monotonic() + wait_s
        self._wake()
        self._thread.join(wait_s + more_s)
        return not self._thread.is_alive()

    def _pipes_of(self, process: str) -> list[_Pipe]:
        """Of its output, and of its errors; one where both share it."""
        pipes = dict.fromkeys(self._pipes.get((process, stream)) for stream in (_STDOUT, _STDERR))
        return [pipe for pipe in pipes if pipe is not None]

    def _prefix(self, label: str) -> bytes:
        if not label:
            return b""  # whole lines are all that is wanted
        # The job's own rank ends a label, so that pods of a rehearsal, each with its own pump, differ in colour.
        digits = label.rpartition(":")[2]
        number = int(digits) if digits.isdecimal() else 0
        text = f"[{label}]"
        return (f"\x1b[{_COLORS[number % len(_COLORS)]}m{text}\x1b[0m " if self._color else f"{text} ").encode()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the thread wakes up anyway
            os.write(self._wake_write, b".")

    def _run(self) -> None:
        try:
            self._pump()
        except Exception:  # noqa: BLE001 - a defect of ours: unread pipes would fill up, and block the workers
            _log.critical("internal error in the output's thread; from now on lines have no labels", exc_info=True)
            self._pass_on()

    def _pass_on(self) -> None:
        """Copy what comes to our own stderr, and nothing else."""
        while self._goes_on():
            for key, _ in self._selector.select(1.0):
                if key.data is None:
                    self._admit()
                    continue
                with contextlib.suppress(BlockingIOError):
                    if data := os.read(key.fd, _READ_BYTES):
                        self._sinks[_STDERR].put(partial(bytes, data))
                    else:
                        self._selector.unregister(key.fd)
                        os.close(key.fd)

    def _pump(self) -> None:
        while self._goes_on():
            for key, _ in self._selector.select(self._timeout_s()):
                if key.data is None:
                    self._admit()
                elif not key.data.pump(time.monotonic()):
                    self._forget(key.data)
            self._show_partial_lines()
        for pipe in self._readers():
            for _ in range(_PIPE_BYTES // _READ_BYTES):
                pipe.pump(time.monotonic())
            self._forget(pipe)

    def _goes_on(self) -> bool:
        if self._stop_at_s is None:
            return True
        return bool(self._arrivals or self._readers()) and time.monotonic() < self._stop_at_s

    def _admit(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while self._arrivals:
            pipe = self._arrivals.popleft()
            self._selector.register(pipe.fd, selectors.EVENT_READ, pipe)

    def _forget(self, pipe: _Pipe) -> None:
        self._selector.unregister(pipe.fd)
        pipe.finish()

    def _readers(self) -> list[_Pipe]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _timeout_s(self) -> float | None:
        times = [pipe.heard_at_s + _PAUSE_S for pipe in self._readers() if pipe.source.paused_in_line]
        times += [] if self._stop_at_s is None else [self._stop_at_s]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _show_partial_lines(self) -> None:
        """Show those that have paused, such as a prompt."""
        now_s = time.monotonic()
        for pipe in self._readers():
            if pipe.source.paused_in_line and now_s >= pipe.heard_at_s + _PAUSE_S:
                pipe.show(pipe.source.flush)


class _Pipe:
    def __init__(self, fd: int, source: PipeText, sink: _Sink | None, copy: _File | None) -> None:
        self.fd, self.source = fd, source
        self._sink = sink  # None: not shown
        self._copy = copy
        self.listener: Callable[[bytes], None] | None = None
        self.sieve: Sieve | None = None
        self.heard_at_s = 0.0
        self.bytes = 0
        self._is_moving = self._is_over = False

    def has_more(self) -> bool:
        """Whether something is to be read, or has been read and is not yet among the lines; from any thread."""
        if self._is_over:
            return False
        there = select.poll()
        there.register(self.fd, select.POLLIN)
        return self._is_moving or any(event & select.POLLIN for _, event in there.poll(0))

    def pump(self, now_s: float) -> bool:
        """Move what is there, to the end of a line if it is there, too; False at the end of the pipe."""
        self._is_moving = True
        try:
            return self._move(now_s)
        finally:
            self._is_moving = False

    def _move(self, now_s: float) -> bool:
        for _ in range(_AT_ONCE):
            try:
                data = os.read(self.fd, _READ_BYTES)
            except BlockingIOError:
                return True
            self._take(data, now_s)
            if len(data) < _READ_BYTES or data.endswith(b"\n"):
                return bool(data)
        return True

    def _take(self, data: bytes, now_s: float) -> None:
        if data:  # its end is no word
            self.heard_at_s = now_s
        self.bytes += len(data)
        shown = data if self.sieve is None else self.sieve(data)
        self.show(lambda: self.source.feed(shown))
        if self._copy is not None:
            self._copy.write(data)
        if self.listener is not None:
            self.listener(data)

    def show(self, text: Callable[[], bytes]) -> None:
        """Write what `text` makes of the stream as it stands now, where this pipe is shown."""
        if self._sink is None:
            text()
        else:
            self._sink.put(text)

    def finish(self) -> None:
        """Close it, and write what was held back: nothing will follow."""
        self._is_over = True
        os.close(self.fd)
        self.show(lambda: self.source.flush(end=True))
        if self._copy is not None:
            self._copy.close()


class _Sink:
    """An own stream; when its reader is gone, the output for it is dropped and the job goes on."""

    def __init__(self, fd: int, stream: Stream, lock: threading.Lock) -> None:
        self.fd, self.stream = fd, stream
        self._path = file_behind(fd)
        self._lock = lock  # one per stream: who is mid-line and what is written must agree
        self._broken = False
        self._has_warned = False
        self._hangs = False  # its reader had a moment for our last line, and did not take it

    def put(self, text: Callable[[], bytes], patience_s: float = -1.0) -> None:
        """Write what `text` makes of the stream as it stands now; drop it if a reader hangs beyond our patience.

        A reader that hangs has our patience once: all lines of the end have to fit into the pod's grace period.
        """
        is_ours, patience_s = patience_s >= 0, 0.0 if self._hangs and patience_s > 0 else patience_s
        if not self._lock.acquire(timeout=patience_s):
            self._hangs = True
            return
        try:
            if is_ours and self._path:
                within(self._path, None, self._write, text(), wait_s=patience_s)
                return
            self._hangs = is_ours and not select.select([], [self.fd], [], patience_s)[1]
            if not self._hangs:
                self._write(text())
        finally:
            self._lock.release()

    def _write(self, data: bytes) -> None:
        if self._broken or not data:
            return
        try:
            _write_all(self.fd, data)
        except OSError as error:
            self._broken = error.errno in (errno.EPIPE, errno.EBADF)
            if not self._has_warned and self.fd != _STDERR:
                self._has_warned = True
                text = f"trainer_launch: cannot write to stdout ({error.strerror}); the job goes on without it\n"
                with contextlib.suppress(OSError):
                    os.write(_STDERR, text.encode())


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # noqa: PERF203  somebody who shares the stream made it non-blocking
            select.select([], [fd], [])


def _same_file() -> bool:
    return os.path.sameopenfile(_STDOUT, _STDERR)


def _sinks() -> dict[int, _Sink]:
    """Give both streams one memory of open lines when they are one file, as after 2>&1."""
    shared = _same_file()
    out = _Sink(_STDOUT, stream := Stream(), lock := threading.Lock())
    err = _Sink(_STDERR, stream, lock) if shared else _Sink(_STDERR, Stream(), threading.Lock())
    return {_STDOUT: out, _STDERR: err}


class _File:
    """A file that is appended to; when it cannot be written, that is said once and the job goes on."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: int | None = files.appended(path, 0o666)

    def write(self, data: bytes) -> None:
        """All of it."""
        if self._fd is None:
            return
        try:
            _write_all(self._fd, data)
        except OSError as problem:
            _log.warning(
                "cannot write to %s: %s; the job continues without this file", self._path, problem.strerror
            )
            self.close()

    def close(self) -> None:
        """Give it back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class LineLimit:
    """So many lines a second of one pipe; how many were dropped is told before the next line that is shown."""

    def __init__(self, lines_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines_per_s = lines_per_s
        self._clock = clock
        self._since_s = float("-inf")
        self._used = 0
        self._dropped = 0

    def pass_on(self, body: bytes) -> bytes:
        """Whole lines, as many as there is room for."""
        notice = b""
        if self._clock() >= self._since_s + _SECOND_S:
            self._since_s, self._used, notice = self._clock(), 0, self.drop_notice()
        lines = body.splitlines(keepends=True)
        shown = lines[: self._lines_per_s - self._used]
        self._used += len(shown)
        self._dropped += len(lines) - len(shown)
        return notice + b"".join(shown)

    def drop_notice(self) -> bytes:
        """The number of lines that were dropped since the last notice."""
        dropped, self._dropped = self._dropped, 0
        if not dropped:
            return b""
        return f"... {counted(dropped, 'line')} dropped (--output-limit {self._lines_per_s})\n".encode()


class Stream:
    """An own stream: the process that wrote to it last, where its line is still open."""

    def __init__(self) -> None:
        self.open_by: PipeText | None = None

    def admit(self, source: PipeText, data: bytes) -> bytes:
        """Return what to write so that `data` of `source` does not land in somebody else's line."""
        if self.open_by not in (None, source):
            data = b"\n" + data
        self.open_by = None if data.endswith(b"\n") else source
        return data


class PipeText:
    """The text of one pipe."""

    def __init__(self, prefix: bytes, stream: Stream) -> None:
        self.tail = b""
        self.limit: LineLimit | None = None
        self.prefix = prefix
        self._stream = stream
        self._pending = b""  # the begin of a line whose end has not come
        self._mid_line = False  # a partial line of ours was shown

    @property
    def paused_in_line(self) -> bool:
        """Whether a partial line is held back that may be shown now."""
        return bool(self._pending) and self._stream.open_by in (None, self)

    def feed(self, data: bytes) -> bytes:
        """Take in new bytes; return the whole lines to write now."""
        self._remember(data)
        body = self._whole_lines(data)
        if body and self.limit is not None:
            rest = body.find(b"\n") + 1 if self._mid_line else 0  # of a line whose begin was shown
            body = body[:rest] + self.limit.pass_on(body[rest:])
        out = self._prefixed(body)
        return self._stream.admit(self, out) if out else b""

    def flush(self, *, end: bool = False) -> bytes:
        """Return the partial line, as it is after a pause, or with a line end when nothing will follow."""
        text, self._pending = self._pending, b""
        text += b"\n" if text and end else b""
        if end and self.limit is not None:
            text += self.limit.drop_notice()
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
        return tuple(latest([line for line in shown if line], count))

    def _remember(self, data: bytes) -> None:
        self.tail = data[-TAIL_BYTES:] if len(data) >= TAIL_BYTES else (self.tail + data)[-TAIL_BYTES:]

    def _whole_lines(self, data: bytes) -> bytes:
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        body = self._pending + data[:cut] if cut else b""
        self._pending = data[cut:] if cut else self._pending + data
        if len(self._pending) > LINE_BYTES:
            body, self._pending = body + self._pending + CUT, b""
        return body

    def _prefixed(self, body: bytes) -> bytes:
        if not body:
            return b""
        goes_on = self._mid_line and self._stream.open_by is self
        self._mid_line = False
        inner, last = body[:-1], body[-1:]
        if b"\r" in inner:
            inner = inner.replace(b"\r", b"\r" + self.prefix)
        if self.prefix:
            inner = inner.replace(b"\n", b"\n" + self.prefix)
        return inner + last if goes_on else self.prefix + inner + last


class Untouched(PipeText):
    """The text of one pipe, passed on byte for byte as it comes."""

    def feed(self, data: bytes) -> bytes:
        """Remember the last of it; whoever is not a source of this kind does not go on in its line."""
        self._remember(data)
        if data:
            self._stream.open_by = None if data.endswith(b"\n") else self
        return data
