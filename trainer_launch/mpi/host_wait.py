"""The wait for the hosts of the next start: for all, or after a patience for as many as the minimum says."""

from __future__ import annotations

from trainer_launch.model import Member
from trainer_launch.model.units import counted, listed
from trainer_launch.mpi import host_readiness
from trainer_launch.mpi.host_readiness import WaitLog
from trainer_launch.mpi.hosted_program import HostedProgram
from trainer_launch.mpi.remote_hosts import RemoteHosts
from trainer_launch.planning.mpi import Spec

GATHER_S = 3.0  # for other hosts to come too, before the job is started without them or interrupted for one
_SHOWN = 8  # hosts that one sentence names


class HostWait:
    """Who is there, of those that the job is for, and how long the others are waited for."""

    def __init__(self, spec: Spec, program: HostedProgram, hosts: RemoteHosts) -> None:
        self._program, self._hosts = program, hosts
        self._max_hosts, task = spec.max_hosts, spec.task
        self._limit_s = float(task.settings.wait_timeout)
        self._shrink_s = task.shrink_after_s
        self.checks_keys = False  # hosts have to let us in
        self._lost: str | None = None  # the host that the job has lost
        self._until_s = 0.0
        self._is_first = True  # nothing was started yet
        self._there: tuple[Member, ...] = ()
        self._same_since_s = 0.0  # since when the same hosts are there
        self._log = WaitLog()

    def begin(self, now_s: float, *afresh: str, lost: str | None = None) -> None:
        """Wait; those `afresh` have to show that they are there again."""
        self._until_s = now_s + self._limit_s
        self._there, self._same_since_s, self._lost = (), now_s, lost
        self._log.restart()
        self._hosts.watch(self._hosts.members, afresh, check_keys=self.checks_keys)

    def end(self) -> None:
        """The hosts have been taken."""
        self._is_first = False
        self._log.restart()

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
        return min(self._until_s, shrink_s, self._log.due_s or self._until_s)

    def is_late(self, now_s: float) -> bool:
        """Whether the time is over; tells from time to time who is missing."""
        self._log.say(self._hosts.readiness, now_s)
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
        """Who could run the job: of those that are ready the first, so that ranks keep their order."""
        ready = host_readiness.ready(self._hosts.readiness)
        return tuple(member for member in self._hosts.members if member.host in ready)[: self._max_hosts]

    def who_is_missing(self) -> str:
        """In words, with the stage that each host is stuck at."""
        wanted, why = self.wanted(), host_readiness.stuck(self._hosts.readiness)
        absent = [member.host for member in wanted if member.host in why]
        shown = listed([f"{host}: {why[host]}" for host in absent], _SHOWN, "; ")
        what = f"{self._lost} did not come back: " if self._lost in absent else ""
        return f"{what}{len(wanted) - len(absent)} of {counted(len(wanted), 'host')} ready; missing: {shown}"
