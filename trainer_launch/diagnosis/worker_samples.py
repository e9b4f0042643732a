"""The training processes of this node: sampled for the hang watch, and asked for what they have recorded."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.diagnosis import stacks
from trainer_launch.diagnosis.collectives import MAX_BYTES, Doing, RankState, Recorded, Stage
from trainer_launch.diagnosis.hang_detection import Activity, Sample, WatchedWorker
from trainer_launch.host import files, process_tree, runtime_directory
from trainer_launch.host.process_tree import CallKind, SystemCall
from trainer_launch.host.slow_files import within
from trainer_launch.model.codec import MessageError, decode
from trainer_launch.model.errors import MALFORMED
from trainer_launch.model.units import grouped
from trainer_launch.supervisor.processes import Processes

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SWITCHES = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
_READ_WRITTEN = re.compile(r"^[rw]char: (\d+)", re.MULTILINE)
_NO_FILES = ("/dev/", "/proc/", "/sys/")
_POLLS = (CallKind.POLL, CallKind.SELECT, CallKind.EPOLL)
_READ_BYTES = 65536
_OFTEN = 1 / 20  # of the looks at a worker; a rank is late by a tenth of its steps
_FAR_S = 0.1  # for all to say how far they are; who is stopped does not
_T = TypeVar("_T")
Below = Mapping[int, Sequence[process_tree.ProcessEntry]]  # children by parent


def _renamed(values: Mapping[str, _T], names: Mapping[str, str]) -> dict[str, _T]:
    return {names[name]: value for name, value in values.items() if name in names}


class Recorders:
    """The connections to the workers of one generation, by the names of their processes."""

    def __init__(self) -> None:
        self.at_end: dict[str, Recorded] = {}  # of workers that have ended by themselves, as far as read
        self._connections: dict[str, socket.socket] = {}
        self._unread: dict[str, bytes] = {}
        self._number = 0
        self._far: dict[str, int] = {}
        self._bytes: dict[str, int] = {}  # that each has written to answer
        self._answers: dict[int, dict[str, Recorded]] = {}  # by question; to the last one
        self._looks, self._waits = Counter[str](), Counter[str]()  # at each worker; and those at a wait for others

    @property
    def names(self) -> set[str]:
        """The workers that could answer."""
        return {*self._connections}

    def open(self, name: str) -> int:
        """Make a connection to a worker; its end is the caller's.

        Raises:
            OSError: there are too few descriptors.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._connections[name] = ours
        return theirs.detach()

    def close(self, but: Mapping[str, str] | None = None) -> None:
        """The generation is over; workers of these names go on in the next one, under others."""
        but = but or {}
        for name in self._connections.keys() - but.keys():
            self._connections.pop(name).close()
        self._connections, self._unread = _renamed(self._connections, but), _renamed(self._unread, but)
        self._far, self._bytes, self.at_end = _renamed(self._far, but), _renamed(self._bytes, but), {}
        self._looks.clear()
        self._waits.clear()

    def how_far(self) -> dict[str, int]:
        """How many collectives each worker has entered and ended, as far as it has told."""
        if self._connections:
            answers = self.answers(self.question(only_far=True), time.monotonic() + _FAR_S)
            self._far |= {name: answer.far for name, answer in answers.items()}
        return dict(self._far)

    @property
    def farthest(self) -> int:
        """The most that a worker has told when all were asked last; nobody is asked now."""
        return max(self._far.values(), default=0)

    def answered(self, name: str) -> int:
        """Bytes that a worker has written to answer, its dumps included."""
        return self._bytes.get(name, 0)

    def question(
        self,
        folder: str | None = None,
        until_s: float | None = None,
        *,
        only_far: bool = False,
        stacks: bool = False,
    ) -> int:
        """Ask all for what they have recorded; with a `folder` each saves its dump there, but not after `until_s`.

        With `stacks` each answers with those of its threads as well. Return the question's number.
        """
        return self._ask({"folder": folder, "until_s": until_s, "only_far": only_far, "stacks": stacks})

    def entries(self, most: int, until_s: float) -> dict[str, Recorded]:
        """Ask all when they entered their last collectives; the answers that come until then.

        The waits of those that often wait through the store are not known.
        """
        answers = self.answers(self._ask({"entries": most}), until_s)
        often = {name for name, count in self._waits.items() if count >= _OFTEN * self._looks[name]}
        return {
            name: replace(answer, entries=replace(answer.entries, hides_messages=True))
            if name in often and answer.entries is not None
            else answer
            for name, answer in answers.items()
        }

    def note(self, name: str, *, waits: bool) -> None:
        """Take in whether a worker that trains waits for other ranks through the store."""
        self._looks[name] += 1
        self._waits[name] += waits

    def answers(self, number: int, until_s: float) -> dict[str, Recorded]:
        """The answers to a question; those who do not answer are missing.

        Those that have no process group have nothing to tell, and are not waited for.
        """
        able = self._able()
        answers = self._answers.setdefault(number, {})
        waiting = {self._connections[name].fileno(): name for name in able if name not in answers}
        poll = select.poll()
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        while waiting and (left_s := until_s - time.monotonic()) > 0:
            for fd, _ in poll.poll(left_s * 1000):
                if self._read(waiting[fd]) is False or waiting[fd] in answers:
                    poll.unregister(fd)
                    del waiting[fd]
        return {
            name: Recorded(number=number, stage=Stage.OUTSIDE) for name in self._connections.keys() - able
        } | answers

    def _able(self) -> list[str]:
        """The workers that can answer: each says so, by an empty line, when it has made its first process group."""
        for name in self._connections.keys() - self._bytes.keys():
            self._read(name)
        return [name for name in self._connections if name in self._bytes]

    def _ask(self, question: Mapping[str, object]) -> int:
        self._number += 1
        self._answers = {self._number: {}}
        line = json.dumps({"number": self._number, **question}).encode() + b"\n"
        for name in self._able():
            with contextlib.suppress(OSError):  # it has ended, or has not read for long
                self._connections[name].send(line)
        return self._number

    def _read(self, name: str) -> bool | None:
        """Take what a worker has said; None: nothing is there, False: nothing more will come that can be read."""
        try:
            data = self._connections[name].recv(_READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return False
        self._bytes[name] = self._bytes.get(name, 0) + len(data)
        before = self._unread.get(name, b"")
        *lines, rest = (before + data).split(b"\n")
        self._unread[name] = rest[: MAX_BYTES + 1]  # the rest of a line that is too long is not kept
        for line in lines:
            with contextlib.suppress(MessageError):
                answer = decode(Recorded, line, MAX_BYTES)
                self._bytes[name] += answer.saved
                if answer.number == 0:
                    self.at_end[name] = answer
                elif answer.number in self._answers:
                    self._answers[answer.number][name] = answer
        if len(rest) > MAX_BYTES >= len(before) and self._number in self._answers:
            self._answers[self._number][name] = Recorded(number=self._number, why="its answer is too long")
        return bool(data)


class WorkerPlace(Struct, frozen=True):
    """The ranks of a process that is a worker of torch's."""

    rank: int
    local_rank: int
    stacks: str | None = None  # where it writes its threads' stacks when it is asked
    error_file: str = ""


class WatchedGroup(Protocol):
    """The parts of a torch worker group that a diagnosis reads."""

    generation: int  # the last one that this node was in
    store_port: int | None  # where the ranks of this generation meet
    places: Mapping[str, WorkerPlace]  # by the names of the processes
    recorders: Recorders
    processes: Processes

    @property
    def node_rank(self) -> int:
        """The rank of this node."""

    @property
    def keeps_state(self) -> bool:
        """Whether a worker leaves its groups in place of being stopped."""

    def ended(self) -> Sequence[RankState]:
        """The ranks of this generation that have no process any more."""


class WatchedWorkers:
    """The workers that are alive now; without a group any program's processes, whatever they have started."""

    def __init__(
        self,
        pids: Callable[[], Mapping[str, int]],
        output_of: Callable[[str], int],
        run_dir: str,
        group: WatchedGroup | None = None,
    ) -> None:
        """Watch the processes that PID 1 has started: their pids by name, and how many bytes each has written."""
        self._pids, self._output_of, self._run_dir, self._group = pids, output_of, run_dir, group
        self._dumped: dict[int, int] = {}  # by pid: bytes of stacks that were asked for

    def look(self) -> dict[WatchedWorker, Sample]:
        """Take one sample of each."""
        below = grouped((entry.parent, entry) for entry in process_tree.descendants(os.getpid()))
        far = {} if self._group is None else self._group.recorders.how_far()
        own = {entry.pid: entry for entry in below.get(os.getpid(), ())}
        there = {entry.pid for entries in below.values() for entry in entries}
        self._dumped = {pid: size for pid, size in self._dumped.items() if pid in there}
        samples = {}
        for name, pid in self._pids().items():
            if pid in own:
                worker, entries = self._worker(name, own[pid]), (own[pid], *_subtree(pid, below))
                if self._group is not None and far.get(name, 0):
                    self._group.recorders.note(name, waits=self.waits_in_store(worker))
                sample = self._sample(name, worker, entries, far.get(name, 0))
                if sample is not None:
                    samples[worker] = sample
        return samples

    def present(self) -> dict[WatchedWorker, str]:
        """The workers that are alive, with the states of their main threads; nothing else is looked at."""
        entries = {name: process_tree.read(pid) for name, pid in self._pids().items()}
        return {
            self._worker(name, entry): entry.state
            for name, entry in entries.items()
            if entry is not None and entry.parent == os.getpid() and entry.state not in "ZX"
        }

    def children(
        self, workers: Iterable[WatchedWorker]
    ) -> dict[WatchedWorker, tuple[process_tree.ProcessEntry, ...]]:
        """Everything alive below each worker, such as its data loaders."""
        below = grouped((entry.parent, entry) for entry in process_tree.descendants(os.getpid()))
        return {worker: _subtree(worker.pid, below) for worker in workers}

    def ask_all(self, children: Mapping[WatchedWorker, Collection[process_tree.ProcessEntry]]) -> dict[int, str]:
        """Let workers and their children write their stacks; texts by pid. To be asked is no progress."""
        texts = stacks.ask_all(children)
        for pid, text in texts.items():
            self._dumped[pid] = self._dumped.get(pid, 0) + len(text.encode(errors="replace"))
        return texts

    def doing(self, worker: WatchedWorker, text: str, *, has_joined: bool = False) -> Doing:
        """The activity of a worker, as its stacks show it, or else what it waits for outside the job.

        `has_joined` is whether it has entered a collective that has not ended.
        """
        shown = stacks.doing(stacks.main_thread(text))
        if shown not in (Doing.UNKNOWN, Doing.DATA):
            return shown
        (below,) = self.children([worker]).values()
        ports, is_program = self._store_ports(worker), worker.rank is None
        waits = wait_in_kernel(worker.pid, below, ports, has_joined=has_joined, is_program=is_program)
        if waits is not Doing.COLLECTIVE and stacks.awaits_transfer(text):
            return Doing.TRANSFER
        return shown if waits is Doing.UNKNOWN else waits

    def waits_in_store(self, worker: WatchedWorker) -> bool:
        """Whether the main thread of a worker waits for what another rank writes to the job's store."""
        call = process_tree.of_thread(worker.pid, worker.pid)
        if call is None or not any(link.startswith("socket:") for link in call.files):
            return False
        return _is_in_store(call, process_tree.connections(worker.pid), self._store_ports(worker))

    def _store_ports(self, worker: WatchedWorker) -> tuple[int, ...]:
        if self._group is not None and self._group.store_port is not None:
            return (self._group.store_port,)
        port = (process_tree.environment(worker.pid) or {}).get("MASTER_PORT", "")
        return (int(port),) if port.isdecimal() else ()

    def _worker(self, name: str, entry: process_tree.ProcessEntry) -> WatchedWorker:
        place = None if self._group is None else self._group.places.get(name)
        of_torch = (None, None, None) if place is None else (place.rank, place.local_rank, place.stacks)
        return WatchedWorker(name, entry.pid, entry.started, *of_torch)

    def _sample(
        self, name: str, worker: WatchedWorker, entries: Iterable[process_tree.ProcessEntry], far: int
    ) -> Sample | None:
        processes = [activity for entry in entries if (activity := read(entry)) is not None]
        if not processes or processes[0].pid != worker.pid:
            return None
        own, answered = processes[0], 0 if self._group is None else self._group.recorders.answered(name)
        processes = [replace(each, written=each.written - self._dumped.get(each.pid, 0)) for each in processes]
        # Its own stacks are all that its file has, but for those of its children.
        written = own.written - stacks.size(worker.stacks)
        processes[0] = replace(own, written=written, beside_bytes=own.beside_bytes - answered)
        report = stacks.status_of(runtime_directory.progress_file(self._run_dir, worker.local_rank or 0))
        signs = (self._output_of(name), 0 if report is None else report.st_mtime_ns, far)
        return Sample(processes=tuple(processes), signs=signs, has_joined=far > 0)


def _subtree(pid: int, below: Below) -> tuple[process_tree.ProcessEntry, ...]:
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


def read(entry: process_tree.ProcessEntry, proc: str = "/proc") -> Activity | None:
    """Look at one process, None when it is gone."""
    folder = f"{proc}/{entry.pid}"
    main = f"{folder}/task/{entry.pid}"
    try:
        whole = _fields(folder)
        times = [int(ticks) * _TICK_S for ticks in whole[11:15]]  # its own, and of children that ended
        fields = _fields(main)
        cpu_s = _cpu_s(fields)
        spun_s, spins = 0.0, _spinning(entry.pid, entry.started, int(whole[17]))
        with contextlib.suppress(OSError):  # it has ended since
            spun_s = _cpu_s(_fields(f"{folder}/task/{spins}")) if spins else 0.0
        switches = _SWITCHES.search(files.text(f"{folder}/status"))  # of the main thread
        if fields[0] == "D":
            done, own = process_tree.unlocked(entry.pid, ((0, 0), (0, 0)), lambda: (_io(folder), _io(main)))
        else:
            done, own = _io(folder), _io(main)
        return Activity(
            pid=entry.pid,
            parent=entry.parent,
            started=entry.started,
            age_s=time.clock_gettime(time.CLOCK_BOOTTIME) - entry.started * _TICK_S,
            state=fields[0],
            waits_for_child=process_tree.sleeps_in(entry.pid, proc).startswith("do_wait"),
            cpu_s=cpu_s,
            switches=int(switches[1]) if switches else 0,
            read=own[0],
            written=own[1],
            output_ns=_output_ns(entry.pid),
            beside_cpu_s=sum(times) - cpu_s - spun_s,
            beside_bytes=sum(done) - sum(own),
        )
    except (FileNotFoundError, ProcessLookupError, *MALFORMED):  # a sandbox may show less than Linux
        return None


@lru_cache(maxsize=4096)
def _spinning(pid: int, _started: int, _threads: int) -> int | None:
    """The thread of a process with so many that takes CPU time also while nothing happens: that of torch's RPC."""
    return process_tree.thread_named(pid, "TP_SHM_reactor")


def _cpu_s(fields: Sequence[str]) -> float:
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def _fields(folder: str) -> list[str]:
    """Of a process or a thread, from its state on."""
    with open(f"{folder}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _io(folder: str) -> tuple[int, int]:
    """Bytes read and written by system calls so far; 0 where that cannot be seen."""
    counts = [int(count) for count in _READ_WRITTEN.findall(files.text(f"{folder}/io"))]
    return (counts[0], counts[1]) if len(counts) == 2 else (0, 0)


def wait_in_kernel(
    pid: int,
    below: Iterable[process_tree.ProcessEntry],
    own_ports: Collection[int] = (),
    *,
    has_joined: bool = False,
    is_program: bool = False,
) -> Doing:
    """The wait of the worker `pid`: COLLECTIVE in the job's store, TRANSFER or INPUT outside the job, or UNKNOWN.

    Idle in a call of files, or of a connection that is none of the job's, is a transfer: of the main thread; of a
    thread while the main thread waits for a lock; of a program that the main thread waits for. The job's own
    connections are those to its store; of those to other ranks the caller knows by torch's calls. What is no rank
    may sleep between two looks at a program that it has started, unless that is a rank.

    `below` are its descendants, `own_ports` those of the job's store. A worker that `has_joined` a collective which
    has not ended may wait for that, so its other threads prove nothing.
    """
    call = process_tree.of_thread(pid, pid)
    if call is None:
        return Doing.UNKNOWN
    connections = process_tree.connections(pid)
    if _is_in_store(call, connections, own_ports):
        return Doing.COLLECTIVE
    if 0 in call.fds and call.kind is not CallKind.EPOLL:
        return Doing.INPUT
    remote = {link for link, port in connections.items() if port not in own_ports}
    by_parent = grouped((entry.parent, entry.pid) for entry in below)
    calls, polls = [call], list[SystemCall]()
    if call.kind in (CallKind.LOCK, *_POLLS) and not has_joined:
        # It may wait for its other threads. Those of gloo and NCCL poll other ranks all the time, those of pools
        # of processes poll these.
        others = [other for other in process_tree.of_other_threads(pid) if other.kind is not CallKind.LOCK]
        calls += [other for other in others if other.kind not in _POLLS]
        polls = [other for other in others if other.kind in _POLLS]
    programs = {child for each in (*calls, *polls) for child in _awaited(each, pid, by_parent)}
    if is_program and call.kind is CallKind.OTHER:
        children = by_parent.get(pid, [])
        programs |= {each for each in children if "RANK" not in (process_tree.environment(each) or {})}
    moves = any(_moves(each, remote) for each in calls)
    is_transfer = moves or any(_program_moves(child, by_parent, remote) for child in programs)
    return Doing.TRANSFER if is_transfer else Doing.UNKNOWN


def _is_in_store(call: SystemCall, connections: Mapping[str, int], ports: Collection[int]) -> bool:
    """Whether a call waits for a connection to the job's store."""
    return any(connections.get(link) in ports for link in call.files)


def _moves(call: SystemCall, remote: Collection[str]) -> bool:
    """Whether a thread waits for a file, or for a connection that is none of the job's."""
    if call.kind is CallKind.PATH or (call.is_uninterruptible and call.kind is not CallKind.NO_FILE):
        return True
    return any(link in remote or (link[:1] == "/" and not link.startswith(_NO_FILES)) for link in call.files)


def _awaited(call: SystemCall, pid: int, by_parent: Mapping[int, list[int]]) -> list[int]:
    """The children whose ends, or whose output, a thread of `pid` waits for."""
    if call.kind is CallKind.CHILD:
        return [call.child] if call.child else by_parent.get(pid, [])
    pipes = {link for link in call.files if link.startswith("pipe:")}
    return [child for child in by_parent.get(pid, []) if pipes and pipes & process_tree.open_files(child)]


def _program_moves(pid: int, by_parent: Mapping[int, list[int]], remote: Collection[str]) -> bool:
    """Whether a thread of a program, or of one that it has started, waits for a file or a connection."""
    calls = [process_tree.of_thread(pid, pid), *process_tree.of_other_threads(pid)]
    if any(call is not None and _moves(call, remote) for call in calls):
        return True
    return any(_program_moves(child, by_parent, remote) for child in by_parent.get(pid, []))
