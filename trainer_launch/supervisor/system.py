"""The operating system as the supervisor sees it: the one place that starts, signals, reaps and tells the time.

While a `System` is open nothing else in this process may start children: it reaps all of them. Signals are noted by
a descriptor that wakes the loop; no code of ours runs in a handler. One at a time, in the main thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host import executables, machine, process_tree, shm
from trainer_launch.host.files import check_program
from trainer_launch.model import Process, exit_codes
from trainer_launch.model.errors import EXHAUSTED, LIMITS, NodeError, NotRunnableError
from trainer_launch.model.signal_policy import RELAYED, STOP_SIGNALS
from trainer_launch.model.units import in_units
from trainer_launch.supervisor import inherited
from trainer_launch.supervisor.failure import Evidence
from trainer_launch.supervisor.output import Output

_REQUESTS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # on which programs save and leave
_LARGEST = 3  # segments that are named where /dev/shm is full
_NOBODY: frozenset[tuple[int, int]] = frozenset()
T = TypeVar("T")
log = logging.getLogger(__name__)


class Happened(Struct, frozen=True, kw_only=True):
    """The events that ended a `wait`, in the order in which they are to be handled."""

    signals: tuple[int, ...] = ()  # first: a worker that had the same SIGTERM as we has not failed
    # Pid and status of each child that was reaped, a negative one of a signal; orphans that became ours, too.
    ended: tuple[tuple[int, int], ...] = ()


class System:
    """Processes below us, our signals, our clock. It knows pids; `Processes` knows what belongs together."""

    def __init__(self, output: Output | None = None) -> None:
        """`output` carries what processes write."""
        inherited.fill_standard_streams()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._old_wakeup_fd = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._old_handlers = inherited.hear({signal.SIGCHLD, *STOP_SIGNALS, *RELAYED})
        self._adopted = inherited.adopt_orphans()
        self._witness = Witness()
        self._output = output = output or Output()
        self.last_lines, self.last_errors, self.catch_up = output.last_lines, output.last_errors, output.catch_up
        self.last_line, self.heard, self.rename = output.last_line, output.heard, output.rename
        self.say = output.say  # a line of the launcher's own to stderr, never inside a labelled process's line
        self.print = partial(output.say, stream=1)
        self.clean: Callable[[], None] = lambda: None  # the caller's: removes shared memory that the dead have left
        self.launchers: Callable[[], Collection[int]] = tuple  # the caller's: others, which stop what is below them
        # The caller's: looks whether anything else has ended a `wait`.
        self.woken: Callable[[], None] = lambda: None
        self._popens: dict[int, subprocess.Popen[bytes] | None] = {}  # by pid, until they have ended
        self._sessions: set[int] = set()  # the pids of all that were started, which lead sessions
        self._signalled: dict[int, set[tuple[int, int]]] = {}  # by signal: who has had it from us
        self._is_woken = False  # during the present `wait`
        # The variable that what is ours carries, unless it has emptied its environment; None: all is ours.
        self.mark: tuple[str, str] | None = None
        self._descent = process_tree.mark_descendants()
        self._kept: set[int] = set()  # children that no signal to all reaches
        self.unasked: set[int] = set()  # pids that ended with 0, without handlers of signals that ask for it
        self._descriptors: set[int] = set()  # others', which end a `wait`

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def spawn(self, process: Process, prepare: Callable[[], None] | None = None) -> int:
        """Start a process in a session of its own, so that a terminal's Ctrl-C reaches only us; return its pid.

        `prepare` runs in the new process before the program.
        """
        ours = self.streams(process)
        try:
            check_program(process.argv[0], process.env)
            popen = _started(process, ours, prepare)
        except (OSError, ValueError) as error:
            raise why(process, error) from error
        finally:
            for fd in {*ours.values()}:
                os.close(fd)
        self._popens[popen.pid] = popen
        self._sessions.add(popen.pid)
        return popen.pid

    def streams(self, process: Process) -> dict[int, int]:
        """Make the pipes of a process; their write ends are the caller's.

        Raises:
            NodeError: there are too few descriptors, or a log file cannot be opened.
        """
        try:
            return self._output.open(process.name, process.label, to=process.streams)
        except OSError as error:
            if error.errno in EXHAUSTED or error.filename is None:
                raise exhausted(process, error) from error
            text = f"cannot start {process.name}: cannot open {error.filename}: {error.strerror}"
            raise NodeError(text) from error

    def begin_start(self) -> None:
        """Something is about to start: what was killed for memory before is not what it dies of."""
        self._witness.begin()
        self._sessions.intersection_update(self._popens)
        for keys in self._signalled.values():  # of those that are gone nothing has to be known
            gone = {key for key in keys if (entry := process_tree.read(key[0])) is None or entry.key != key}
            keys.difference_update(gone)

    def adopt(self, pid: int) -> None:
        """Take a child that somebody else has started for us as ours."""
        self._popens[pid] = None
        self._sessions.add(pid)

    def forget(self, pid: int) -> None:
        """A kept child is ended by its keeper; one of ours is kept no more."""
        self._kept.discard(pid)

    def keep(self, pid: int) -> None:
        """No signal to all reaches this child, or what is in its session or below it, until it is forgotten."""
        self._kept.add(pid)

    def listen(self, fd: int, *, wanted: bool = True) -> None:
        """End a `wait` whenever something can be read there, or no longer."""
        if wanted and fd not in self._descriptors:
            self._selector.register(fd, selectors.EVENT_READ)
            self._descriptors.add(fd)
        elif not wanted and fd in self._descriptors:
            self._selector.unregister(fd)
            self._descriptors.discard(fd)

    def signal_leader(self, pid: int, number: int, *, wakes: bool = False) -> None:
        """Signal a process that we started, unless it has ended; `wakes`: it is to hear that also if suspended.

        SIGINT goes to its group, as a terminal sends it: a shell ends only with what it runs.
        """
        if pid in self._popens:  # not collected yet: the number cannot have been used anew
            entry = process_tree.read(pid)
            is_leader = number == signal.SIGINT and entry is not None and entry.group == pid
            self._send(-pid if is_leader else pid, entry, number, wakes=wakes)

    def signal_groups(self, pids: Collection[int], number: int) -> int:
        """Signal who is in the sessions or the groups of processes, also after their ends; return how many."""
        return self._sweep(lambda entry: entry.session in pids or entry.group in pids, number, again=True)

    def signal_all(
        self,
        number: int,
        *,
        again: bool,
        sparing: frozenset[str] = frozenset(),
        besides: Collection[tuple[int, int]] = (),
    ) -> int:
        """Signal everything below us, also what left its session, but these; return how many.

        Unless `again`, who had this signal from us before is spared. Programs of the names `sparing` are spared as
        long as something else runs below them.
        """
        spared = frozenset(besides)
        if sparing:
            spared |= _shown(lambda: process_tree.bearing(os.getpid(), sparing), _NOBODY)
        if not again:
            spared |= _shown(lambda: process_tree.below(os.getpid(), self.launchers()), _NOBODY)
        return self._sweep(lambda entry: entry.key not in spared, number, again=again)

    def is_alone(self, besides: Collection[tuple[int, int]] = ()) -> bool:
        """Whether nothing of ours is left below us but these, what is kept, and what was never ours."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        if not {pid for pid, _ in besides}.issuperset(self._popens.keys() - self._kept):
            return False
        if not (self._kept or self.mark or besides):
            return False  # an orphan that became ours: its end will be told
        return all(entry.key in besides for entry in self.left())

    def left(self) -> tuple[process_tree.ProcessEntry, ...]:
        """Everything of ours that is alive below us, but for what is kept."""
        return tuple(_shown(self._ours, []))

    def _sweep(self, chosen: Callable[[process_tree.ProcessEntry], bool], number: int, *, again: bool) -> int:
        before = frozenset() if again else frozenset(self._signalled.get(number, ()))

        def swept() -> int:
            return process_tree.sweep(
                lambda: (entry for entry in self._ours() if chosen(entry) and entry.key not in before),
                lambda entry: self._send(entry.pid, entry, number),
            )

        reached = _shown(swept, None)
        return self._signal_sessions(number) if reached is None else reached  # groups are all that we can reach

    def _ours(self) -> list[process_tree.ProcessEntry]:
        """All processes below us but the kept ones, what is in their sessions or below them, and unmarked ones."""
        below = process_tree.descendants(os.getpid(), besides=self._kept)
        entries = [entry for entry in below if entry.session not in self._kept]
        return entries if self.mark is None else [entry for entry in entries if self._is_marked(entry)]

    def _is_marked(self, entry: process_tree.ProcessEntry) -> bool:
        name, value = self.mark or ("", "")
        if entry.pid in self._popens or entry.session in self._sessions:
            return True
        if process_tree.mark_of(entry.pid) & self._descent == self._descent:  # 0: nobody can be told apart
            return True
        return (process_tree.environment(entry.pid) or {}).get(name) == value

    def _signal_sessions(self, number: int) -> int:
        for pid in self._sessions - self._kept:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)
        return len(self._sessions)

    def _send(self, pid: int, entry: process_tree.ProcessEntry | None, number: int, *, wakes: bool = False) -> None:
        if entry is not None:
            self._signalled.setdefault(number, set()).add(entry.key)
        is_suspended = entry is not None and entry.state == "T"
        if process_tree.send(pid, number) and is_suspended and (wakes or number == signal.SIGTERM):
            process_tree.send(pid, signal.SIGCONT)

    def poke(self) -> None:
        """End a `wait`; from any thread."""
        with contextlib.suppress(OSError):  # full, or closed: it wakes up anyway
            os.write(self._wake_write, bytes([signal.SIGCHLD]))

    def wait(self, until_s: float | None) -> Happened:
        """Sleep until something happened or the time has come; without a deadline there is no wake-up at all."""
        self._is_woken = False
        happened = self._happened()
        if happened == Happened() and not self._is_woken:  # a poke that came before is news for the caller
            self._selector.select(None if until_s is None else max(0.0, until_s - self.now()))
            happened = self._happened()
        return happened

    def _happened(self) -> Happened:
        ended = tuple(self._reap())
        return Happened(signals=self._signals(), ended=ended)  # also one that came just before an end

    def _signals(self) -> tuple[int, ...]:
        try:
            numbers = os.read(self._wake_read, 65536)
        except BlockingIOError:
            return ()
        self._is_woken = True
        return tuple(number for number in numbers if number != signal.SIGCHLD)

    def _reap(self) -> Iterable[tuple[int, int]]:
        """Collect who has ended. Peek first: a child taken from its Popen would look like a success to it."""
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                yield from self._lost()
                return
            if info is None:
                return
            self.unasked.discard(info.si_pid)
            if info.si_pid in self._popens and (info.si_code, info.si_status) == (os.CLD_EXITED, 0):
                handles = any(process_tree.catches(info.si_pid, number) for number in _REQUESTS)
                self.unasked |= set() if handles else {info.si_pid}
            popen = self._popens.pop(info.si_pid, None)
            self._kept.discard(info.si_pid)
            yield info.si_pid, _collect(info.si_pid) if popen is None else popen.wait()

    def _lost(self) -> Iterable[tuple[int, int]]:
        for pid in self._popens:
            log.error("how pid %d ended is unknown: other code in this process took its exit status", pid)
            yield pid, exit_codes.FAILED
        self._popens.clear()

    def look(self) -> Evidence:
        """Gather what tells why something has just died."""
        return self._witness.look()

    def drain(self, wait_s: float) -> None:
        """Write out what labelled processes have left in their pipes."""
        if not self._output.close(wait_s):
            log.warning("the reader of our output hangs; some lines are lost")

    def close(self) -> None:
        """Give everything back; what still runs is killed. Only now do signals act as they did before."""
        if self._popens:
            self.signal_all(signal.SIGKILL, again=True)
        self.drain(0.0)
        self._selector.close()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        inherited.adopt_orphans(self._adopted)
        signal.set_wakeup_fd(self._old_wakeup_fd)
        os.close(self._wake_read)
        wake_write, self._wake_write = self._wake_write, -1  # a thread that is late must wake no other file
        os.close(wake_write)


def _shown(look: Callable[[], T], default: T) -> T:
    """The result of a look at /proc; `default` where it is another namespace's, is missing, or cannot be opened."""
    if not process_tree.readable():
        return default
    try:
        return look()
    except OSError:
        return default


def _started(
    process: Process, streams: Mapping[int, int], prepare: Callable[[], None] | None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        process.argv,
        env=process.env,
        cwd=process.cwd,
        stdout=streams.get(1),
        stderr=streams.get(2),
        start_new_session=True,
        preexec_fn=prepare,  # noqa: PLW1509  it calls the kernel only
    )


def _collect(pid: int) -> int:
    """The status of a child that has ended, as Popen has it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Witness:
    """Knows the count of OOM kills from before the last start."""

    def __init__(self) -> None:
        self._groups = machine.own_groups()
        self.begin()

    def begin(self) -> None:
        """Something is about to start: who was killed before is not what it dies of."""
        self._before = machine.oom_kills(self._groups)

    def look(self) -> Evidence:
        """Return what can be seen now."""
        room = shm.space()
        evidence = Evidence(
            oom_kills_before=self._before,
            oom_kills_after=machine.oom_kills(self._groups),
            memory_limit_bytes=machine.memory_limit_bytes(self._groups),
            memory_peak_bytes=machine.memory_peak_bytes(self._groups),
            shm_free_bytes=None if room is None else room.free_bytes,
            shm_size_bytes=None if room is None else room.size_bytes,
        )
        if not evidence.shm_full:
            return evidence
        largest = (f"{segment.name} ({in_units(segment.size_bytes)})" for segment in shm.segments()[:_LARGEST])
        return replace(evidence, shm_largest=tuple(largest))


def exhausted(process: Process, error: OSError) -> NodeError:
    """The error for a machine that has run out of something."""
    return NodeError(f"cannot start {process.name}: {error.strerror}; {LIMITS} or start fewer processes")


def why(process: Process, error: OSError | ValueError) -> NodeError | NotRunnableError:
    """The error for a start that failed."""
    if isinstance(error, OSError) and error.errno in EXHAUSTED:
        return exhausted(process, error)
    if isinstance(error, TimeoutError):
        return NodeError(f"cannot start {process.name}: {error.filename}: {error.strerror}; run on another node")
    number = error.errno if isinstance(error, OSError) else None
    place = error.filename if isinstance(error, OSError) and error.filename else process.argv[0]
    exists = number not in (errno.ENOENT, errno.ENOTDIR) or ("/" in place and os.path.exists(place))
    text = os.strerror(number) if number else str(error)
    if number == errno.ENOENT and "/" not in place:
        text = f"not found in PATH ({process.env.get('PATH', 'not set')})"
    elif exists:
        file = shutil.which(place, path=process.env.get("PATH")) or place
        text = executables.obstacle(file, process.env.get("PATH")) or text
        if number == errno.ENOEXEC:
            text = executables.of_format(file)
        elif number == errno.ENOENT and (loader := executables.loader_of(file)):
            text = f"its dynamic loader {loader} does not exist: it was built for another libc or distribution"
    return NotRunnableError(f"cannot run {place!r} for {process.name}: {text}", exists=exists)
