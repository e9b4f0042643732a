"""Read what is told of generations and workers in the runtime directory, a line each."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from trainer_launch.host import runtime_directory
from trainer_launch.model.errors import MALFORMED
from trainer_launch.model.frozen import dataclass
from trainer_launch.observability.events import EVENTS, Event

_LAST_BYTES = 16_384
_READ_BYTES = 262_144
_MAX_FIELDS = 12
_BIG = 1 << 53  # exact in every JSON reader
_LATEST_S = 253_402_300_799  # the last second that has four digits for its year


@dataclass(frozen=True, slots=True)
class News:
    """One thing that was told, and when."""

    time_s: float
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How the job stands for this node, as far as its agent knows."""

    generation: int | None = None
    nodes: int | None = None
    restarts: int | None = None  # of workers; the job's, where the nodes meet at our coordinator
    workers: int | None = None  # started on this node


class Tail:
    """Reads what has been added since the last look."""

    def __init__(self, folder: str) -> None:
        self._path = f"{folder}/{runtime_directory.NEWS}"
        self._offset = 0

    def read(self) -> list[News]:
        """The whole lines that are new."""
        text = _read(self._path, self._offset)
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return _parse_all(whole)


def standing(folder: str) -> Standing:
    """What the last lines add up to."""
    path = f"{folder}/{runtime_directory.NEWS}"
    try:
        start = max(0, os.stat(path).st_size - _LAST_BYTES)
    except OSError:
        return Standing()
    return stand(_parse_all(_read(path, start)))


def starts(folder: str) -> int:
    """How often the agents have started workers."""
    tail, count = Tail(folder), 0
    while told := tail.read():
        count += sum(one.event[0] == "workers_started" for one in told)
    return count


def stand(told: Sequence[News]) -> Standing:
    """Where a node stands after these news."""
    latest: dict[str, Any] = {}
    for one in told:
        name, values = one.event
        if name in ("generation_formed", "workers_started"):
            latest.update({key: value for key, value in values.items() if type(value) is int and abs(value) < _BIG})
    return Standing(**{name: latest.get(name) for name in ("generation", "nodes", "restarts", "workers")})


def _read(path: str, offset: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.pread(fd, _READ_BYTES, offset)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _parse_all(text: bytes) -> list[News]:
    return [news for news in map(_parse, text.splitlines()) if news is not None]


def _parse(text: bytes) -> News | None:
    """A line; None for what is none, such as the rest of one that was cut."""
    try:
        values = json.loads(text)
        name, time_s = str(values.pop("event")), float(values.pop("time_s"))
    except MALFORMED:
        return None
    if name not in EVENTS or not 0 <= time_s <= _LATEST_S or len(values) > _MAX_FIELDS or not _are_flat(values):
        return None
    return News(time_s, (name, values))


def _are_flat(values: Mapping[str, Any]) -> bool:
    return all(value is None or type(value) in (str, int, float, bool) for value in values.values())
