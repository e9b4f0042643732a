"""An MPI job on its hosts: waits for them, starts mpirun, finds out what its end means, and starts it again.

phase    | leaves it when
---------|--------------------------------------------------------------------------------------------------------
WAITING  | all hosts are there, or enough of them for long enough: RUNNING; the time is over: the end
RUNNING  | mpirun has ended: SETTLING
SETTLING | nothing of this start lives any more, and its hosts have answered: WAITING, or the end

mpirun is ended for one reason, the first that is known: a host is lost, others have come or left, a hang. It is
then stopped by the rungs of `Processes`; what a killed mpirun may have left on other hosts is swept. A request to
stop, or a drain, is about what comes after: nothing is started again, whatever mpirun's end meant.

Only ranks that fail by themselves, or hang, cost the budget. Lost hosts, hosts that no daemon could be started on,
and a change of membership cost nothing, but a job that never lasts ends all the same.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.contracts.names import first_label
from trainer_launch.host import deadline_subprocess, logs, runtime_directory
from trainer_launch.host.deadline_subprocess import RunningCommand
from trainer_launch.membership import retry_policy, timeouts
from trainer_launch.model import Death, Failure, Member, Outcome, Process, exit_codes
from trainer_launch.model.errors import EXHAUSTED, UsageError
from trainer_launch.model.signal_policy import STOP_SIGNALS, SignalAction, name_of
from trainer_launch.model.units import counted
from trainer_launch.mpi import host_access, mpirun_command, mpirun_messages, remote_hosts
from trainer_launch.mpi.host_access import HostAccess
from trainer_launch.mpi.hosted_program import Horovodrun, HostedProgram, Mpirun
from trainer_launch.mpi.mpirun_command import Dialect, recognised
from trainer_launch.mpi.mpirun_messages import MpirunEnd
from trainer_launch.mpi.remote_hosts import GATHER_S, HostList, HostWait, Probes, RemoteHosts, Threads
from trainer_launch.planning import mpi_options
from trainer_launch.planning.mpi import spec_of
from trainer_launch.planning.task import Task
from trainer_launch.supervisor import failure
from trainer_launch.supervisor.failure import Evidence
from trainer_launch.supervisor.processes import Processes, Rung
from trainer_launch.supervisor.run_loop import AnyWatch, Due, RunLoop
from trainer_launch.supervisor.run_observer import RunPhase, TimeKind
from trainer_launch.supervisor.system import System

_THREADS = 64
_VERSION_S = 20.0
_VERSION_CHARS = 300
MAX_RESTARTS = 3  # of failed ranks, unless the user says
END_S = 4.0  # for mpirun to end its ranks: it gives them a second or two itself
LINGER_S = 0.5  # for the last of its output, when somebody else still has it open
SWEEP_S = 5.0  # for what a killed mpirun left on other hosts
LAST_SWEEP_S = 2.0  # the same once this pod was asked to stop: PID 1 must end before kubelet's own SIGKILL
EARLY_S = 10.0  # a start that does not last so long is an early end
UNREACHED_S = 600.0  # likewise, where daemons could not be started: none takes so long to fail at it
MAX_EARLY = 10  # early ends in a row that cost no budget; then something else is wrong


class MpiPhase(Enum):
    """Where the job is; see the drawing."""

    WAITING = "waiting"
    RUNNING = "running"
    SETTLING = "settling"


class Preparation(Struct, frozen=True):
    """A job that can begin."""

    access: HostAccess
    hosts: HostList
    threads: Threads
    probes: Probes
    program: HostedProgram

    def begin(self, system: System) -> RemoteHosts:
        """Begin the job. Commands on hosts are no ranks, so they bear no mark."""
        system.mark = runtime_directory.MPI_RUN, self.access.mark
        return RemoteHosts(self.access, self.hosts, self.threads, self.probes, system)


def prepared(task: Task, process: Process) -> Preparation:
    """Make ready what runs `process`, an mpirun or horovodrun, over the job's hosts, and begin to look at them.

    Raises:
        LaunchError: the list of hosts makes no sense, there is no key, no ssh, or no mpirun that is known.
    """
    spec, typed, threads = spec_of(task, process), mpi_options.parse(process.argv), Threads(_THREADS)
    version = None if mpi_options.is_horovodrun(process.argv) else _version_asked(process)
    hosts = HostList(spec, typed)
    access = host_access.prepared(spec, typed, process.env, hosts.members if hosts.exists else None)
    probes = Probes(threads, access.probed_port, over_ssh=not access.is_kubexec)
    if not access.is_kubexec:
        probes.watch(member.host for member in hosts.members)
        probes.tick(time.monotonic())
    if version is None:
        program: HostedProgram = Horovodrun(process, typed, access, hosts.members, threads.wake)
    else:
        program = Mpirun(process, typed, access, _dialect(process, version), threads.wake)
    return Preparation(access, hosts, threads, probes, program)


def _version_asked(process: Process) -> RunningCommand:
    mpirun = process.argv[0]
    try:
        return deadline_subprocess.RunningCommand((mpirun, "--version"), process.env)
    except OSError as problem:
        if problem.errno in EXHAUSTED:
            raise  # a limit of this container, of which the command line says what helps
        raise UsageError(f"{mpirun!r} cannot be run ({problem.strerror}); install an MPI in this image") from None


def _dialect(process: Process, version: RunningCommand) -> Dialect:
    mpirun = process.argv[0]
    version.stop(_VERSION_S)
    ended = version.end()
    dialect = recognised(ended.out + ended.err)
    if dialect is None:
        output = " ".join((ended.out + ended.err).split())[:_VERSION_CHARS]
        elsewhere = mpirun_command.installation(process.env)
        advice = "set --engine plain to run it as it is"
        if elsewhere:
            advice = f"unset what names another installation of MPI: {', '.join(elsewhere)}"
        raise UsageError(
            f"{mpirun} --version says neither Open MPI nor MPICH nor Intel MPI, and ended with exit code "
            f"{ended.code}: {output or 'it printed nothing'}; {advice}"
        )
    return dialect


def _in_each_turn(_now_s: float) -> None:
    """Do nothing: `on_time` and `settle` look at it whenever the loop turns."""


class MpiJob(RunLoop):
    """The run of an mpirun, or of a horovodrun, on the job's hosts."""

    def __init__(
        self,
        processes: Processes,
        program: HostedProgram,
        hosts: RemoteHosts,
        watch: AnyWatch | None,
        failed: Callable[[Failure, str], None] = lambda failure, process: None,
    ) -> None:
        """`watch` looks for hangs of the program here; `failed` is called with the failure that ends the job."""
        super().__init__(processes, watch)
        self._program, self._hosts, self._failed = program, hosts, failed
        restarts = program.spec.task.topology.max_restarts
        self._wait = HostWait(program, hosts)
        self._max_restarts = MAX_RESTARTS if restarts is None else restarts
        self.phase = MpiPhase.WAITING
        self._members = self._hosts.members
        self._starts = 0
        self._failures = 0  # that cost the budget
        self._before: Death | None = None  # the failure before, if it came soon after its start
        self._early = 0  # starts in a row that did not last, and cost nothing
        self._forget_start()
        self._cause: Death | None = None  # the failure that ended the job

    def _forget_start(self) -> None:
        self._running: tuple[Member, ...] = ()  # on which mpirun was started
        self._start_s = self._system.now()
        self._admit_at_s: float | None = None  # when hosts that have come are let in
        self._lost: str | None = None  # the host for which mpirun is ended
        self._hang: Death | None = None  # for which it is
        self._is_resized = False  # it is ended for another membership
        self._asked: tuple[str, ...] = ()  # hosts that have to show that they are there, after mpirun's end
        self._ask_until_s = 0.0
        self._sweep_until_s = 0.0
        self._death: Death | None = None  # mpirun's own

    def close(self) -> None:
        """End what goes on with the hosts."""
        self._hosts.close()

    def begin(self, now_s: float) -> None:
        """Wait for the hosts."""
        self._wait_for_hosts(now_s)

    def due(self) -> Iterator[Due]:
        """What is due, but for what `Processes` does."""
        yield self._hosts.due_s, _in_each_turn
        if self._processes.is_running and not self._processes.is_draining:
            yield self._admit_at_s, self._admit
        yield from super().due()
        if self.phase is MpiPhase.WAITING:
            yield self._wait.due_s, _in_each_turn
        elif self._death is not None:
            bounds = (self._death.at_s + LINGER_S, self._sweep_until_s, self._ask_until_s)
            yield from ((at_s, _in_each_turn) for at_s in bounds if at_s > self._system.now())

    def on_time(self, now_s: float) -> None:
        """Do what is due, and take in what was found out of the hosts."""
        self._hosts.tick(now_s)
        self._on_hosts(now_s)
        if self._program.lost is not None and self.phase is MpiPhase.RUNNING:
            self._on_lost(self._program.lost, now_s)
        super().on_time(now_s)

    def on_child(self, pid: int, status: int, now_s: float) -> None:
        """mpirun has ended, or a command on a host; orphans concern nobody."""
        death = None if self._hosts.reaped(pid, status) else self._processes.reaped(pid, status, now_s)
        if death is not None:
            self.on_end(death, now_s)

    def on_hang(self, hang: Death, now_s: float) -> None:
        """End the hanging program, politely at first: a part of it may still be able to save."""
        self._hang = hang
        self._observer.tell("hung", text=hang.message)
        self._processes.stop(now_s, grace_s=END_S)

    @property
    def is_decided(self) -> bool:
        """Whether the job had succeeded before a request to stop came, or hung and may not start again."""
        if self._hang is not None and retry_policy.why_spent(self._failures, self._max_restarts) is not None:
            return True
        is_cut_short = self._is_ended_by_us or self._lost_host is not None
        return self._death is not None and self._death.exit_code == 0 and not is_cut_short

    def tell_ranks(self, number: int, action: SignalAction) -> bool:
        """Ranks have a signal first, each on its own host; mpirun hands on what it does not take for a request."""
        asks = action is SignalAction.TERMINATE
        if asks or action is SignalAction.DRAIN:
            self._program.stopping()
        is_handed_on = self._program.hands_signals_on and number not in STOP_SIGNALS
        if not self._processes.is_running if asks else is_handed_on:
            return False
        if self.phase is MpiPhase.RUNNING:
            hosts = [member.host for member in self._running]
            self._hosts.tell_ranks(hosts, name_of(signal.SIGTERM if asks and number != signal.SIGINT else number))
        return True

    def _on_hosts(self, now_s: float) -> None:
        """Take in what is known of the hosts."""
        if self._hosts.members != self._members:
            self._on_list(now_s)
        if self._hosts.probes.take_changed():
            ready = remote_hosts.ready(self._hosts.probes.readiness)
            self._program.offer([member for member in self._members if member.host in ready])
            if self.phase is MpiPhase.RUNNING:
                self._look_for_others(now_s)

    def _on_list(self, now_s: float) -> None:
        """Hosts have been added to the job, or removed from it."""
        self._members = self._hosts.members
        logs.warn(f"the list of hosts has changed: {counted(len(self._members), 'host')} now")
        self._hosts.watch(self._members, check_keys=self._wait.checks_keys)
        if not self._processes.is_running or self._program.adds_hosts or self._processes.is_draining:
            return
        self._hosts.probes.rest()
        left, least = self._left(), self._program.least_hosts
        if left and least is not None and len(self._running) - len(left) >= least:
            self._resize(f"{', '.join(sorted(left))} left the job", now_s)

    def _left(self) -> set[str]:
        """The hosts of this start that belong to the job no more."""
        return {member.host for member in self._running} - {member.host for member in self._members}

    def _on_lost(self, name: str, now_s: float) -> None:
        """mpirun, or its ssh, says that a host is lost. Open MPI then ends its ranks by itself, within a while."""
        host = self._host_named(name)
        if self._program.adds_hosts:
            self._program.forget_lost()
            self._hosts.watch(self._members, () if host is None else (host,))
        elif self._processes.is_running and host is not None:
            self._lost = host
            logs.warn(f"{name} is lost; ending the ranks on all hosts")
            self._processes.stop(now_s, Rung.RANKS if self._program.ends_itself else Rung.LEADERS, END_S)

    @property
    def _lost_host(self) -> str | None:
        """The host that is lost; of that alone Open MPI 5 may end with 0."""
        return self._lost or (self._host_named(self._program.lost) if self._program.lost else None)

    def _host_named(self, name: str) -> str | None:
        """The host of this start by its name, of which mpirun may have cut the domain off."""
        hosts, short = [member.host for member in self._running], first_label(name)
        return name if name in hosts else next((h for h in hosts if first_label(h) == short), None)

    def _look_for_others(self, now_s: float) -> None:
        """While mpirun runs: hosts that would be in the job if it started now are let in after a while."""
        there = self._wait.there()
        if self._program.adds_hosts:
            self._running = there
            return
        before = {member.host for member in self._running}
        has_others = len(there) > len(before) and any(member.host not in before for member in there)
        if not has_others:
            self._admit_at_s = None
        elif self._admit_at_s is None:
            self._admit_at_s = now_s + GATHER_S

    def _admit(self, now_s: float) -> None:
        """The job is interrupted for hosts that have come."""
        before = {member.host for member in self._running}
        come = ", ".join(member.host for member in self._wait.there() if member.host not in before)
        self._resize(f"{come} joins; restarting the ranks on all hosts", now_s)

    def _wait_for_hosts(self, now_s: float, *afresh: str, lost: str | None = None) -> None:
        self.phase = MpiPhase.WAITING
        self._forget_start()
        self._wait.begin(now_s, *afresh, lost=lost)
        self._start_or_wait(now_s)

    def _resize(self, why: str, now_s: float) -> None:
        """Let mpirun end its ranks, for another membership."""
        self._is_resized = True
        logs.warn(why)
        self._processes.stop(now_s, grace_s=END_S)

    def _start_or_wait(self, now_s: float) -> None:
        if self._stop_signal is not None:
            self._note = f"it was waiting: {self._wait.who_is_missing()}".removesuffix("; missing: ")
            self._finish(None)
            return
        chosen = self._wait.chosen(now_s)
        if chosen is not None:
            self._start(chosen)
        elif self._wait.is_late(now_s):
            self._give_up(self._wait.who_is_missing())

    def _start(self, members: tuple[Member, ...]) -> None:
        wanted = self._wait.wanted()
        if len(members) < len(wanted):
            absent = ", ".join(member.host for member in wanted if member not in members)
            logs.warn(f"continuing with {len(members)} of {len(wanted)} hosts, without {absent}")
        self._wait.end()
        self._forget_start()
        self.phase, self._running = MpiPhase.RUNNING, members
        self._starts += 1
        if not self._program.adds_hosts:
            self._hosts.probes.rest()
        process = self._program.process(members, self._members, self._starts, self._hosts.probes.addresses)
        for unstarted in self._processes.start([process]):
            self._finish(unstarted)

    def on_end(self, death: Death, now_s: float) -> None:
        """mpirun has ended. Its hosts are asked who is there, if that could matter."""
        self.phase, self._death, self._evidence = MpiPhase.SETTLING, death, self._system.look()
        hosts = tuple(member.host for member in self._running if member.host != self._lost)
        has_failed = death.exit_code != 0 or self._is_ended_by_us
        if self._processes.rung >= Rung.ALL or (has_failed and self._program.leaves_ranks and not self._is_last):
            self._sweep_until_s = now_s + (LAST_SWEEP_S if self._is_last else SWEEP_S)
            self._hosts.sweep(hosts)
        if hosts and has_failed and not self._is_last:
            self._asked, self._ask_until_s = hosts, now_s + self._hosts.ask_s
            self._hosts.ask(hosts)

    @property
    def _is_last(self) -> bool:
        """Whether nothing is started again."""
        return self._processes.asked > 0 or self._processes.is_draining

    def settle(self, now_s: float) -> None:
        """Nothing of a start lives any more, and all that its end meant can be known."""
        if self.phase is MpiPhase.WAITING:
            self._start_or_wait(now_s)
        elif self.phase is MpiPhase.RUNNING and self._processes.is_over:  # SIGKILL has not ended it
            self.on_end(Death(process=self._program.name, signal=signal.SIGKILL, at_s=now_s), now_s)
        death = self._death
        if self.phase is not MpiPhase.SETTLING or death is None or not self._has_settled(death, now_s):
            return
        end, lost = self._program.end(death), self._lost_host
        if self._stop_signal is not None or (death.exit_code == 0 and not self._is_ended_by_us and lost is None):
            self._finish(None)
            return
        missing = self._hosts.gone(self._asked)
        if lost is not None:
            missing.setdefault(lost, "mpirun has lost it")
        left = self._left()  # they are missing because they left the job
        missing = {host: why for host, why in missing.items() if host not in left}
        lasted_s, stuck = death.at_s - self._start_s, self._stuck
        nobody_failed = self._hang is None and (missing or self._is_resized or left or end.is_unreached)
        if stuck and nobody_failed:
            self._give_up(f"{stuck}; mpirun is not started again beside it")
        elif missing and not stuck and not self._is_last:
            self._on_missing(missing, lost, lasted_s, now_s)
        elif self._hang is not None:
            self._on_failure(self._hang, None, now_s)
        elif self._is_resized or left:
            self._wait_for_hosts(now_s)
        elif end.is_unreached:
            self._on_unreached(end, lasted_s, now_s)
        else:
            self._on_failed_rank(end, lasted_s, now_s)

    @property
    def _stuck(self) -> str:
        """The processes that SIGKILL has not ended, in words; "": there are none."""
        stuck = self._processes.stuck()
        return f"{', '.join(stuck)} did not end after SIGKILL" if stuck else ""

    @property
    def _is_ended_by_us(self) -> bool:
        return self._lost is not None or self._hang is not None or self._is_resized

    def _has_settled(self, death: Death, now_s: float) -> bool:
        if not self._processes.is_over or (not self._program.is_quiet and now_s < death.at_s + LINGER_S):
            return False
        if self._hosts.sweeps and now_s < self._sweep_until_s:
            return False
        return self._is_last or now_s >= self._ask_until_s or not self._hosts.is_pending(self._asked)

    def _on_missing(self, missing: dict[str, str], lost: str | None, lasted_s: float, now_s: float) -> None:
        if self._is_endless(f"lost {', '.join(missing)}", is_early=lasted_s < EARLY_S):
            return
        text = "; ".join(f"{host} is lost ({why})" for host, why in sorted(missing.items())[:5])
        logs.warn(f"{text}; start {self._starts} ended; this costs no restart")
        self._wait_for_hosts(now_s, *missing, lost=lost)

    def _on_unreached(self, end: MpirunEnd, lasted_s: float, now_s: float) -> None:
        """No daemon could be started somewhere: the hosts have to let us in before it is tried again."""
        where = f" on {end.report.unreached}" if end.report.unreached else ""
        text = f"mpirun could not start its daemon{where}: {end.report.words}"
        if self._is_endless(text, is_early=lasted_s < UNREACHED_S):
            return
        logs.warn(f"{text}; waiting until all hosts accept the job's key")
        self._wait.checks_keys = True
        self._wait_for_hosts(now_s, *(member.host for member in self._members))

    def _is_endless(self, why: str, *, is_early: bool) -> bool:
        """Give up a job whose starts cost no budget but never last; whether it was given up."""
        self._early = self._early + 1 if is_early else 0
        if self._early < MAX_EARLY:
            return False
        self._give_up(f"{why}, and {self._early} starts in a row did not last")
        return True

    def _on_failed_rank(self, end: MpirunEnd, lasted_s: float, now_s: float) -> None:
        """Ranks failed by themselves: this costs the budget, unless a restart will not help."""
        end = mpirun_messages.first_failure(end)
        death, is_early = mpirun_messages.death_of(end, self._starts), lasted_s < timeouts.START_S
        if death.rank is not None and death.host is None and self._running:
            death = replace(death, host="")  # on one of these hosts, and not known to be this pod
        if death.message and death.reason in ("Misconfigured", "NotRunnable"):
            death = replace(death, message=self._program.explained(death.message, self._running))
        started = self._program.typed.program if is_early else ()
        death = failure.with_symptom(death, Evidence(last_lines=end.lines), started=started)
        why = retry_policy.why_not_again(death, self._before, is_early=is_early)
        self._before = death if is_early else None
        self._on_failure(death, why, now_s)

    def _on_failure(self, death: Death, why_not: str | None, now_s: float) -> None:
        """A failure that costs the budget; `why_not` tells why a restart cannot help."""
        why_not = why_not or self._stuck or None
        spent = retry_policy.why_spent(self._failures, self._max_restarts)
        text = self.classified(death).message + (f" (on {death.host})" if death.host else "")
        if why_not is not None or spent is not None:
            shown = why_not or (spent if self._max_restarts else None)  # who allows no restart needs no reason
            reason = f"not restarted, because {shown}" if shown else None
            logs.warn(f"{text}; {reason}" if reason else text)
            self._finish(replace(death, why_not_again=reason))
            return
        self._failures += 1
        logs.warn(f"{text}; restart {self._failures} of {self._max_restarts}")
        self._observer.tell("restarting", restart=self._failures, restarts_at_most=self._max_restarts)
        self._system.clean()
        self._wait_for_hosts(now_s)

    def _give_up(self, text: str) -> None:
        """End because hosts are missing."""
        self._finish(
            Death(process=self._program.name, code=exit_codes.INFRASTRUCTURE, reason="PeerLost", message=text)
        )

    def _finish(self, cause: Death | None) -> None:
        self.is_done, self._cause = True, cause
        if cause is not None:
            self._failed(self.classified(cause), self._program.name)

    def _observe(self) -> None:
        phases = {MpiPhase.RUNNING: self._processes.phase, MpiPhase.SETTLING: RunPhase.CLEARING}
        phase = RunPhase.DONE if self.is_done else phases.get(self.phase, RunPhase.WAITING)
        self._observer.enter(phase, self._time_kind(), self._hang.at_s if self._hang is not None else None)

    def _time_kind(self) -> TimeKind:
        """The use of the seconds from now on."""
        if self._stop_signal is not None or self.is_done:
            return TimeKind.ENDING
        if self.phase is MpiPhase.WAITING:
            return TimeKind.WAITING
        return TimeKind.TRAINING if self._processes.is_running else TimeKind.STOPPING

    def outcome(self) -> Outcome:
        """How it ended, and why."""
        death, cause = self._death, self._cause
        if self._stop_signal is not None:  # how it took the request is worth a word when it did not leave with 0
            cause = death if death is not None and death.exit_code != 0 else None
        failure = None if cause is None else self.classified(cause)
        return self.ended(failure, self._starts, well=self._cause is None)
