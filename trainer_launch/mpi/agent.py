"""What runs mpirun: waits for hosts, starts it, hears how it ends, starts it again as `job_state_machine` decides.

One loop with one selector: probes' sockets, threads for what blocks, signals, and mpirun's own end. PID 1
knows it as a leader like any other; the cause of death is written as data.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, NoReturn

from trainer_launch.host import logs, process_tree
from trainer_launch.model import exit_codes
from trainer_launch.model.errors import LaunchError, NodeError, NotRunnableError
from trainer_launch.model.signal_policy import RELAYED, STOP_SIGNALS, SignalAction, action_of, name_of
from trainer_launch.model.units import counted
from trainer_launch.mpi import host_readiness, job_state_machine, rank_environment
from trainer_launch.mpi import job_state as st
from trainer_launch.mpi.agent_hosts import RemoteHosts
from trainer_launch.mpi.host_readiness import Readiness
from trainer_launch.mpi.mpirun_messages import Said, heard
from trainer_launch.planning import mpi_options
from trainer_launch.planning.mpi import Spec

_MAX_RESTARTS = 3  # of failed ranks, unless the user says
SETTLE_S = 5.0  # for what a killed mpirun left on other hosts, before the next one starts
_say = logs.say


class Agent:
    """The machine, and who carries out what it asks for."""

    def __init__(self, spec: Spec, command: Sequence[str], env: dict[str, str]) -> None:
        self._spec = spec
        self._typed = mpi_options.parse(command)
        self._selector = selectors.DefaultSelector()
        self._hosts = RemoteHosts(spec, self._typed, env, self._selector)
        self._wait_log = WaitLog()
        self._mpirun: Program | None = None
        self._start: st.Start | None = None  # that waits for sweeps to end
        self._start_by_s = 0.0
        self._purposes = spec.task.signals
        self._signals = _hear(self._selector, self._on_signal)
        task, restarts = spec.task, spec.task.topology.max_restarts
        self._settings = st.JobSettings(
            min_hosts=spec.min_hosts,
            max_hosts=spec.max_hosts,
            wait_s=task.settings.wait_timeout,
            rejoin_s=task.settings.wait_timeout,
            shrink_s=task.shrink_after_s,
            max_restarts=_MAX_RESTARTS if restarts is None else restarts,
            grace_s=task.grace_s,
            ask_s=self._hosts.ask_s,
            by_slot=mpi_options.fills_slots(self._typed, env) and not self._hosts.has_own,
            has_list=self._hosts.has_list,
        )

    def run(self) -> int:
        """Run the job to its end; its exit code."""
        self._state, actions = job_state_machine.begin(self._settings, self._hosts.members, time.monotonic())
        self._apply(actions)
        while self._state.phase is not st.Phase.DONE:
            self._turn()
        end = self._state.end
        assert end is not None
        if end.failure is not None:
            _write(self._spec.failure_file, end.failure)
        return end.code

    def _turn(self) -> None:
        waiting = self._state.phase is st.Phase.WAITING
        times = [job_state_machine.due_s(self._state), self._hosts.due_s, self._wait_log.due_s if waiting else None]
        if self._start is not None:
            times.append(self._start_by_s)
        until_s = min((at_s for at_s in times if at_s is not None), default=None)
        timeout_s = None if until_s is None else max(0.0, until_s - time.monotonic())
        for key, _ in self._selector.select(timeout_s):
            key.data()
        now_s = time.monotonic()
        self._hosts.tick(now_s)
        members = self._hosts.take_members()
        if members is not None:
            self._take(st.Hosts(members, now_s))
        if self._hosts.take_changed():
            seen = self._hosts.readiness
            self._take(st.Ready(host_readiness.ready(seen), host_readiness.stuck(seen), now_s))
        due_s = job_state_machine.due_s(self._state)
        if due_s is not None and now_s >= due_s:
            self._take(st.Tick(now_s))
        if self._start is not None and (not self._hosts.sweeps or now_s >= self._start_by_s):
            self._begin(self._start)
        if self._state.phase is st.Phase.WAITING:
            self._wait_log.say(self._hosts.readiness, now_s)

    def _take(self, event: st.Event) -> None:
        self._state, actions = job_state_machine.step(self._state, event)
        self._apply(actions)

    def _apply(self, actions: tuple[st.Action, ...]) -> None:
        for action in actions:
            match action:
                case st.Say(text):
                    self._wait_log.restart()
                    logs.warn(text)
                case st.Await(members, afresh, check_keys):
                    self._hosts.watch(members, afresh, check_keys=check_keys)
                    if self._state.phase is st.Phase.RUNNING and not self._settings.follows:
                        self._hosts.rest()
                case st.Start():
                    self._wait_log.restart()
                    self._start, self._start_by_s = action, time.monotonic() + SETTLE_S
                case st.Ask(hosts, limit_s):
                    self._hosts.ask(
                        hosts, limit_s, lambda missing: self._take(st.Answered(missing, time.monotonic()))
                    )
                case st.TellRanks(hosts):
                    self._tell_ranks(hosts)
                case st.Sweep(hosts):
                    self._hosts.sweep(hosts)
                case st.Signal(number):
                    if self._mpirun is not None:
                        self._mpirun.signal(number)
                    else:
                        self._call_off()

    def _begin(self, start: st.Start) -> None:
        if self._state.phase is not st.Phase.RUNNING:
            self._call_off()
            return
        self._start = None
        self._launch(start)

    def _call_off(self) -> None:
        """End a start that still waits for sweeps: nothing of it has been started yet."""
        if self._start is not None:
            self._start = None
            self._ended(exit_codes.STOPPED, Said(), ())

    def _launch(self, start: st.Start) -> None:
        self._hosts.rest()
        command = self._hosts.command(start.members)
        if start.members:
            _say(f"start {start.number}: mpirun on {counted(len(start.members), 'host')}")
            secrets = rank_environment.withheld(command.env, (*self._spec.forward, *self._typed.named))
            if secrets and start.number == 1:
                names = ", ".join(secrets[:8])
                _say(f"not forwarded to ranks, because they look like secrets: {names} (--forward-env)")
        post = self._hosts.threads.post
        self._mpirun = started = Mpirun(
            command.argv,
            command.env,
            lambda *how: post(partial(self._ended, *how)),
            is_hydra=command.is_hydra,
            lost=lambda host: post(lambda: self._take(st.Lost(host, time.monotonic()))),
        )
        if command.is_hydra and start.members:
            started.watch(lambda gone: post(lambda: self._doubt(gone)))

    def _doubt(self, words: Sequence[str]) -> None:
        """mpirun's way to these hosts is gone, which may only mean that their ranks have ended."""
        hosts = [member.host for member in self._state.running if member.host in words]
        if hosts and self._state.phase is st.Phase.RUNNING:
            self._hosts.ask(hosts, self._settings.ask_s, self._missed)

    def _missed(self, missing: Mapping[str, str]) -> None:
        self._hosts.rest()
        for host in missing:
            self._take(st.Lost(host, time.monotonic(), said=False))

    def _ended(self, code: int, said: Said, lines: tuple[str, ...]) -> None:
        self._mpirun = None
        self._take(st.Exited(code, said, lines, time.monotonic()))

    def _on_signal(self, number: int) -> None:
        purpose = action_of(number, self._purposes)
        if purpose is SignalAction.TERMINATE or (self._state.asked and number == signal.SIGTERM):
            self._take(st.Asked(time.monotonic()))
            self._call_off()
        elif purpose is SignalAction.DRAIN:
            self._drain(number)
            self._take(st.Drained(time.monotonic()))
            self._call_off()
        else:
            self._relay(number)

    # -- what an agent of something else than mpirun does in its own way ----------------------

    def _relay(self, number: int) -> None:
        """Let the ranks have a signal; mpirun hands on what it does not take for a request to stop."""
        if self._mpirun is None:
            return
        if number in STOP_SIGNALS:
            self._hosts.tell_ranks([member.host for member in self._state.running], name_of(number))
        else:
            self._mpirun.signal(number)

    def _drain(self, number: int) -> None:
        self._relay(number)

    def _tell_ranks(self, hosts: Sequence[str]) -> None:
        self._hosts.tell_ranks(hosts, "TERM")


def _hear(selector: selectors.BaseSelector, take: Callable[[int], None]) -> tuple[int, int]:
    """Have signals as bytes in a pipe."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    for number in STOP_SIGNALS | RELAYED:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def arrived() -> None:
        for number in os.read(read, 256):
            take(number)

    selector.register(read, selectors.EVENT_READ, arrived)
    return read, write


def _write(path: str | None, failure: object) -> None:
    if path is None:
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(failure, file)
    except OSError as problem:
        logs.warn(f"cannot write {path}: {problem}")


def main(spec: Spec, command: Sequence[str], env: Mapping[str, str], kind: type[Agent] = Agent) -> NoReturn:
    """The process, a fork of PID 1, to its end; what it starts has its environment."""
    os.environ.clear()
    os.environ.update(env)
    logs.set_up(env.get("TRAINER_LAUNCH_LOG_LEVEL") or "info", "mpi")
    try:
        code = kind(spec, command, dict(os.environ)).run()
    except LaunchError as problem:
        code = problem.exit_code
        reason = "NotStarted" if isinstance(problem, NodeError) else "Misconfigured"
        _write(spec.failure_file, {"reason": reason, "message": str(problem), "exit_code": code})
        logs.warn(str(problem))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that hang in a resolver or in ssh delay nobody


# -- hosts that are waited for -----------------------------------------------------------------


_FIRST_SAY_S = 1.0
_SAY_S = 5.0  # between two lines, doubled up to
_LONGEST_SAY_S = 60.0


class WaitLog:
    """Says which hosts are missing: soon, then less and less often while nothing changes."""

    def __init__(self) -> None:
        self._last = ""
        self._every_s = _SAY_S
        self.due_s: float | None = None

    def say(self, seen: Mapping[str, Readiness], now_s: float) -> None:
        """Say what was seen, if it is time and there is somebody to wait for."""
        if self.due_s is None:
            self._every_s = _SAY_S
            self.due_s = now_s + _FIRST_SAY_S
        if now_s < self.due_s or not seen:
            return
        text = host_readiness.summary(seen)
        if text != self._last:
            self._last, self._every_s = text, _SAY_S
        else:
            self._every_s = min(2 * self._every_s, _LONGEST_SAY_S)
        logs.say(text)
        self.due_s = now_s + self._every_s

    def restart(self) -> None:
        """Something else was said, or the wait is over: the next line comes as soon as the first one."""
        self.due_s = None


# -- mpirun ------------------------------------------------------------------------------------


_LAST_LINES = 60
_LOOK_S = 1.0
_RULER = "----"  # around mpirun's own messages
_STDERR = 2
_LINE_BYTES = 4096
_READ_BYTES = 32 * 1024
_LINGER_S = 0.5  # for the last of its output, when somebody else still has it open
Ended = Callable[[int, Said, tuple[str, ...]], None]  # exit code, what was said of the end, the last lines


class Program(ABC):
    """One start of a program whose output goes to ours untouched and is listened to on the way, in threads."""

    kills_below_first = False  # with SIGKILL also goes what it has started on this host: after it, or before

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        ended: Ended,
        *,
        stdin: int | None = None,
        hears_stdout: bool = True,
    ) -> None:
        """Start; `ended` is called from a thread. Raises NotRunnableError: there is no such program."""
        self._ended = ended
        self._lock = threading.Lock()
        self._said = Said()
        stdout = subprocess.PIPE if hears_stdout else None
        try:
            self._child = subprocess.Popen(argv, env=dict(env), stdin=stdin, stdout=stdout, stderr=subprocess.PIPE)
        except OSError as problem:
            found = not isinstance(problem, FileNotFoundError)
            raise NotRunnableError(f"{argv[0]!r} cannot be run: {problem.strerror}", found=found) from None
        self.pid = self._child.pid
        self._is_over = threading.Event()
        pipes = ((1, self._child.stdout), (_STDERR, self._child.stderr))
        self._pumps = [threading.Thread(target=self._listen, args=ends, daemon=True) for ends in pipes if ends[1]]
        for pump in self._pumps:
            pump.start()
        threading.Thread(target=self._collect, daemon=True).start()

    def signal(self, number: int) -> None:
        """Signal the program."""
        if self._child.poll() is not None:
            return
        if number == signal.SIGKILL:
            process_tree.kill(self.pid, below_first=self.kills_below_first)
        else:
            process_tree.send(self.pid, number)

    def watch(self, gone: Callable[[Sequence[str]], None]) -> None:
        """Tell, from a thread, when its ways to hosts are gone: it has an ssh for each, and may not care."""
        threading.Thread(target=self._watch, args=(gone,), daemon=True).start()

    # -- in threads ---------------------------------------------------------------------------

    @abstractmethod
    def _hear(self, text: str, stream: int) -> None:
        """Take in a line of its output."""

    @abstractmethod
    def _last_lines(self) -> tuple[str, ...]:
        """Of what it said, what tells the cause of its end."""

    def _listen(self, ours: int, pipe: IO[bytes]) -> None:
        rest = b""
        while data := os.read(pipe.fileno(), _READ_BYTES):
            _write_all(ours, data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._hear(_text(line), ours)
            rest = rest[-_LINE_BYTES:]
        self._hear(_text(rest), ours)

    def _watch(self, gone: Callable[[Sequence[str]], None]) -> None:
        before: set[str] = set()
        while not self._is_over.wait(_LOOK_S):
            now = self._reached()
            if before - now:
                gone(sorted(before - now))
            before = now

    def _reached(self) -> set[str]:
        """The words of all command lines below mpirun; a host's name is one of them."""
        words: set[str] = set()
        for entry in process_tree.descendants(self.pid):
            with contextlib.suppress(OSError), open(f"/proc/{entry.pid}/cmdline", "rb") as file:
                words.update(file.read(_LINE_BYTES).decode(errors="replace").split("\0"))
        return words

    def _collect(self) -> None:
        code = self._child.wait()
        self._is_over.set()
        for pump in self._pumps:
            pump.join(_LINGER_S)
        with self._lock:
            said, lines = self._said, self._last_lines()
        self._ended(exit_codes.of_signal(-code) if code < 0 else code, said, lines)


def _text(line: bytes) -> str:
    return line[:_LINE_BYTES].decode(errors="replace").rstrip()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    with contextlib.suppress(OSError):  # our reader is gone; the job goes on
        while view:
            view = view[os.write(descriptor, view) :]


class Mpirun(Program):
    """mpirun; Hydra says on stdout how ranks ended."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        ended: Ended,
        *,
        is_hydra: bool,
        lost: Callable[[str], None],
    ) -> None:
        self._lost = lost
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        super().__init__(argv, env, ended, hears_stdout=is_hydra)

    # -- in threads ---------------------------------------------------------------------------

    def _hear(self, text: str, stream: int) -> None:
        with self._lock:
            before = self._said.lost
            self._said = heard(self._said, text)
            if text and stream == _STDERR and not text.startswith(_RULER):
                self._lines.append(text)
            lost = self._said.lost
        if lost is not None and before is None:
            self._lost(lost)

    def _last_lines(self) -> tuple[str, ...]:
        return tuple(self._lines)
