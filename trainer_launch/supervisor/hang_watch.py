"""The hang watch: looks at this node's workers at a pace, and when they hang saves all stacks and ends them.

What is a hang is decided in `hang`. Nobody is killed before every worker's stacks are on disk. An event
tells the worker group, or the supervisor's machine, which ends them.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import tempfile
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone

from trainer_launch.host import process_tree
from trainer_launch.model.frozen import dataclass, replace
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor import hang_detection
from trainer_launch.supervisor.hang_detection import Hang, Kind, Rules, Worker, ranges
from trainer_launch.supervisor.worker_samples import Workers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What is watched, and what for."""

    rules: Rules
    folder: str  # where stacks are saved
    alone: bool  # no other node could be waited for


class Watch:
    """Looks when it is due."""

    def __init__(self, watched: Watched, workers: Workers, now_s: float) -> None:
        self._watched = watched
        self._workers = workers
        self._node = hang_detection.begin(now_s)
        self._asked_at_s: float | None = None  # the begin of an idleness that was looked into
        self._elsewhere: tuple[Worker, ...] = ()  # who then did not wait for others
        self.due_s = now_s

    def look(self, now_s: float) -> ev.Hung | None:
        """Look once; act on a hang, and tell of one that the supervisor has to end itself."""
        rules = self._watched.rules
        self.due_s = now_s + rules.pace_s
        self._node = hang_detection.observe(self._node, self._workers.look(), now_s, rules)
        found = hang_detection.judge(self._node, rules)
        if found is None:
            return None
        found = self._named(found, now_s)
        return None if found is None else self._strike(found, now_s)

    def _named(self, found: Hang, now_s: float) -> Hang | None:
        """The hang with the guilty alone; None while they may be on another node.

        Workers that are idle probably wait for others, in a collective. Only who is elsewhere is to blame at once.
        """
        if found.kind is not Kind.IDLE:
            return found
        since_s = now_s - found.for_s
        if self._asked_at_s is None or since_s > self._asked_at_s + self._watched.rules.pace_s:
            waits = {worker: waits_for_others(frame) for worker, frame in self._main_threads().items()}
            self._asked_at_s = since_s
            self._elsewhere = tuple(worker for worker, waiting in waits.items() if waiting is False)
        if self._elsewhere and len(self._elsewhere) < len(self._node.tracks):
            found = replace(found, workers=self._elsewhere)
        return (
            found
            if self._elsewhere or self._watched.alone or found.for_s >= hang_detection.others_s(found)
            else None
        )

    def _main_threads(self) -> dict[Worker, tuple[Frame, ...]]:
        texts = self._workers.ask_all(self._node.tracks)
        return {worker: main_thread(texts.get(worker.pid, "")) for worker in self._node.tracks}

    # -- acting -------------------------------------------------------------------------------

    def _strike(self, found: Hang, now_s: float) -> ev.Hung:
        workers = tuple(self._node.tracks)
        texts = self._workers.ask_all(workers)
        digest = stacks_digest({worker: self._place(worker, texts) for worker in workers})
        digest += self._loaders(workers, texts)
        path = _save(self._watched.folder, self._report(found, workers, texts, digest))
        text = f"{found.text}; the stacks of all workers are in {path}" if path else found.text
        log.error("hang: %s", text)
        for line in digest:
            log.error("hang: %s", line)
        self._node = replace(hang_detection.begin(now_s), pauses_s=self._node.pauses_s)
        self._asked_at_s, self._elsewhere = None, ()
        guilty = min(workers, key=lambda worker: worker not in found.workers)
        return ev.Hung(now_s, text, digest, guilty.rank, guilty.local_rank)

    def _place(self, worker: Worker, texts: Mapping[int, str]) -> str:
        known = main_thread(texts.get(worker.pid, ""))
        if known:
            return where(known)
        kernel = process_tree.sleeps_in(worker.pid)
        state = self._node.tracks[worker].last.state
        return f"state {state}" + (f", in the kernel's {kernel}" if kernel else "")

    def _loaders(self, workers: tuple[Worker, ...], texts: Mapping[int, str]) -> tuple[str, ...]:
        """What the processes below the workers are doing, where they tell."""
        return tuple(
            f"{worker.name}'s {entry.name} (pid {entry.pid}): {where(known)}"
            for worker in workers
            for entry in self._workers.children(worker)
            if (known := main_thread(texts.get(entry.pid, "")))
        )

    def _report(
        self, found: Hang, workers: tuple[Worker, ...], texts: Mapping[int, str], digest: tuple[str, ...]
    ) -> str:
        at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        parts = [f"{at} on {socket.gethostname()}: {found.text}\n", *[f"{line}\n" for line in digest]]
        for worker in workers:
            processes = [(worker.pid, worker.name), *[(e.pid, e.name) for e in self._workers.children(worker)]]
            for pid, name in processes:
                whose = name if pid == worker.pid else f"{name}, a child of {worker.name}"
                parts += [f"\n== {whose}, pid {pid}\n", texts.get(pid, ""), process_tree.describe(pid)]
        return "".join(parts)


def _save(folder: str, text: str) -> str | None:
    """Write a new file that outlives the run; its path."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    try:
        os.makedirs(folder, exist_ok=True)
        fd, path = tempfile.mkstemp(
            prefix=f"trainer-launch-hang-{socket.gethostname()}-{stamp}-", suffix=".txt", dir=folder
        )
        with os.fdopen(fd, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except OSError as problem:
        log.warning("cannot save the stacks in %s (%s); set --hang-dir", folder, problem.strerror)
        return None
    return path


# -- stacks ------------------------------------------------------------------------------------


_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>[0-9]{1,9}) in (?P<function>.*)$')
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|^<frozen |/multiprocessing/|/trainer_launch/|<string>")
# Where a rank waits for the others: in a collective, or in what torch runs one from.
_COLLECTIVE = re.compile(r"torch/(distributed/(?!elastic|launcher)|autograd/|nn/parallel/)")
_DECORATORS = ("wrapper", "decorate_context", "inner", "_fn")


@dataclass(frozen=True, slots=True)
class Frame:
    """One call."""

    file: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        """Whether this is not the user's own code."""
        return _LIBRARY.search(self.file) is not None

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} ({self.function})"


def main_thread(text: str) -> tuple[Frame, ...]:
    """The main thread's calls, innermost first, of the last dump in `text`; empty when there is none."""
    threads: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        start, frame = _THREAD.match(line), _FRAME.match(line)
        if start:
            threads.append((start[1] == "Current thread", []))
        elif frame and threads:
            threads[-1][1].append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    # The kernel gives a process's signal to its main thread; that is also the oldest, which comes last.
    current = [frames for is_current, frames in threads if is_current]
    chosen = current or [frames for _, frames in threads]
    return tuple(chosen[-1]) if chosen else ()


def waits_for_others(frames: tuple[Frame, ...]) -> bool | None:
    """Whether this is a rank that waits for other ranks; None: nothing is known of it."""
    inner = [frame for frame in _down_to_user(frames) if frame.is_library]
    return any(_COLLECTIVE.search(frame.file) for frame in inner) if frames else None


def where(frames: tuple[Frame, ...]) -> str:
    """One phrase: the user's own innermost line, and the library call that it is in."""
    down = _down_to_user(frames)
    user = down[-1] if down and not down[-1].is_library else None
    inner = [frame for frame in down if frame.is_library]
    calls = [frame for frame in reversed(inner) if frame.function not in _DECORATORS]
    if user is None:
        return str(frames[0]) if frames else "unknown"
    if not calls:
        return f"in {user}"
    waits = "waits in" if waits_for_others(frames) else "in"
    return f"{waits} {calls[0].function}, called from {user}"


def stacks_digest(places: Mapping[Worker, str]) -> tuple[str, ...]:
    """Alike ranks together: `ranks 0-2,4-7: waits in all_reduce, called from train.py:31 (main)`."""
    groups: dict[str, list[Worker]] = {}
    for worker, place in places.items():
        groups.setdefault(place, []).append(worker)
    few_first = sorted(groups.items(), key=lambda group: len(group[1]))
    return tuple(f"{_label(workers)}: {place}" for place, workers in few_first)


def _label(workers: Iterable[Worker]) -> str:
    workers = list(workers)
    ranks = [worker.rank for worker in workers if worker.rank is not None]
    if len(ranks) < len(workers):
        return ", ".join(worker.name for worker in workers)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranges(ranks)}"


def _down_to_user(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """From the innermost call down to the first of the user's own."""
    for depth, frame in enumerate(frames):
        if not frame.is_library:
            return frames[: depth + 1]
    return frames
