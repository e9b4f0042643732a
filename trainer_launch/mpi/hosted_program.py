"""mpirun as the job starts it, again and again; what it says is listened to on its way to our own output."""

from __future__ import annotations

import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from trainer_launch.host import executables, files, logs, runtime_directory
from trainer_launch.model import Death, Destination, Member, Process
from trainer_launch.model.errors import NodeError
from trainer_launch.model.units import counted
from trainer_launch.mpi import mpirun_command, mpirun_messages, rank_environment
from trainer_launch.mpi.host_access import HostAccess
from trainer_launch.mpi.mpirun_command import Dialect
from trainer_launch.mpi.mpirun_messages import MpirunEnd, Said, heard
from trainer_launch.planning import mpi_options
from trainer_launch.planning.mpi_options import Typed

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


class HostedProgram(ABC):
    """A program that runs ranks on the job's hosts: its command, and what it says."""

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
        self.typed, self._access, self._streams, self._wake = typed, access, frozenset(streams), wake
        env = {**process.env, runtime_directory.MPI_RUN: access.mark}
        self._process = replace(process, env=env, streams=dict.fromkeys(streams, Destination()))
        self.least_hosts = access.spec.min_hosts
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
        """What is started for the `number`th time on these hosts of all, found at these addresses.

        Raises:
            NodeError: the list of hosts cannot be written.
        """

    def stopping(self) -> None:  # noqa: B027 - most need nothing
        """Nothing new is to be started on any host."""

    def offer(self, members: Sequence[Member]) -> None:  # noqa: B027
        """These hosts are there."""

    def _begin(self) -> None:
        """Forget what the last start has said."""
        with self._lock:
            self._said = Said()
            self._open = set(self._streams)
            self._rests = dict.fromkeys(self._streams, b"")
            self._lines: deque[str] = deque(maxlen=_LAST_LINES)

    def hear(self, process: str, stream: int, data: bytes) -> None:
        """Take in what was written, b"" at its end; in the output's thread."""
        if stream not in self._streams or process != self.name:
            return
        with self._lock:
            lost = self._said.lost
            *lines, rest = (self._rests[stream] + data).split(b"\n")
            self._rests[stream] = rest[-_LINE_BYTES:]
            for line in lines if data else [rest]:
                self._hear(line[:_LINE_BYTES].decode(errors="replace").rstrip(), stream)
            if not data:
                self._open.discard(stream)
            is_news = not data or self._said.lost != lost
        if is_news:
            self._wake()

    @property
    def lost(self) -> str | None:
        """The host that it says it has lost, by its name."""
        return self._said.lost

    def forget_lost(self) -> None:
        """It goes on without that host."""
        with self._lock:
            self._said = replace(self._said, lost=None)

    @property
    def is_quiet(self) -> bool:
        """Whether all that it had to say was heard."""
        return not self._open

    def end(self, death: Death, members: Sequence[Member]) -> MpirunEnd:
        """How it ended on these hosts, with what it has said."""
        with self._lock:
            end = MpirunEnd(death, self._said, tuple(self._last_lines())[-_KEPT_LINES:], self.is_hydras)
        # Open MPI 4 gives ranks of this host the first numbers, wherever the list has it.
        has_own = any(self._access.is_own(member.host) for member in members)
        fills_slots = not has_own and mpi_options.fills_slots(self.typed, self._process.env)
        return mpirun_messages.located(end, members) if fills_slots else end

    def explained(self, refusal: str, members: Sequence[Member]) -> str:
        """A refusal of mpirun's own, with numbers and an option, or why this host cannot run the program."""
        if "not enough slots" in refusal:
            slots, cpus = mpirun_command.total(members), self._access.spec.task.host.cpus.affinity
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
        """Of what it said, what tells the cause of its end."""
        return self._lines


class Mpirun(HostedProgram):
    """mpirun; Hydra says on stdout how ranks ended, and does not care when its ssh has lost a host."""

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
        access, spec = self._access, self._access.spec
        path = f"{spec.task.trial.scratch}/{runtime_directory.HOSTFILE}"
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
        self._said = heard(self._said, text)
        if text and stream == _STDERR and not text.startswith(_RULER):
            self._lines.append(text)


def _stray_variable(env: Mapping[str, str]) -> str:
    """One by which mpirun would ask a resource manager of which there is neither a program nor a list; "": none."""
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
