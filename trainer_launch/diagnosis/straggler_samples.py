"""A node's part in the looks for stragglers: asks its workers, tells the coordinator, says who is late."""

from __future__ import annotations

import linecache
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from trainer_launch.diagnosis.collectives import Entries, Look, Recorded
from trainer_launch.diagnosis.lateness import SHOW_ENTRIES_S
from trainer_launch.diagnosis.recorder_questions import Recorders
from trainer_launch.diagnosis.stragglers import Lateness
from trainer_launch.diagnosis.topics import (
    STRAGGLERS,
    ClockAnswer,
    ClockQuestion,
    Entered,
    ShowEntries,
    Stragglers,
    opened_by_node,
)
from trainer_launch.diagnosis.worker_samples import Place
from trainer_launch.host import runtime_directory
from trainer_launch.host.deadline_subprocess import begin_thread
from trainer_launch.membership.protocol import Note
from trainer_launch.model import Workers
from trainer_launch.model.codec import encode

_FIRST_S = 0.1  # until workers have answered; then twice as long, again and again
_MESSAGE_BYTES = 56_000  # leaves room in a line
_PLACE_CHARS = 200
_TOLD = ("rank", "steps", "late", "median_s", "p95_s", "step_s")  # of a straggler, to the event log
# In torch's point-to-point operations, or in a line that waits for some. Collectives are known from the recorder.
_WAITS_IN = re.compile(r"/torch/distributed/")
_COLLECTIVE = re.compile(r"_?(all_|reduce|broadcast|barrier|monitored_barrier|gather|scatter)")
_WAITS_BY = re.compile(r"\.(wait|recv|result)\(")
_log = logging.getLogger(__name__)


def answer(note: Note) -> Note | None:
    """What is said at once to a note, in the thread that has received it: what this node's clock shows."""
    body = opened_by_node(note, note.generation) if note.topic == STRAGGLERS else None
    if not isinstance(body, ClockQuestion):
        return None
    return Note(note.generation, STRAGGLERS, ClockAnswer(body.number, time.time_ns()))


class StragglerSamples:
    """The samples of one node's workers."""

    def __init__(
        self,
        recorders: Recorders,
        workers: Workers,
        places: Callable[[], Mapping[str, Place]],
        send: Callable[[object], None],
        tell: Callable[[Sequence[Lateness]], None] = lambda ranks: None,
    ) -> None:
        """`places` gives the present workers by name; `send` sends the coordinator a note's body.

        `tell` lets observers know.
        """
        self._recorders, self._workers, self._places = recorders, workers, places
        self._send, self._tell = send, tell
        self._devices: dict[int, str] = {}
        self._named: tuple[Lateness, ...] = ()
        self._pause_s, self._until_s = 0.0, 0.0
        self.due_s: float | None = None  # when the workers may have answered

    def hear(self, note: object, now_s: float) -> None:
        """The coordinator asks, or tells what came of it."""
        match note:
            case ShowEntries():
                suspects = [name for name, place in self._places().items() if place.rank in note.suspects]
                self._recorders.ask_entries(note.most, note.looks_us, suspects)
                looks_s = note.looks_us / 1e6
                self._pause_s, self._devices = _FIRST_S, {}
                self._look_at_devices(note.suspects)
                self.due_s = now_s + looks_s + _FIRST_S
                self._until_s = now_s + looks_s + SHOW_ENTRIES_S / 2
            case Stragglers():
                self._name(note.ranks)

    def end(self) -> None:
        """The generation is over."""
        self.due_s = None
        self._name(())

    def look(self, now_s: float) -> None:
        """Tell the coordinator what the workers have answered, once all have or time is over."""
        if self.due_s is None or now_s < self.due_s:
            return
        answers, are_all = self._recorders.entries()
        if not are_all and now_s < self._until_s:
            self._pause_s *= 2
            self.due_s = min(now_s + self._pause_s, self._until_s)
            return
        ranks = fitting([_looked(said) for said in answers.values() if said.entries is not None])
        self._send(Entered(ranks, tuple(dict(self._devices).items())))
        self.due_s = None

    def _look_at_devices(self, suspects: Sequence[int]) -> None:
        """What NVML says of the suspects' GPUs, where it is there; a thread asks, for a driver may hang."""
        shown = re.findall(r"[^,\s]+", self._workers.env.get("CUDA_VISIBLE_DEVICES", ""))
        suspected = {place.rank: place.local_rank for place in self._places().values() if place.rank in suspects}
        gpus = {rank: shown[n] if n < len(shown) else str(n) for rank, n in suspected.items()}
        if gpus:
            begin_thread("gpus", _ask_nvml, gpus, self._devices)

    def _name(self, ranks: Sequence[Lateness]) -> None:
        """Say who is new; who is gone has recovered, and nobody is told."""
        known = {one.rank for one in self._named}
        if not ranks and not known:
            return
        for one in ranks:
            if one.rank not in known:
                _log.warning("%s", one)
                told = {name: getattr(one, name) for name in _TOLD}
                more = {"place": one.place or None, "device": one.device or None}
                runtime_directory.tell(self._workers.run_dir, "straggler", **told, **more)
        self._named = tuple(ranks)
        self._tell(self._named)


def _ask_nvml(gpus: Mapping[int, str], told: dict[int, str]) -> None:
    from trainer_launch.host import incident_facts  # only who has a suspect needs it

    for rank, name in gpus.items():
        if text := incident_facts.gpu(name):
            told[rank] = text


def _looked(said: Recorded) -> Entries:
    """A worker's entries, with what its stacks show in one phrase each."""
    entries = said.entries
    assert entries is not None
    if said.looks:
        linecache.checkcache()
    return replace(entries, looks=tuple(_look(at_ns, stack) for at_ns, stack in said.looks))


def _look(at_ns: int, stack: Sequence[str]) -> Look:
    """Whether the rank waits for another one where the recorder does not tell it, or does what takes its time."""
    from trainer_launch.diagnosis import stacks  # only who has a suspect needs it

    frames = []
    for text in stack:
        file, line, function = (*text.rsplit(":", 2), "0", "")[:3]
        frames.append(stacks.Frame(file, int(line) if line.isdecimal() else 0, function))
    down: list[stacks.Frame] = []
    for frame in frames:
        down.append(frame)
        if not frame.is_library:
            break
    line = linecache.getline(down[-1].file, down[-1].line) if down else ""
    inside = [frame for frame in down if _WAITS_IN.search(frame.file)]
    if stacks.doing(tuple(frames)).takes_long:
        return Look(at_ns, True, "")
    waits = not any(_COLLECTIVE.match(one.function) for one in inside) and bool(inside or _WAITS_BY.search(line))
    return Look(at_ns, waits, stacks.where(tuple(frames))[:_PLACE_CHARS] if frames else "")


def fitting(ranks: Sequence[Entries]) -> tuple[Entries, ...]:
    """As many of the last entries as fit into a message."""
    most = max((len(one.which) for one in ranks), default=0)
    told = tuple(ranks)
    while most and sum(len(encode(one)) for one in told) > _MESSAGE_BYTES:
        most //= 2
        told = tuple(one.last(most) for one in ranks)
    return told if most else ()
