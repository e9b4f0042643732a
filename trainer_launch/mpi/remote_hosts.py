"""The hosts of an MPI job: their list, their readiness, commands on them, and how long the job waits for them.

Readiness is how far each host is from taking a daemon: its name, its port, its banner, its key. Each host is looked
at in threads, until it is ready. One that has shown its banner is not asked again: sshd counts those who come and
do not log in.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.contracts import mpi_operator
from trainer_launch.host import logs, network
from trainer_launch.host.deadline_subprocess import Ended, begin_thread
from trainer_launch.host.files import LiveFiles
from trainer_launch.model import Member, hostfile
from trainer_launch.model.errors import ContractError, LaunchError, NodeError
from trainer_launch.model.units import counted, listed, printable
from trainer_launch.model.value_parsers import named
from trainer_launch.mpi.host_access import HostAccess, HostCommands
from trainer_launch.mpi.hosted_program import HostedProgram
from trainer_launch.planning.mpi import Spec
from trainer_launch.planning.mpi_options import DISCOVERY, SLOTS, Typed
from trainer_launch.supervisor.system import System

_LOOK_S = 2.0  # between two looks at the list of hosts
_LOG_IN_S = 10.0
_ASK_S = 1.5  # for a host that was well a moment ago to show its banner
_SWEEP_S = 10.0
_TELL_S = 8.0
GATHER_S = 3.0  # for other hosts to come too, before the job is started without them or interrupted for one
_SHOWN = 8  # hosts that one sentence names
_FIRST_SAY_S = 1.0
_SAY_S = 5.0  # between two lines about missing hosts
_SAY_AGAIN_S = 60.0  # while nothing changes
_MAX_BYTES = 8 << 20
_SCRIPT_S = 10.0  # kubelet mounts a script of echo lines; the user's own may ask somebody
_CONNECT_S = 1.2  # less than `RemoteHosts.ask_s`: who is asked and gives no answer has had it by then
_BANNER_S = 4.0  # sshd looks the name of its caller up before it says anything, where UseDNS is on
_PAUSE_S = 0.1  # between two attempts
_REST_S = 1.0  # likewise, while the job runs without them
_PER_SECOND = 500  # attempts for all hosts together
_KEY_PAUSE_S = 2.0
_OWN_BANNER = b"SSH-2.0-trainer_launch_probe\r\n"  # to who leaves without one, sshd's log gives an error each time
_BANNER_BYTES = 4096
_STACK_BYTES = 256 * 1024

Run = Callable[[Sequence[str], float], Ended]  # a command, and its limit in seconds
LogIn: TypeAlias = Callable[[str], "str | None"]  # blocks; why a host does not let us in, None: it does
Done: TypeAlias = Callable[[], None]  # called in the main loop
Work: TypeAlias = Callable[[], Done]


class HostList:
    """The hosts by list, in the order of ranks, and those that are discovered beyond it.

    What was typed goes before what the platform says. A list that makes no sense any more changes nothing.
    """

    def __init__(self, spec: Spec, typed: Typed) -> None:
        """Read it. Raises LaunchError: it makes no sense, or cannot be read."""
        job, slots = spec.task.job, typed.number_of(SLOTS)
        self._contract = job.contract
        self._file = typed.hostfile or (None if job.mpi is None else job.mpi.hostfile_path)
        self._is_hydra = job.mpi is not None and job.mpi.mpi_implementation in ("Intel", "MPICH")
        self._slots, self._slots_are_given = slots or spec.slots, slots is not None or spec.slots_are_given
        is_elastic = spec.min_hosts is not None or typed.is_elastic
        self._script = typed.values.get(DISCOVERY, mpi_operator.DISCOVERY) if is_elastic else None
        self.members = self._listed()
        self.trouble = ""
        if typed.hosts is not None:  # chooses among the list
            slots_of = {member.host: member.slots for member in self.members}
            chosen = hostfile.parse_horovod(typed.hosts, "-H", self._contract)
            self.members = self._with_slots(
                [replace(m, slots=slots_of.get(m.host, 1)) if m.slots is None else m for m in chosen]
            )
            self._file = self._script = None
        self.is_fixed = self._file is None and self._script is None
        self.exists = not self.is_fixed or typed.hosts is not None  # without one mpirun runs here alone

    def look(self, run: Run) -> tuple[Member, ...]:
        """The hosts now; `trouble` says why they could not be read. Blocks while `run` runs a script."""
        try:
            members = merged(self._listed(), self._discovered(run), self.members)
            self.trouble = ""
        except LaunchError as problem:
            self.trouble = str(problem)
            return self.members
        return members

    def _listed(self) -> tuple[Member, ...]:
        if self._file is None:
            return ()
        data = LiveFiles(_MAX_BYTES + 1).read(self._file)
        if data is None:
            raise ContractError(f"the list of hosts {named(self._file)} cannot be read; is its volume mounted?")
        return self._with_slots(self._parsed(data[:_MAX_BYTES].decode(errors="replace"), self._file))

    def _parsed(self, text: str, where: str) -> tuple[Member, ...]:
        """In the form of the platform's MPI; a file that the user typed may be of the other one."""
        forms = (hostfile.parse_open_mpi, hostfile.parse_hydra)
        first, other = reversed(forms) if self._is_hydra else forms
        try:
            return first(text, where, self._contract)
        except ContractError:
            with contextlib.suppress(ContractError):
                return other(text, where, self._contract)
            raise

    def _discovered(self, run: Run) -> tuple[Member, ...]:
        """The hosts that the script prints. Raises LaunchError: it fails, takes too long, or prints other text."""
        script = self._script
        if script is None or not Path(script).exists():
            return ()
        ended = run((script,), _SCRIPT_S)
        if ended.code != 0:
            raise NodeError(f"{script} failed: {ended.failure or f'exit code {ended.code}'}")
        return self._with_slots(hostfile.parse_discovery(ended.out, script, self._contract))

    def _with_slots(self, members: Sequence[Member]) -> tuple[Member, ...]:
        """With the ranks that each takes: the user's number replaces the list's, the platform's fills gaps."""
        if self._slots is None:
            return tuple(members)
        given = self._slots_are_given
        return tuple(replace(m, slots=self._slots) if given or m.slots is None else m for m in members)


def merged(listed: Sequence[Member], discovered: Sequence[Member], before: Sequence[Member]) -> tuple[Member, ...]:
    """The list, and the hosts discovered beyond it; a host that was discovered `before` keeps its place."""
    members = {member.host: member for member in listed}
    slots = next((member.slots for member in listed if member.slots is not None), None)
    newest = {member.host: member for member in discovered}
    for host in (*(member.host for member in before), *newest):
        if host in newest:
            member = newest[host]
            members.setdefault(host, member if member.slots is not None else replace(member, slots=slots))
    return tuple(members.values())


class HostStage(IntEnum):
    """The stages that a host has to pass, in order."""

    DNS = 0
    PORT = 1
    BANNER = 2
    KEY = 3
    READY = 4


_NAMES = {HostStage.DNS: "DNS", HostStage.PORT: "port", HostStage.BANNER: "banner", HostStage.KEY: "key"}


class Readiness(Struct, frozen=True):
    """The stage that a host has not passed yet, and why."""

    stage: HostStage = HostStage.DNS
    why: str = "not asked yet"

    def __str__(self) -> str:
        return "ready" if self.stage is HostStage.READY else f"{_NAMES[self.stage]}: {self.why}"


def summary(readiness: Mapping[str, Readiness], most: int = 5) -> str:
    """How many hosts are ready and what the others wait for, as a line of the log."""
    missing = stuck(readiness)
    words = listed([f"{host} ({why})" for host, why in missing.items()], most, "; ")
    return f"{len(readiness) - len(missing)} of {counted(len(readiness), 'host')} ready; waiting for {words}"


def stuck(readiness: Mapping[str, Readiness]) -> dict[str, str]:
    """Where each host that is not ready is stuck."""
    return {host: str(reached) for host, reached in readiness.items() if reached.stage is not HostStage.READY}


def ready(readiness: Mapping[str, Readiness]) -> frozenset[str]:
    """The hosts that have passed all stages."""
    return frozenset(host for host, reached in readiness.items() if reached.stage is HostStage.READY)


class _Target:
    """A host, and the attempt that is under way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reached = Readiness()  # what the last attempt came to; one under way can only be further than that
        self.address = ""  # that it was last looked for at
        self.next_s = 0.0
        self.tried = 0
        self.is_busy = False  # a thread works for it

    @property
    def is_due(self) -> bool:
        """Whether the host is not ready, and no attempt is under way."""
        return self.reached.stage is not HostStage.READY and not self.is_busy

    def reach(self, stage: HostStage, why: str) -> None:
        """An attempt has come so far; from its thread."""
        if self.reached.stage < stage:
            self.reached = Readiness(stage, why)


class Probes:
    """The hosts that are probed, and their readiness; without a port only their names can be probed."""

    def __init__(
        self,
        threads: Threads,
        port: int | None,
        log_in: LogIn = lambda _: "not asked yet",
        *,
        over_ssh: bool = True,
    ) -> None:
        self._threads, self._port, self.log_in, self._over_ssh = threads, port, log_in, over_ssh
        self._targets: dict[str, _Target] = {}
        self._must_log_in = False
        self._at_rest = False
        self._changed = False

    def watch(self, hosts: Iterable[str], afresh: Iterable[str] = (), *, check_keys: bool = False) -> None:
        """Look at these hosts from now on; those `afresh` have to pass everything again."""
        kept = {name: target for name, target in self._targets.items() if name not in set(afresh)}
        self._targets = {name: kept.get(name) or _Target(name) for name in hosts}
        self._must_log_in = check_keys
        self._at_rest, self._changed = False, True

    def rest(self) -> None:
        """The job runs: look seldom at those that are not in it."""
        self._at_rest = True

    def take_changed(self) -> bool:
        """Whether a host's readiness has changed since the last call."""
        changed, self._changed = self._changed, False
        return changed

    @property
    def readiness(self) -> dict[str, Readiness]:
        """The stage of each host, in the order in which they were named."""
        return {name: target.reached for name, target in self._targets.items()}

    @property
    def addresses(self) -> dict[str, str]:
        """Where each host was found."""
        return {name: target.address for name, target in self._targets.items() if target.address}

    @property
    def due_s(self) -> float | None:
        """When to `tick` next; None: nothing is due."""
        return min((target.next_s for target in self._targets.values() if target.is_due), default=None)

    def tick(self, now_s: float) -> None:
        """Begin what is due."""
        for target in self._targets.values():
            if target.is_due and now_s >= target.next_s:
                target.is_busy = self._threads.submit(partial(self._work, target))
                target.next_s = now_s + _REST_S

    def _work(self, target: _Target) -> Done:
        """In a thread."""
        return partial(self._ended, target, self._attempt(target))

    def _ended(self, target: _Target, reached: Readiness) -> None:
        target.is_busy = False
        if self._targets.get(target.name) is not target:
            return
        self._changed |= reached != target.reached
        target.reached = reached
        usual_s = _REST_S if self._at_rest else max(_PAUSE_S, len(self._targets) / _PER_SECOND)
        target.next_s = time.monotonic() + (_KEY_PAUSE_S if reached.stage is HostStage.KEY else usual_s)

    def _attempt(self, target: _Target) -> Readiness:
        """In a thread."""
        if not self._over_ssh or target.reached.stage is HostStage.KEY:
            return self._key(target)
        try:
            addresses = socket.getaddrinfo(target.name, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as problem:
            return Readiness(HostStage.DNS, getattr(problem, "strerror", None) or str(problem))
        family, _, _, _, address = addresses[target.tried % len(addresses)]
        target.tried += 1
        target.address = str(address[0])
        if self._port is None or _is_own(str(addresses[0][4][0])):
            return Readiness(HostStage.READY, "")  # mpirun starts ranks on its own host itself
        target.reach(HostStage.PORT, "no answer yet")
        try:
            with socket.socket(family, socket.SOCK_STREAM) as connected:
                connected.settimeout(_CONNECT_S)
                connected.connect(address)
                target.reach(HostStage.BANNER, "no banner yet")
                why = banner_fault(connected)
        except TimeoutError:
            return Readiness(HostStage.PORT, "no answer")
        except OSError as problem:
            return Readiness(HostStage.PORT, str(problem.strerror))
        if why:
            return Readiness(HostStage.BANNER, why)
        if self._must_log_in:
            target.reach(HostStage.KEY, "logging in")
            return self._key(target)
        return Readiness(HostStage.READY, "")

    def _key(self, target: _Target) -> Readiness:
        why = self.log_in(target.name)
        return Readiness(HostStage.READY, "") if why is None else Readiness(HostStage.KEY, why)


def banner_fault(connected: socket.socket) -> str:
    """Why what has answered is no sshd; "": it is. Blocks."""
    until_s, text = time.monotonic() + _BANNER_S, b""
    while b"\n" not in text.partition(b"SSH-")[2]:
        try:
            connected.settimeout(max(0.001, until_s - time.monotonic()))
            data = connected.recv(_BANNER_BYTES)
        except TimeoutError:
            return f"silent for {_BANNER_S:g} s"
        except OSError as problem:
            return str(problem.strerror)
        text += data
        if not data or len(text) > _BANNER_BYTES:
            return "what listens there is not sshd" if text else "it closes connections at once"
    with contextlib.suppress(OSError):
        connected.send(_OWN_BANNER)
    return ""


def _is_own(address: str) -> bool:
    """Whether ranks there are started without ssh; the pods of a rehearsal have loopback addresses of their own."""
    return address in ("127.0.0.1", "::1") or (not address.startswith("127.") and network.is_here(address))


class Threads:
    """Daemon threads, so that one that hangs keeps nobody alive; `fd` is readable when one has an answer."""

    def __init__(self, size: int) -> None:
        self._free = threading.BoundedSemaphore(size)
        self._answers: SimpleQueue[Done] = SimpleQueue()
        self.fd, self._post = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def submit(self, work: Work) -> bool:
        """Let a thread do `work`; what it returns is called in the main loop. False: no more threads may start."""
        others_bytes = threading.stack_size(_STACK_BYTES)
        try:
            return begin_thread("hosts", self._labour, work) is not None
        finally:
            threading.stack_size(others_bytes)

    def post(self, done: Done) -> None:
        """Have `done` called in the main loop; from any thread."""
        self._answers.put(done)
        self.wake()

    def wake(self) -> None:
        """Let the main loop turn; from any thread."""
        with contextlib.suppress(BlockingIOError):  # full: its reader is due to wake up anyway
            os.write(self._post, b".")

    def settle(self) -> None:
        """In the main loop: call what threads have answered."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 65536)
        while True:
            try:
                done = self._answers.get_nowait()
            except Empty:
                return
            done()

    def _labour(self, work: Work) -> None:
        with self._free:
            self.post(work())


class RemoteHosts:
    """The state of the hosts. Threads and commands look at them; `tick` takes in the answers, in the main loop."""

    def __init__(
        self, access: HostAccess, hosts: HostList, threads: Threads, probes: Probes, system: System
    ) -> None:
        self._access, self._list, self._threads, self._system = access, hosts, threads, system
        self._commands = HostCommands(system, access.env)
        self.probes = probes
        probes.log_in = self._log_in
        system.listen(threads.fd)
        self._looking = False
        self._look_at_s = None if hosts.is_fixed else system.now() + _LOOK_S
        self._logged_trouble = ""
        self.sweeps = 0  # that go on
        self.ask_s = _ASK_S + (_LOG_IN_S if access.is_kubexec else 0.0)  # to find out who is there

    @property
    def has_list(self) -> bool:
        """Whether there is a list of hosts; without one the program runs here alone."""
        return self._list.exists

    @property
    def members(self) -> tuple[Member, ...]:
        """The hosts that belong to the job now, in the order of ranks."""
        return self._list.members

    @property
    def due_s(self) -> float | None:
        """When to `tick` next."""
        times = (self.probes.due_s, self._commands.due_s, None if self._looking else self._look_at_s)
        return min((at_s for at_s in times if at_s is not None), default=None)

    def tick(self, now_s: float) -> None:
        """Take in what was found out, and begin what is due."""
        self._threads.settle()
        self._commands.tick(now_s)
        self.probes.tick(now_s)
        if self._look_at_s is not None and not self._looking and now_s >= self._look_at_s:
            self._looking = self._threads.submit(self._look_at_list)
            self._look_at_s = now_s + _LOOK_S

    def reaped(self, pid: int, status: int) -> bool:
        """A child has ended; whether it was a command on a host."""
        return self._commands.reaped(pid, status)

    def close(self) -> None:
        """End what goes on."""
        self.probes.watch(())
        self._commands.close()

    def _look_at_list(self) -> Done:
        """In a thread."""
        return partial(self._take_list, self._list.look(self._run))

    def _take_list(self, members: tuple[Member, ...]) -> None:
        self._looking, self._look_at_s = False, self._system.now() + _LOOK_S
        if self._list.trouble != self._logged_trouble:
            self._logged_trouble = self._list.trouble
            if self._logged_trouble:
                logs.warn(f"{self._logged_trouble}; keeping the current list of hosts")
        self._list.members = members

    def watch(self, hosts: Iterable[Member], afresh: Iterable[str] = (), *, check_keys: bool = False) -> None:
        """Look whether these hosts are there; those `afresh` have to show it again."""
        self.probes.watch([member.host for member in hosts], afresh, check_keys=check_keys)

    def ask(self, hosts: Sequence[str]) -> None:
        """Begin to ask which of these hosts are there now."""
        self.probes.watch([member.host for member in self.members] or hosts, hosts)

    def is_pending(self, hosts: Iterable[str]) -> bool:
        """Whether one of those asked has not answered yet."""
        return any(self._stage(host) < HostStage.KEY for host in hosts)

    def gone(self, hosts: Iterable[str]) -> dict[str, str]:
        """The hosts that were asked and are not there, and why.

        By ssh who shows no banner; by kubectl who is refused, as an API server may be slow for who is well.
        """
        readiness = {host: self.probes.readiness.get(host, Readiness()) for host in hosts}
        refused = (HostStage.KEY,) if self._access.is_kubexec else tuple(s for s in HostStage if s < HostStage.KEY)
        return {host: str(reached) for host, reached in readiness.items() if reached.stage in refused}

    def _stage(self, host: str) -> HostStage:
        return self.probes.readiness.get(host, Readiness()).stage

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


class HostWait:
    """The hosts that are there, of those that the job is for, and how long it waits for the others."""

    def __init__(self, program: HostedProgram, hosts: RemoteHosts) -> None:
        self._program, self._hosts = program, hosts
        self._max_hosts, task = program.spec.max_hosts, program.spec.task
        self._limit_s = float(task.settings.wait_timeout)
        self._shrink_s = task.shrink_after_s
        self.checks_keys = False  # hosts have to let us in
        self._lost: str | None = None  # the host that the job has lost
        self._until_s = 0.0
        self._is_first = True  # nothing was started yet
        self._there: tuple[Member, ...] = ()
        self._same_since_s = 0.0  # since when the same hosts are there
        self._say_at_s = self._say_again_s = 0.0  # when to say who is missing, and when though nothing has changed
        self._last_line = ""

    def begin(self, now_s: float, *afresh: str, lost: str | None = None) -> None:
        """Wait; those `afresh` have to show that they are there again."""
        self._until_s = now_s + self._limit_s
        self._there, self._same_since_s, self._lost = (), now_s, lost
        self._say_at_s, self._last_line = now_s + _FIRST_SAY_S, ""
        self._hosts.watch(self._hosts.members, afresh, check_keys=self.checks_keys)

    def end(self) -> None:
        """The hosts have been taken."""
        self._is_first = False

    def chosen(self, now_s: float) -> tuple[Member, ...] | None:
        """The hosts to start on now; None: others are waited for."""
        there = self.there()
        if len(there) == len(self.wanted()) and (there or not self._hosts.has_list):
            return there
        if there != self._there:
            self._there, self._same_since_s = there, now_s
        return there if self._is_enough and now_s >= self._same_since_s + self._patience_s else None

    @property
    def due_s(self) -> float:
        """When to look again."""
        shrink_s = self._same_since_s + self._patience_s if self._is_enough else self._until_s
        return min(self._until_s, shrink_s, self._say_at_s)

    def is_late(self, now_s: float) -> bool:
        """Whether the time is over; says who is missing: soon, when that changes, and each minute."""
        if now_s >= self._say_at_s:
            self._say_at_s = now_s + _SAY_S
            readiness = self._hosts.probes.readiness
            text = summary(readiness) if readiness else ""
            if text and (text != self._last_line or now_s >= self._say_again_s):
                logs.say(text)
                self._last_line, self._say_again_s = text, now_s + _SAY_AGAIN_S
        return now_s >= self._until_s

    @property
    def _is_enough(self) -> bool:
        program = self._program
        least = program.first_hosts if self._is_first and program.first_hosts is not None else program.least_hosts
        return least is not None and len(self._there) >= least

    @property
    def _patience_s(self) -> float:
        """How long to wait for more hosts than the minimum; at first others are just coming, too."""
        return max(self._shrink_s, GATHER_S) if self._is_first else self._shrink_s

    def wanted(self) -> tuple[Member, ...]:
        """The hosts that the job is for; more of them stay in reserve."""
        return self._hosts.members[: self._max_hosts]

    def there(self) -> tuple[Member, ...]:
        """The hosts that could run the job: of those that are ready the first, so that ranks keep their order."""
        are_ready = ready(self._hosts.probes.readiness)
        return tuple(member for member in self._hosts.members if member.host in are_ready)[: self._max_hosts]

    def who_is_missing(self) -> str:
        """In words, with the stage that each host is stuck at."""
        wanted, why = self.wanted(), stuck(self._hosts.probes.readiness)
        absent = [member.host for member in wanted if member.host in why]
        shown = listed([f"{host}: {why[host]}" for host in absent], _SHOWN, "; ")
        what = f"{self._lost} did not come back: " if self._lost in absent else ""
        return f"{what}{len(wanted) - len(absent)} of {counted(len(wanted), 'host')} ready; missing: {shown}"
