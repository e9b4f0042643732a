"""The hang watch: looks at this node's workers at a pace, and when they hang saves all stacks and ends them.

What is a hang is decided in `hang`. Nobody is killed before every worker's stacks are on disk. An event
tells the worker group, or the supervisor's machine, which ends them.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from trainer_launch.host import stacks
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor import hang_detection, stack_summary
from trainer_launch.supervisor.hang_detection import Hang, Kind, Rules, Worker
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
            waits = {
                worker: stack_summary.waits_for_others(frame) for worker, frame in self._main_threads().items()
            }
            self._asked_at_s = since_s
            self._elsewhere = tuple(worker for worker, waiting in waits.items() if waiting is False)
        if self._elsewhere and len(self._elsewhere) < len(self._node.tracks):
            found = replace(found, workers=self._elsewhere)
        return (
            found
            if self._elsewhere or self._watched.alone or found.for_s >= hang_detection.others_s(found)
            else None
        )

    def _main_threads(self) -> dict[Worker, tuple[stack_summary.Frame, ...]]:
        texts = self._workers.ask_all(self._node.tracks)
        return {worker: stack_summary.main_thread(texts.get(worker.pid, "")) for worker in self._node.tracks}

    # -- acting -------------------------------------------------------------------------------

    def _strike(self, found: Hang, now_s: float) -> ev.Hung:
        workers = tuple(self._node.tracks)
        texts = self._workers.ask_all(workers)
        digest = stack_summary.digest({worker: self._place(worker, texts) for worker in workers})
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
        known = stack_summary.main_thread(texts.get(worker.pid, ""))
        if known:
            return stack_summary.where(known)
        kernel = stacks.sleeps_in(worker.pid)
        state = self._node.tracks[worker].last.state
        return f"state {state}" + (f", in the kernel's {kernel}" if kernel else "")

    def _loaders(self, workers: tuple[Worker, ...], texts: Mapping[int, str]) -> tuple[str, ...]:
        """What the processes below the workers are doing, where they tell."""
        return tuple(
            f"{worker.name}'s {entry.name} (pid {entry.pid}): {stack_summary.where(known)}"
            for worker in workers
            for entry in self._workers.children(worker)
            if (known := stack_summary.main_thread(texts.get(entry.pid, "")))
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
                parts += [f"\n== {whose}, pid {pid}\n", texts.get(pid, ""), stacks.describe(pid)]
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
