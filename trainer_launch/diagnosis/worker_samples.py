"""This node's training processes, as the hang watch needs them: found, sampled, asked for their stacks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import time
from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.diagnosis.hang_detection import Activity, Sample, Worker
from trainer_launch.host import files, process_tree, runtime_directory
from trainer_launch.host.slow_files import within
from trainer_launch.model.errors import MALFORMED

STACKS_SIGNAL = signal.SIGRTMAX - 1  # on which a forked worker writes its threads' stacks
_MAX_BYTES = 1 << 20  # of any file that is read
_ANSWER_S = 0.5  # for one process to write its stacks
ALL_ANSWERS_S = 3.0  # for all of them: PID 1 waits so long at most
_LOOK_S = 0.005

Below = Mapping[int, tuple[process_tree.Entry, ...]]  # children by parent


class Place(Struct, frozen=True):
    """Which worker of torch's a process is."""

    rank: int
    local_rank: int
    stacks: str | None = None  # where it writes its threads' stacks when it is asked
    error_file: str = ""


class Sources(Struct, frozen=True, kw_only=True):
    """Where signs of life come from."""

    pids: Callable[[], Mapping[str, int]]  # processes that PID 1 has started, by name
    heard: Callable[[str], int]  # bytes that a process has written so far
    run_dir: str  # where workers say who they are, and how far
    place_of: Callable[[str], Place | None] = lambda name: None  # of processes that are workers of torch's
    how_far: Callable[[], Mapping[str, int]] = dict  # collectives that each process has entered and ended
    answered: Callable[[str], int] = lambda name: 0  # bytes that a process has written to answer us


class Workers:
    """The workers that are alive now."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def look(self) -> dict[Worker, Sample]:
        """Take one sample of each."""
        below = _by_parent(process_tree.descendants(os.getpid()))
        far = self._sources.how_far()
        samples = {}
        for name, pid in self._sources.pids().items():
            for worker in self._find(name, pid, below):
                sample = self._sample(name, worker, below, far.get(name, 0))
                if sample is not None:
                    samples[worker] = sample
        return samples

    def children(self, worker: Worker) -> tuple[process_tree.Entry, ...]:
        """Everything alive below a worker, such as its data loaders."""
        return _subtree(worker.pid, _by_parent(process_tree.descendants(os.getpid())))

    def ask_all(self, workers: Iterable[Worker]) -> dict[int, str]:
        """Let every worker and what it has forked write their stacks; texts by pid, of those who could."""
        end_s = time.monotonic() + ALL_ANSWERS_S
        texts = {}
        for worker in workers:
            for pid in (worker.pid, *[entry.pid for entry in self.children(worker)]):
                text = self._ask(worker, pid, min(end_s, time.monotonic() + _ANSWER_S))
                if text:
                    texts[pid] = text
        return texts

    def ask_at_once(self, workers: Iterable[Worker], until_s: float) -> dict[int, str]:
        """Let all workers write their stacks at the same time, without what they have forked; texts by pid."""
        asked = {}
        for worker in workers:
            if worker.stacks is not None and (before := self._ask_for_stacks(worker, worker.pid)) is not None:
                asked[worker] = before
        sizes = dict(asked)
        texts: dict[int, str] = {}
        while len(texts) < len(asked) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            for worker, before in asked.items():
                last, sizes[worker] = sizes[worker], _size(worker.stacks or "")
                if worker.pid not in texts and last == sizes[worker] > before:
                    texts[worker.pid] = _tail(worker.stacks or "", before)
        return texts

    # -- finding ------------------------------------------------------------------------------

    def _find(self, name: str, pid: int, below: Below) -> list[Worker]:
        entry = next((child for child in below.get(os.getpid(), ()) if child.pid == pid), None)
        if entry is None:
            return []
        place = self._sources.place_of(name)
        known = (None, None, None) if place is None else (place.rank, place.local_rank, place.stacks)
        return [Worker(name, pid, entry.started, *known)]

    # -- sampling -----------------------------------------------------------------------------

    def _sample(self, name: str, worker: Worker, below: Below, far: int) -> Sample | None:
        main = process_tree.read(worker.pid)
        if main is None:
            return None
        entries = (main, *_subtree(worker.pid, below))
        processes = [activity for entry in entries if (activity := read(entry)) is not None]
        if not processes or processes[0].pid != worker.pid:
            return None
        own = processes[0]
        processes[0] = replace(
            own,
            written=own.written - _size(worker.stacks or ""),
            beside_bytes=own.beside_bytes - self._sources.answered(name),
        )
        return Sample(processes=tuple(processes), signs=(*self._signs(name, worker), far))

    def _signs(self, name: str, worker: Worker) -> tuple[int, ...]:
        sources = self._sources
        report = runtime_directory.progress_file(sources.run_dir, worker.local_rank or 0)
        return sources.heard(name), _changed(report)

    # -- stacks -------------------------------------------------------------------------------

    def _ask(self, worker: Worker, pid: int, until_s: float) -> str:
        """Let one process write its stacks; "" when it has no handler, or does not come to it."""
        before = self._ask_for_stacks(worker, pid)
        if worker.stacks is None or before is None:
            return ""
        size = before
        while time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            last, size = size, _size(worker.stacks)
            if last == size > before:
                break  # it has stopped growing
        return _tail(worker.stacks, before)

    def _ask_for_stacks(self, worker: Worker, pid: int) -> int | None:
        """Send the signal; the size of the file before, None: this process cannot answer."""
        entry = process_tree.read(pid)
        if worker.stacks is None or entry is None or entry.state in "TtDZX":
            return None
        if not process_tree.catches(pid, STACKS_SIGNAL):
            return None
        before = _size(worker.stacks)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, STACKS_SIGNAL)
        return before


def _by_parent(entries: Iterable[process_tree.Entry]) -> Below:
    found: dict[int, tuple[process_tree.Entry, ...]] = {}
    for entry in entries:
        found[entry.parent] = (*found.get(entry.parent, ()), entry)
    return found


def _subtree(pid: int, below: Below) -> tuple[process_tree.Entry, ...]:
    children = below.get(pid, ())
    return tuple(entry for child in children for entry in (child, *_subtree(child.pid, below)))


def _output_ns(pid: int) -> int:
    """When output that goes to files was last written: torch's --redirects, a shell's `> log`."""
    times = {0}
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            link = f"/proc/{pid}/fd/{stream}"
            path = os.readlink(link)
            status = within(path, None, os.stat, link) if path.startswith("/") else None
            if status is not None and stat.S_ISREG(status.st_mode):
                times.add(status.st_mtime_ns)
    return max(times)


def _changed(path: str) -> int:
    found = _stat(path)
    return 0 if found is None else found.st_mtime_ns


def _size(path: str) -> int:
    found = _stat(path)
    return 0 if found is None else found.st_size


def _stat(path: str) -> os.stat_result | None:
    try:
        return within(path, None, os.stat, path)
    except OSError:
        return None


def _tail(path: str, start: int) -> str:
    try:
        return within(path, b"", _read_from, path, start).decode(errors="replace")
    except OSError:
        return ""


def _read_from(path: str, start: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(_MAX_BYTES)


# -- what a process has done -------------------------------------------------------------------


_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SWITCHES = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
_READ_WRITTEN = re.compile(r"^[rw]char: (\d+)", re.MULTILINE)


def read(entry: process_tree.Entry, proc: str = "/proc") -> Activity | None:
    """Look at one process, None when it is gone."""
    folder = f"{proc}/{entry.pid}"
    main = f"{folder}/task/{entry.pid}"
    try:
        times = [int(ticks) * _TICK_S for ticks in _fields(folder)[11:15]]  # its own, and of children that ended
        fields = _fields(main)
        cpu_s = (int(fields[11]) + int(fields[12])) * _TICK_S
        switches = _SWITCHES.search(files.text(f"{folder}/status"))  # of the main thread
        done, has_read, has_written = _io(folder), *_io(main)
        return Activity(
            pid=entry.pid,
            parent=entry.parent,
            started=entry.started,
            age_s=time.clock_gettime(time.CLOCK_BOOTTIME) - entry.started * _TICK_S,
            state=fields[0],
            waits_for_child=process_tree.sleeps_in(entry.pid, proc).startswith("do_wait"),
            cpu_s=cpu_s,
            switches=int(switches[1]) if switches else 0,
            read=has_read,
            written=has_written,
            output_ns=_output_ns(entry.pid),
            beside_cpu_s=sum(times) - cpu_s,
            beside_bytes=sum(done) - has_read - has_written,
        )
    except (FileNotFoundError, ProcessLookupError, *MALFORMED):  # a sandbox may show less than Linux
        return None


def _fields(folder: str) -> list[str]:
    """Of a process or a thread, from its state on."""
    with open(f"{folder}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _io(folder: str) -> tuple[int, int]:
    """Bytes read and written by system calls so far; 0 where that cannot be seen."""
    counts = [int(count) for count in _READ_WRITTEN.findall(files.text(f"{folder}/io"))]
    return (counts[0], counts[1]) if len(counts) == 2 else (0, 0)
