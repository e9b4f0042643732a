"""The job's hosts as its launcher deals with them: who belongs to the job, who is there, what is run on them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue

from trainer_launch.host import logs, process_tree
from trainer_launch.host.deadline_subprocess import OUTPUT_BYTES, Ended
from trainer_launch.model import Member
from trainer_launch.model.units import printable
from trainer_launch.mpi.host_access import HostAccess
from trainer_launch.mpi.host_list import HostList
from trainer_launch.mpi.host_readiness import Done, HostStage, Probes, Readiness, Threads
from trainer_launch.supervisor.system import System

_LOOK_S = 2.0  # between two looks at the list of hosts
_LOG_IN_S = 10.0
_ASK_S = 1.5  # for a host that was well a moment ago to show its banner
_SWEEP_S = 10.0
_TELL_S = 8.0
_AT_ONCE = 64  # commands


class RemoteHosts:
    """Everything about the hosts. Threads and commands find it out; `tick` takes it in, in the main loop."""

    def __init__(self, access: HostAccess, hosts: HostList, threads: Threads, system: System) -> None:
        self._access, self._list, self._threads, self._system = access, hosts, threads, system
        self._commands = HostCommands(system, access.env)
        self._probes = Probes(threads, access.probed_port, self._log_in, over_ssh=not access.is_kubexec)
        system.listen(threads.fd)
        self._looking = False
        self._look_at_s = None if hosts.is_fixed else system.now() + _LOOK_S
        self._told_trouble = ""
        self.sweeps = 0  # that go on
        self.ask_s = _ASK_S + (_LOG_IN_S if access.is_kubexec else 0.0)  # to find out who is there

    @property
    def has_list(self) -> bool:
        """Whether there is a list of hosts; without one the program runs here alone."""
        return self._list.exists

    @property
    def members(self) -> tuple[Member, ...]:
        """Who belongs to the job now, in the order of ranks."""
        return self._list.members

    # -- in the main loop ---------------------------------------------------------------------

    @property
    def due_s(self) -> float | None:
        """When to `tick` next."""
        times = (self._probes.due_s, self._commands.due_s, None if self._looking else self._look_at_s)
        return min((at_s for at_s in times if at_s is not None), default=None)

    def tick(self, now_s: float) -> None:
        """Take in what was found out, and begin what is due."""
        self._threads.settle()
        self._commands.tick(now_s)
        self._probes.tick(now_s)
        if self._look_at_s is not None and not self._looking and now_s >= self._look_at_s:
            self._looking = self._threads.submit(self._look_at_list)
            self._look_at_s = now_s + _LOOK_S

    def reaped(self, pid: int, status: int) -> bool:
        """A child has ended; whether it was a command on a host."""
        return self._commands.reaped(pid, status)

    def close(self) -> None:
        """End what goes on."""
        self._probes.watch(())
        self._commands.close()

    def _look_at_list(self) -> Done:
        """In a thread."""
        return partial(self._take_list, self._list.look(self._run))

    def _take_list(self, members: tuple[Member, ...]) -> None:
        self._looking, self._look_at_s = False, self._system.now() + _LOOK_S
        if self._list.trouble != self._told_trouble:
            self._told_trouble = self._list.trouble
            if self._told_trouble:
                logs.warn(f"{self._told_trouble}; keeping the current list of hosts")
        self._list.members = members

    # -- who is there -------------------------------------------------------------------------

    @property
    def readiness(self) -> dict[str, Readiness]:
        """How far each host is."""
        return self._probes.readiness

    @property
    def addresses(self) -> Mapping[str, str]:
        """The addresses that hosts were found at."""
        return self._probes.addresses

    def take_changed(self) -> bool:
        """Whether something was seen since the last call."""
        changed, self._probes.changed = self._probes.changed, False
        return changed

    def watch(self, hosts: Iterable[Member], afresh: Iterable[str] = (), *, check_keys: bool = False) -> None:
        """Look whether these hosts are there; those `afresh` have to show it again."""
        self._probes.watch([member.host for member in hosts], afresh, check_keys=check_keys)

    def rest(self) -> None:
        """The job runs: look seldom at those that are not in it."""
        self._probes.rest()

    def ask(self, hosts: Sequence[str]) -> None:
        """Begin to find out who of these is there now."""
        self._probes.watch([member.host for member in self.members] or hosts, hosts)

    def is_pending(self, hosts: Iterable[str]) -> bool:
        """Whether one of those asked has not answered yet."""
        return any(self._stage(host) < HostStage.KEY for host in hosts)

    def gone(self, hosts: Iterable[str]) -> dict[str, str]:
        """Who of those asked is not there, and why.

        By ssh who shows no banner; by kubectl who is refused, as an API server may be slow for who is well.
        """
        readiness = {host: self.readiness.get(host, Readiness()) for host in hosts}
        refused = (HostStage.KEY,) if self._access.is_kubexec else tuple(s for s in HostStage if s < HostStage.KEY)
        return {host: str(reached) for host, reached in readiness.items() if reached.stage in refused}

    def _stage(self, host: str) -> HostStage:
        return self.readiness.get(host, Readiness()).stage

    # -- what is run on them ------------------------------------------------------------------

    def tell_ranks(self, hosts: Collection[str], name: str) -> None:
        """Let the ranks on these hosts have a signal; without any hosts they are here."""
        for host in hosts or (self._access.spec.task.host.hostname,):
            self._commands.start(self._access.tell(host, name), _TELL_S, lambda _: None)

    def sweep(self, hosts: Collection[str]) -> None:
        """Kill what is left on these hosts."""
        self.sweeps += len(hosts)
        for host in hosts:
            self._commands.start(self._access.sweep(host), _SWEEP_S, self._swept)

    def _swept(self, _: Ended) -> None:
        self.sweeps -= 1

    def _log_in(self, host: str) -> str | None:
        """In a thread: why a host does not let us in, in ssh's own words or the shell's; None: it does."""
        ended = self._run(self._access.log_in(host), _LOG_IN_S)
        return None if ended.code == 0 else printable(ended.why())

    def _run(self, argv: Sequence[str], limit_s: float) -> Ended:
        """In a thread."""
        return self._commands.run(argv, limit_s, self._threads.post)


# -- commands: PID 1 starts them, reaps them by pid, and never waits for one ----------------------


Ending = Callable[[Ended], object]


class _Command:
    """A command that is under way."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], due_s: float, done: Ending) -> None:
        """Start it. Raises OSError, ValueError: it cannot be started."""
        self.due_s, self.done = due_s, done
        with contextlib.ExitStack() as opened:
            files = [os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "w+b") for name in ("stdout", "stderr")]
            stdout, stderr = self._outputs = [opened.enter_context(file) for file in files]
            self.popen = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
            )
            self._opened = opened.pop_all()

    def ended(self, status: int | None) -> Ended:
        """How it ended, with what it has said; None: it was killed at its deadline."""
        self.popen.returncode = -1 if status is None else status  # the system has collected it, or will
        with self._opened:
            stdout, stderr = (os.pread(output.fileno(), OUTPUT_BYTES, 0) for output in self._outputs)
        return Ended(status=status, stdout=stdout, stderr=stderr, timed_out=status is None)


class HostCommands:
    """Those that are under way, and those that wait for their turn.

    They are no part of the job: signals to everything below the launcher spare them.
    """

    def __init__(self, system: System, env: Mapping[str, str]) -> None:
        self._system, self._env = system, env
        self._waiting: deque[tuple[Sequence[str], float, Ending]] = deque()
        self._running: dict[int, _Command] = {}  # by pid

    def start(self, argv: Sequence[str], limit_s: float, done: Ending) -> None:
        """Start a command; `done` is called in the main loop with how it ended."""
        self._waiting.append((argv, limit_s, done))
        self._begin()

    def run(self, argv: Sequence[str], limit_s: float, post: Callable[[Callable[[], None]], None]) -> Ended:
        """In a thread: have the main loop start a command by `post`, and wait for its end."""
        ended: SimpleQueue[Ended] = SimpleQueue()
        post(lambda: self.start(argv, limit_s, ended.put))
        return ended.get()

    @property
    def due_s(self) -> float | None:
        """When to `tick` next."""
        return min((command.due_s for command in self._running.values()), default=None)

    def tick(self, now_s: float) -> None:
        """Kill what is beyond its deadline. What is stuck in the kernel is left behind."""
        for pid in [pid for pid, command in self._running.items() if now_s >= command.due_s]:
            process_tree.kill(pid, below_first=False)  # a shell would say who was killed
            self.reaped(pid, None)

    def reaped(self, pid: int, status: int | None) -> bool:
        """A child has ended; whether it was a command."""
        command = self._running.pop(pid, None)
        if command is None:
            return False
        command.done(command.ended(status))
        self._begin()
        return True

    def close(self) -> None:
        """Kill what still runs: nobody waits for it any more."""
        for pid, command in self._running.items():
            process_tree.kill(pid)
            command.ended(None)

    def _begin(self) -> None:
        while self._waiting and len(self._running) < _AT_ONCE:
            argv, limit_s, done = self._waiting.popleft()
            try:
                command = _Command(argv, self._env, self._system.now() + limit_s, done)
            except (OSError, ValueError) as problem:  # the latter: a NUL in a word
                why = problem if isinstance(problem, OSError) else OSError(str(problem))
                done(Ended(status=127, stderr=f"{argv[0]}: {why}".encode(), problem=why))
                continue
            self._system.adopt(command.popen.pid, keep=True)
            self._running[command.popen.pid] = command
