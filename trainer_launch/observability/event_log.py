"""Write `--events` from a daemon thread: a full disk or a hanging reader never delays the job."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from queue import Empty, Queue
from typing import Any, TypeAlias

from msgspec import Struct

from trainer_launch.host import files, logs, runtime_directory
from trainer_launch.model import Outcome, codec
from trainer_launch.model.exit_codes import retryable
from trainer_launch.model.redaction import redact_text
from trainer_launch.observability import goodput, progress
from trainer_launch.observability.progress import Progress
from trainer_launch.supervisor import outcome as ends
from trainer_launch.supervisor.run_observer import TimeKind

LOOK_S = 1.0  # between two looks at what training processes and the worker group have left
PROGRESS_S = 10.0  # between two lines of progress
LINE_BYTES = 4096  # PIPE_BUF: one write, never torn, never interleaved
TEXT_CHARS = 600
_LAST_BYTES = 16_384
_READ_BYTES = 262_144
_LATEST_S = 253_402_300_799  # the last second that has four digits for its year
Value: TypeAlias = "str | int | float | bool | tuple[str, ...] | Mapping[str, float] | None"
Event: TypeAlias = tuple[str, Mapping[str, Value]]
_Line: TypeAlias = dict[str, str | codec.Whole | float | bool | None]
_log = logging.getLogger(__name__)


class EventLog(logging.Handler):
    """Lines as things happened, also the launcher's warnings, and what others leave in the run's directory."""

    def __init__(self, write: Callable[[bytes], None], node: int | None, run_dir: str) -> None:
        super().__init__(logging.WARNING)
        self._write = write
        self._node = node
        self._run_dir = run_dir
        self._tail = Tail(run_dir)
        self._reported: Progress | None = None
        self._reported_at_s = -PROGRESS_S
        self._queue: Queue[News | None] = Queue()
        self._is_ended = False
        self._last: News | None = None
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()
        logging.getLogger(logs.NAME).addHandler(self)

    def add(self, event: Event) -> None:
        """Take an event; never waits."""
        self._queue.put(News(time.time(), event))

    def emit(self, record: logging.LogRecord) -> None:
        """Take a warning of the launcher itself."""
        self.add(("warning", {"text": record.getMessage()}))

    def end(self, wait_s: float, last: Event | None = None) -> None:
        """Write what is left, then `last`; a reader that hangs is left after `wait_s`. Once is enough."""
        if not self._is_ended:
            self._is_ended, self._last = True, None if last is None else News(time.time(), last)
            logging.getLogger(logs.NAME).removeHandler(self)
            self._queue.put(None)
            self._thread.join(wait_s)

    def _run(self) -> None:
        look_s, is_over = time.monotonic() + LOOK_S, False
        while not is_over:
            with contextlib.suppress(Empty):
                news = self._queue.get(timeout=max(0.0, look_s - time.monotonic()))
                if news is not None:
                    self._put(news)
                    continue
                is_over = True
            for news in self._look(is_over):
                self._put(news)
            look_s = time.monotonic() + LOOK_S
        if self._last is not None:
            self._put(self._last)

    def _look(self, is_last: bool) -> list[News]:
        """The news that training processes and the worker group have left in the directory since the last look."""
        left = self._tail.read()
        latest = progress.first(reports(self._run_dir))
        is_due = is_last or time.monotonic() >= self._reported_at_s + PROGRESS_S
        if latest is not None and latest != self._reported and is_due:
            self._reported, self._reported_at_s = latest, time.monotonic()
            left.append(News(latest.time_s, of_progress(latest)))
        return left

    def _put(self, news: News) -> None:
        self._write(events_line(news.time_s, self._node, news.event))


class File:
    """A file that lines are added to; what cannot be written is dropped, and said once."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._has_warned = False
        self._is_torn = False  # the last line was not written whole
        self._fd: int | None = None
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
        try:
            self._fd = files.answer(path, os.open, path, flags, 0o644)
        except OSError as problem:
            self._say(problem)

    def write(self, line: bytes) -> None:
        """Add a line in one write: several may add to one file."""
        if self._fd is None:
            return
        data = b"\n" + line if self._is_torn else line
        try:
            self._is_torn = os.write(self._fd, data) < len(data)
        except OSError as problem:
            self._say(problem)
            if problem.errno == errno.EPIPE:
                self.close()

    def close(self) -> None:
        """Nothing more is written."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _say(self, problem: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "--events: cannot write %s: %s; the job continues without an event log",
                self._path,
                problem.strerror,
            )


def of_progress(latest: Progress) -> Event:
    """The progress of a training process."""
    return "progress", {
        "rank": latest.rank,
        "step": latest.step,
        "progress": latest.progress,
        "eta_s": latest.eta_s,
        "metrics": latest.metrics,
    }


def of_goodput(seconds: Mapping[TimeKind, float]) -> dict[str, Value]:
    """The goodput, and the seconds by kind."""
    each = {kind.value: round(spent_s, 3) for kind, spent_s in seconds.items() if spent_s >= 0.001}
    return {"goodput_ratio": round(goodput.ratio(seconds), 4), "goodput_seconds": each}


def of_outcome(outcome: Outcome) -> Event:
    """The last line."""
    failure, code = outcome.failure, ends.exit_code(outcome)
    values: dict[str, Value] = {
        "verdict": outcome.verdict.value,
        "exit_code": code,
        "retryable": retryable(code) if failure is None else failure.restart_helps,
        "reason": failure.reason if failure else outcome.verdict.value,
        "message": failure.message if failure else None,
        "rank": failure.rank if failure else None,
        "failed_node": failure.node_rank if failure else None,
        "host": failure.host if failure else None,
        "signal": failure.signal if failure else None,
        "stop_signal": outcome.stop_signal,
        "seconds": round(outcome.took_s, 3),
        "attempt": outcome.attempt,
        "survivors": len(outcome.survivors),
        **({} if outcome.spent_s is None else of_goodput(goodput.read(outcome.spent_s))),
    }
    return "finished", values


def events_line(time_s: float, node: int | None, event: Event) -> bytes:
    """An event as a line of JSON, at most 4,096 bytes; without secrets by their looks."""
    name, values = event
    fields = {"time": rfc3339_ms(time_s), "event": name, "node": node, **values}
    text = _render(fields, TEXT_CHARS)
    for chars in (TEXT_CHARS // 4, TEXT_CHARS // 20):
        if len(text) > LINE_BYTES:  # escaped at its worst a character takes twelve bytes
            short = {key: value for key, value in fields.items() if not isinstance(value, tuple | Mapping)}
            text = _render({**short, "is_cut": True}, chars)
    return text


def strict(value: float) -> float | str:
    """A number as every JSON reader takes it: the three that JSON lacks become words."""
    return value if math.isfinite(value) else str(value)


def rfc3339_ms(time_s: float) -> str:
    """UTC, to the millisecond."""
    when = datetime.fromtimestamp(time_s, timezone.utc)
    return f"{when:%Y-%m-%dT%H:%M:%S}.{when.microsecond // 1000:03d}Z"


def _shown(value: object, chars: int) -> object:
    match value:
        case str():
            return redact_text(value)[:chars]
        case float():
            return strict(value)
        case Mapping():
            return {name: _shown(each, chars) for name, each in value.items()}
        case tuple():
            return [_shown(each, chars) for each in value]
    return value


def _render(fields: Mapping[str, object], chars: int) -> bytes:
    return json.dumps(_shown(fields, chars), separators=(",", ":"), allow_nan=False).encode() + b"\n"


class News(Struct, frozen=True):
    """An event, and when it was told."""

    time_s: float
    event: Event


class Standing(Struct, frozen=True, kw_only=True):
    """How the job stands for this node, as far as its agent knows."""

    generation: int | None = None
    nodes: int | None = None
    restarts: int | None = None  # of workers; the job's, where the nodes meet at our coordinator
    workers: int | None = None  # started on this node
    incident: str | None = None  # the last one, in a sentence
    incident_id: str | None = None
    coordinator: tuple[str, int] | None = None  # host and port, where this node reached it last


class Tail:
    """Reads what has been added since the last look."""

    def __init__(self, folder: str) -> None:
        self._path = f"{folder}/{runtime_directory.NEWS}"
        self._offset = 0

    def read(self) -> list[News]:
        """The whole lines that are new."""
        text = files.read(self._path, _READ_BYTES, self._offset) or b""
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return _parse_all(whole)


def standing(folder: str) -> Standing:
    """The standing that the last lines add up to."""
    return stand(_last(folder))


def reports(folder: str) -> tuple[Progress, ...]:
    """The latest report of each rank that this node has now, lowest first; those of earlier ranks are left out."""
    starts = [values for name, values in (news.event for news in _last(folder)) if name == "workers_started"]
    first, count = (starts[-1].get(key) for key in ("first_rank", "workers")) if starts else (None, None)
    newest: dict[int, Progress] = {}
    for report in sorted(progress.read(folder), key=lambda report: report.at_s):
        rank = report.local_rank if report.rank is None else report.rank
        is_past = isinstance(first, int) and isinstance(count, int) and not first <= rank < first + count
        if report.rank is None or not is_past:
            newest[rank] = report
    return tuple(newest[rank] for rank in sorted(newest))


def stand(news: Sequence[News]) -> Standing:
    """Where a node stands, by these news."""
    latest: dict[str, Any] = {}
    for each in news:
        name, values = each.event
        if name in ("generation_formed", "workers_started"):
            latest.update({key: value for key, value in values.items() if type(value) is int})
        elif name == "incident":
            latest.update({"incident": str(values.get("text")), "incident_id": values.get("id")})
        elif name == "coordinator_found":
            latest["coordinator"] = _place(values)
    return Standing(**{name: latest.get(name) for name in Standing.__struct_fields__})


def _last(folder: str) -> list[News]:
    path = f"{folder}/{runtime_directory.NEWS}"
    return _parse_all(files.read(path, _LAST_BYTES, -_LAST_BYTES) or b"")


def _place(values: Mapping[str, Value]) -> tuple[str, int] | None:
    host, port = values.get("host"), values.get("port")
    return (host, port) if isinstance(host, str) and isinstance(port, int) else None


def _parse_all(text: bytes) -> list[News]:
    return [news for news in map(_parse, text.splitlines()) if news is not None]


def _parse(text: bytes) -> News | None:
    """A line; None for what is none, such as the rest of one that was cut."""
    values = codec.decoded(_Line, text)
    if values is None:
        return None
    name, time_s = values.pop("event", None), values.pop("time_s", None)
    is_news = isinstance(name, str) and isinstance(time_s, int | float) and 0 <= time_s <= _LATEST_S
    return News(time_s, (name, values)) if is_news else None  # type: ignore[arg-type]
