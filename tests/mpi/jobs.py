"""An MPI job whose operating system and hosts are not there, for whole jobs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from msgspec.structs import replace

from tests.planning.requests import given, request
from tests.supervisor.fakes import FakeSystem, Program
from trainer_launch.model import Death, Job, Member, Outcome, Process
from trainer_launch.mpi.host_access import HostAccess
from trainer_launch.mpi.hosted_program import HostedProgram, Mpirun
from trainer_launch.mpi.mpi_job import MpiJob
from trainer_launch.mpi.mpirun_command import OPEN_MPI, Dialect
from trainer_launch.mpi.remote_hosts import HostStage, Readiness, RemoteHosts
from trainer_launch.planning import engines, mpi_options
from trainer_launch.planning.mpi import spec_of
from trainer_launch.supervisor.processes import Processes
from trainer_launch.supervisor.run_observer import RunObserver

READY = Readiness(HostStage.READY, "")
REFUSED = Readiness(HostStage.PORT, "Connection refused")
LOST = "  Remote daemon: [[40304,0],2] on node {}\n"


class Life(NamedTuple):
    """One start of mpirun, and what it says before it ends."""

    program: Program = Program()
    says: str = ""


def rank_1(code: int, *lines: str, after_s: float = 60.0) -> Life:
    """Rank 1 fails, and mpirun says so."""
    said = "".join(f"{line}\n" for line in lines)
    text = f"{said}  Process name: [[40304,1],1]\n  Exit code:    {code}\n"
    return Life(Program(ends_s=after_s, code=code), text)


def unreached(words: str, after_s: float = 1.0) -> Life:
    """No daemon could be started."""
    return Life(Program(ends_s=after_s, code=255), f"{words}\n")


def loses(host: str, after_s: float = 60.0, program: Program | None = None) -> Life:
    """mpirun loses a host, and ends its ranks."""
    return Life(program or Program(ends_s=after_s, code=205), LOST.format(host))


class MpiSystem(FakeSystem):
    """One on which mpirun says what each of its lives has to say."""

    def __init__(self, lives: Iterable[Life]) -> None:
        self._mpiruns = list(lives)
        super().__init__({"mpirun": [life.program for life in self._mpiruns]})
        self.program: HostedProgram | None = None
        self.hostfiles: list[str] = []  # of all starts

    def listen(self, fd: int, *, wanted: bool = True) -> None:
        """There is nothing to hear."""

    def spawn(self, process: Process, prepare: Any = None) -> int:
        if "--hostfile" in process.argv:
            self.hostfiles.append(Path(process.argv[process.argv.index("--hostfile") + 1]).read_text())
        life, program = self._mpiruns.pop(0) if self._mpiruns else Life(), given(self.program)
        if life.says:
            at_s = self.clock_s + (life.program.ends_s or 60.0)
            self.at(at_s + 0.01, lambda: program.hear("mpirun", 2, life.says.encode()))
        pid: int = super().spawn(process, prepare)
        return pid


class FakeHosts:
    """Hosts that are there, or not; everything asked of them is answered at once."""

    has_list, ask_s, due_s, sweeps = True, 1.5, None, 0

    def __init__(self, system: MpiSystem, members: tuple[Member, ...], away: Collection[str]) -> None:
        self._system, self.members = system, members
        self._away = set(away)
        self._watched: list[str] = []
        self._is_changed = False
        self.addresses: dict[str, str] = {}
        self.checks_keys = False
        self.hanging: set[str] = set()  # hosts on which a sweep does not end

    def come(self, *names: str) -> None:
        self._away -= set(names)
        self._is_changed = True

    def leave(self, *names: str) -> None:
        """They are lost; mpirun may not know."""
        self._away |= set(names)

    def list(self, *names: str) -> None:
        self.members = tuple(Member(name, 1) for name in names)

    @property
    def probes(self) -> FakeHosts:
        return self

    @property
    def readiness(self) -> dict[str, Readiness]:
        return {host: REFUSED if host in self._away else READY for host in self._watched}

    def tick(self, now_s: float) -> None:
        pass

    def take_changed(self) -> bool:
        changed, self._is_changed = self._is_changed, False
        return changed

    def watch(self, hosts: Iterable[Member], afresh: Iterable[str] = (), *, check_keys: bool = False) -> None:
        self._watched, self._is_changed, self.checks_keys = [m.host for m in hosts], True, check_keys
        self._system._note("look afresh", *sorted(afresh))

    def rest(self) -> None:
        pass

    def ask(self, hosts: Iterable[str]) -> None:
        self._system._note("ask", *hosts)

    def is_pending(self, hosts: Iterable[str]) -> bool:
        return False

    def gone(self, hosts: Iterable[str]) -> dict[str, str]:
        return {host: str(REFUSED) for host in hosts if host in self._away}

    def reaped(self, pid: int, status: int) -> bool:
        return False

    def tell_ranks(self, hosts: Collection[str], name: str) -> None:
        self._system._note("tell", *hosts, name)

    def sweep(self, hosts: Collection[str]) -> None:
        self._system._note("sweep", *hosts)
        self.sweeps += len(self.hanging & set(hosts))

    def close(self) -> None:
        self._system._note("close")


class HangsAt:
    """A watch that finds a hang at these times."""

    def __init__(self, times: Sequence[float]) -> None:
        self._times = [*times, math.inf]
        self.due_s = self._times.pop(0)

    def look(self, now_s: float) -> Death | None:
        self.due_s = self._times.pop(0)
        return Death(reason="Hung", message="rank 1 hangs", at_s=now_s)


class MpiRun:
    """One job from its begin to its end."""

    def __init__(
        self,
        folder: Path,
        names: str,
        *lives: Life,
        away: str = "",
        restarts: int = 3,
        min_hosts: int | None = None,
        max_hosts: int | None = None,
        **options: Any,
    ) -> None:
        """`options` are settings, and `hangs`: when the watch finds one."""
        hangs = options.pop("hangs", ())
        self.system = MpiSystem(lives)
        members = tuple(Member(name, 1) for name in names.split())
        task = request("mpirun x", Job(contract="c", max_restarts=restarts), scratch=str(folder), **options)
        plan = engines.plan(task)
        spec = replace(spec_of(task, plan.processes[0]), min_hosts=min_hosts, max_hosts=max_hosts)
        self.hosts = FakeHosts(self.system, members, away.split())
        access = HostAccess(spec=spec, env={}, mark="mark", client=None, own_ssh=None, port=None, probed_port=22)
        typed = mpi_options.parse(plan.processes[0].argv)
        self.program = self.system.program = Mpirun(
            plan.processes[0], typed, access, Dialect(OPEN_MPI, 4), lambda: None
        )
        self.processes = Processes(plan, self.system, RunObserver())
        self.job = MpiJob(self.processes, self.program, cast(RemoteHosts, self.hosts), HangsAt(hangs))

    def run(self) -> Outcome:
        return self.job.run()

    @property
    def starts(self) -> list[str]:
        """The hosts of each start."""
        return [" ".join(line.split()[0] for line in text.splitlines()) for text in self.system.hostfiles]

    def did(self, word: str) -> list[tuple[object, ...]]:
        """When something was done, and with what."""
        return [(call[0], *call[2:]) for call in self.system.calls if call[1] == word]

    def asked(self, number: int) -> list[float]:
        """When mpirun was given this signal."""
        return [call[0] for call in self.did("leader") if call[2] == number]  # type: ignore[misc]

    @property
    def killed_at(self) -> list[float]:
        return [call[0] for call in self.did("all again") if call[1] == 9]  # type: ignore[misc]
