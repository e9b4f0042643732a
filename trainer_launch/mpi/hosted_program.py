"""mpirun and horovodrun as the job starts them, again and again; their output is read on its way to our own.

Both need hosts, ssh and restarts. horovodrun gets an `ssh` of ours, which checks host keys. In an elastic job
Horovod itself adds and drops hosts while it trains; it asks a script of ours each second, which prints the hosts
that the launcher can reach.
"""

from __future__ import annotations

import os
import shlex
import shutil
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from trainer_launch.host import executables, files, logs, network, runtime_directory
from trainer_launch.model import Death, Destination, Member, Process, exit_codes, hostfile
from trainer_launch.model.errors import NodeError
from trainer_launch.model.units import counted
from trainer_launch.mpi import mpirun_command, rank_environment
from trainer_launch.mpi.host_access import HostAccess
from trainer_launch.mpi.mpirun_command import Dialect
from trainer_launch.mpi.mpirun_messages import (
    MpirunEnd,
    MpirunReport,
    rank_and_text,
    with_line,
    with_line_of_horovod,
)
from trainer_launch.mpi.rank_environment import but_secrets
from trainer_launch.planning.mpi_options import COOLDOWN, INTERFACES, MIN_NUMBER, Typed

_LAST_LINES = 400  # of all ranks together
_KEPT_LINES = 60
_RULER = "----"  # around mpirun's own messages
_STDOUT, _STDERR = 1, 2
_LINE_BYTES = 4096
# What shows a job of a resource manager, such as its list of hosts, and the program with which it starts ranks.
_MANAGERS = dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_NODELIST", "SLURM_JOB_NODELIST"), "srun") | {
    "PBS_NODEFILE": "pbsdsh",
    "PE_HOSTFILE": "qrsh",
    "LSB_MCPU_HOSTS": "blaunch",
    "COBALT_NODEFILE": "aprun",
}
# Without a cooldown Horovod never takes a host back that has failed once; it doubles from the first to the second.
_COOLDOWN_S = ("2", "30")


class HostedProgram(ABC):
    """A program that runs ranks on the job's hosts: its command, and its messages."""

    adds_hosts = False  # it adds and drops hosts itself
    hands_signals_on = True  # to its ranks
    leaves_ranks = False  # on hosts, when it fails
    ends_itself = False  # when it has lost a host
    is_hydras = False  # whether it is one of MPICH or Intel MPI
    first_hosts: int | None = None  # with which it may start; None: as at later starts
    least_hosts: int | None = None  # with which it may start again; None: all

    def __init__(
        self,
        process: Process,
        typed: Typed,
        access: HostAccess,
        *,
        streams: Collection[int],
        wake: Callable[[], object],
    ) -> None:
        """`streams` of it are listened to; `wake` is called, in the output's thread, when there is news."""
        self.typed, self._access, self.spec = typed, access, access.spec
        self._streams, self._wake = frozenset(streams), wake
        env = {**process.env, runtime_directory.MPI_RUN: access.mark}
        self._process = replace(process, env=env, streams=dict.fromkeys(streams, Destination()))
        self.least_hosts = self.spec.min_hosts
        self._lock = threading.Lock()
        self._begin()

    @property
    def name(self) -> str:
        """Of its process."""
        return self._process.name

    @abstractmethod
    def process(
        self, members: Sequence[Member], everyone: Sequence[Member], number: int, addresses: Mapping[str, str]
    ) -> Process:
        """The process to start for the `number`th time on these hosts of all, which have these addresses.

        Raises:
            NodeError: the list of hosts cannot be written.
        """

    def stopping(self) -> None:  # noqa: B027 - most need nothing
        """Nothing new is to be started on any host."""

    def offer(self, members: Sequence[Member]) -> None:  # noqa: B027
        """Name the hosts that are there now."""

    def _begin(self) -> None:
        """Forget the messages of the last start."""
        with self._lock:
            self._report = MpirunReport()
            self._open = set(self._streams)
            self._rests = dict.fromkeys(self._streams, b"")
            self._lines: deque[str] = deque(maxlen=_LAST_LINES)

    def hear(self, process: str, stream: int, data: bytes) -> None:
        """Take in what was written, b"" at its end; in the output's thread."""
        if stream not in self._streams or process != self.name:
            return
        with self._lock:
            lost = self._report.lost
            *lines, rest = (self._rests[stream] + data).split(b"\n")
            self._rests[stream] = rest[-_LINE_BYTES:]
            for line in lines if data else [rest]:
                self._hear(line[:_LINE_BYTES].decode(errors="replace").rstrip(), stream)
            if not data:
                self._open.discard(stream)
            is_news = not data or self._report.lost != lost
        if is_news:
            self._wake()

    @property
    def lost(self) -> str | None:
        """The host that the program reports as lost, by its name."""
        return self._report.lost

    def forget_lost(self) -> None:
        """Forget the lost host: the program goes on without it."""
        with self._lock:
            self._report = replace(self._report, lost=None)

    @property
    def is_quiet(self) -> bool:
        """Whether all of its output was read."""
        return not self._open

    def end(self, death: Death) -> MpirunEnd:
        """How the program ended, with its messages."""
        with self._lock:
            return MpirunEnd(death, self._report, tuple(self._last_lines())[-_KEPT_LINES:], self.is_hydras)

    def explained(self, refusal: str, members: Sequence[Member]) -> str:
        """A refusal of mpirun's own, with numbers and an option, or why this host cannot run the program."""
        if "not enough slots" in refusal:
            slots, cpus = mpirun_command.total(members), self.spec.task.host.cpus.affinity
            room = f"{slots or 'an unknown number of'} slots" if members else f"{cpus} CPUs, as there is no list"
            where = counted(len(members) or 1, "host")
            refusal = f"{refusal} ({where} with {room}); lower -np, raise slots=N, or add --oversubscribe"
        elif " bind" in refusal:
            refusal += "; lower -np, or add --bind-to none"
        elif "help file" in refusal and (names := mpirun_command.installation(self._process.env)):
            refusal += f"; unset what names another installation of MPI: {', '.join(names)}"
        path, word = self._process.env.get("PATH"), self.typed.program[0]
        file = shutil.which(word, path=path) or word
        why = executables.obstacle(file, path) or (executables.of_format(file) if "format error" in refusal else "")
        return f"mpirun cannot run {word!r}: {why}" if why and word in refusal else f"mpirun: {refusal}"

    @abstractmethod
    def _hear(self, text: str, stream: int) -> None:
        """Take in a line of its output."""

    def _last_lines(self) -> Iterable[str]:
        """The lines of its output that may name the cause of its end."""
        return self._lines


class Mpirun(HostedProgram):
    """mpirun; Hydra reports on stdout how ranks ended, and does not care when its ssh has lost a host."""

    def __init__(
        self, process: Process, typed: Typed, access: HostAccess, dialect: Dialect, wake: Callable[[], object]
    ) -> None:
        self._dialect = dialect
        self.is_hydras, self.ends_itself = dialect.is_hydra, not dialect.is_hydra
        streams = (_STDOUT, _STDERR) if dialect.is_hydra else (_STDERR,)
        super().__init__(process, typed, access, streams=streams, wake=wake)

    def process(
        self, members: Sequence[Member], everyone: Sequence[Member], number: int, addresses: Mapping[str, str]
    ) -> Process:
        """Write the list of hosts, and return mpirun's command for them. Raises NodeError: it cannot be written."""
        access, spec = self._access, self.spec
        path = f"{spec.task.scratch}/{runtime_directory.HOSTFILE}"
        job_hosts = mpirun_command.JobHosts(
            hosts=tuple(members),
            everyone=tuple(everyone),
            hostfile=path,
            ssh_config=access.client.files.client if access.client else None,
            is_root=os.geteuid() == 0,
            stray=_stray_variable(self._process.env),
        )
        given = self._process.env
        made = mpirun_command.command(self.typed, self._dialect, given, spec.forward, job_hosts)
        if members:
            _write(path, made.hostfile)
            logs.say(f"start {number}: mpirun on {counted(len(members), 'host')}")
        if job_hosts.stray and number == 1:
            logs.say(f"{job_hosts.stray} is set, but its resource manager is not here: mpirun does not ask it")
        if members and number == 1:
            _say_withheld(made.env, (*spec.forward, *self.typed.named))
        env = made.env if access.client is None else access.client.account.added_to(made.env)
        self._begin()
        return replace(self._process, argv=made.argv, env=env)

    def _hear(self, text: str, stream: int) -> None:
        self._report = with_line(self._report, text)
        if text and stream == _STDERR and not text.startswith(_RULER):
            self._lines.append(text)


def _stray_variable(env: Mapping[str, str]) -> str:
    """A variable by which mpirun would ask a resource manager that is not here; "": none."""
    names, path = [name for name in _MANAGERS if env.get(name)], env.get("PATH")
    is_here = any(os.path.isfile(env[name]) or shutil.which(_MANAGERS[name], path=path) for name in names)
    return "" if is_here or not names else names[0]


def _write(path: str, text: str) -> None:
    try:
        files.replace(path, text.encode(errors="replace"))
    except OSError as problem:
        raise NodeError(f"the list of hosts cannot be written: {problem.strerror}") from None


def _say_withheld(env: Mapping[str, str], named: Collection[str]) -> None:
    secrets = rank_environment.withheld(env, named)
    if secrets:
        names = ", ".join(secrets[:8])
        logs.say(f"not forwarded to ranks, because they look like secrets: {names} (--forward-env)")


class Horovodrun(HostedProgram):
    """horovodrun. Its way to end a rank on another host is to end its ssh, of which the rank hears nothing."""

    hands_signals_on = False
    leaves_ranks = True

    def __init__(
        self,
        process: Process,
        typed: Typed,
        access: HostAccess,
        everyone: Sequence[Member],
        wake: Callable[[], object],
    ) -> None:
        """`everyone` belongs to the job at its start."""
        super().__init__(process, typed, access, streams=(1, 2), wake=wake)
        self.adds_hosts = typed.is_elastic
        if typed.is_elastic:  # --num-proc is for the start, --min-num-proc for later
            number = typed.number or 1
            slots = min((member.slots or 1 for member in everyone), default=1)
            self.first_hosts = -(-number // slots)
            self.least_hosts = -(-(typed.number_of(*MIN_NUMBER) or number) // slots)
        folder = Path(access.spec.task.scratch, runtime_directory.HOROVOD)
        self._bin, self._stopping, self._ready = folder / "bin", folder / "stopping", folder / "ready"
        self._bin.mkdir(parents=True, mode=0o700)
        stopping, ready = shlex.quote(str(self._stopping)), shlex.quote(str(self._ready))
        begin = shlex.join(_ssh(access, process.env))
        ssh = f'[ ! -e {stopping} ] || exit {exit_codes.STOPPED}\nexec {begin} "$@" </dev/null'
        self._script = folder / "discover"
        for path, text in ((self._bin / "ssh", ssh), (self._script, f"exec cat {ready}")):
            path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
            path.chmod(0o700)

    def stopping(self) -> None:
        """Let its ssh start nothing from now on."""
        self._stopping.touch()

    def offer(self, members: Sequence[Member]) -> None:
        """Name the hosts that are there now to Horovod's next question."""
        if self.adds_hosts:
            lines = (f"{member.host}:{member.slots}\n" for member in with_slots(members))
            files.replace(str(self._ready), "".join(lines).encode())

    def process(
        self, members: Sequence[Member], everyone: Sequence[Member], number: int, addresses: Mapping[str, str]
    ) -> Process:
        """horovodrun on these hosts; an elastic one asks for them."""
        members, asked = with_slots(members), self.typed.number
        count = mpirun_command.ranks(asked, members, with_slots(everyone)) or mpirun_command.total(members)
        count = count or asked or 1
        if self.adds_hosts:
            self.offer(members)
            words = elastic_options(self.typed, count, str(self._script), _interface(addresses.values()))
        else:
            words = static_options(count, members)
        size = f"{counted(count, 'process')} on {counted(len(members) or 1, 'host')}"
        logs.say(f"start {number}: horovodrun with {size}")
        self._begin()
        argv = (self.typed.mpirun, *self.typed.kept, *words, *self.typed.program)
        env = horovod_env(self._process.env, self.spec.forward, str(self._bin))
        return replace(self._process, argv=argv, env=env)

    def _hear(self, text: str, stream: int) -> None:
        if text:
            self._report = with_line_of_horovod(self._report, text, is_elastic=self.adds_hosts)
            self._lines.append(text)

    def _last_lines(self) -> Iterable[str]:
        """The lines of the failed rank, or of all: Horovod's own traceback says nothing of the cause."""
        lines = ((rank, text) for rank, text in map(rank_and_text, self._lines) if rank is not None)
        return (text for rank, text in lines if self._report.rank in (rank, None))


def _ssh(access: HostAccess, env: Mapping[str, str]) -> tuple[str, ...]:
    client, port = access.client, access.port
    if client is None:
        program = shutil.which("ssh", path=env.get("PATH")) or "/usr/bin/ssh"
        return (program, *(("-p", str(port)) if port else ()))
    checks = "yes" if client.checks_host_keys else "no"  # horovodrun says no, but the first word stands
    return (*client.ssh, "-F", client.files.client, "-o", f"StrictHostKeyChecking={checks}")


# What is written here stands behind what was typed: of an option that is given twice, the last one counts.


def static_options(number: int, members: Sequence[Member]) -> tuple[str, ...]:
    """Options for these hosts; without any it runs here."""
    hosts = (f"--hosts={hostfile.render_horovod(members)}",) if members else ()
    return (f"--num-proc={number}", *hosts, "--disable-cache")


def elastic_options(typed: Typed, number: int, script: str, interface: str | None) -> tuple[str, ...]:
    """Options to ask `script` for the hosts, each second.

    Horovod looks for a common interface by itself only where two hosts are there, so one is named.
    """
    words = [f"--num-proc={number}", f"--host-discovery-script={script}", "--disable-cache"]
    if typed.names.isdisjoint(MIN_NUMBER):
        words.append(f"--min-num-proc={number}")
    if COOLDOWN not in typed.names:
        words += [f"--{COOLDOWN}", *_COOLDOWN_S]
    if interface is not None and typed.names.isdisjoint(INTERFACES):
        words.append(f"--{INTERFACES[0]}={interface}")
    return tuple(words)


def with_slots(members: Iterable[Member]) -> tuple[Member, ...]:
    """Each host with a number of slots, without which Horovod fails."""
    return tuple(replace(member, slots=member.slots or 1) for member in members)


def horovod_env(given: Mapping[str, str], forward: Sequence[str], bin_folder: str) -> dict[str, str]:
    """The variables of horovodrun, which hands all on in command lines: no secrets; and our ssh."""
    names = but_secrets(given, (*forward, runtime_directory.MPI_RUN))
    ours = {"PATH": f"{bin_folder}:{given.get('PATH') or '/usr/bin:/bin'}"}
    return {**{name: given[name] for name in names}, **ours, "PYTHONUNBUFFERED": "1"}  # its output is read at once


def _interface(addresses: Iterable[str]) -> str | None:
    """The interface of this host that leads to the others: pods of a job have the same."""
    here = network.interfaces()
    names = [name for address in addresses if (name := network.interface_to(address, here))]
    return next((name for name in names if name != "lo"), names[0] if names else None)
