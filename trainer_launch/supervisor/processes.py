"""Processes that are started and stopped together: torch workers, mpirun, torchrun, any program.

A generation is what was started since `begin`. The processes that were started are its leaders. They are known by
pid: an orphan, or a process of an earlier generation, means nothing here. A generation ends by rungs:

RANKS    for mpirun only: its ranks, which run on other hosts, were told, and have most of the grace
LEADERS  the leaders have the plan's stop signal, or SIGINT from a person's Ctrl-C, and most of the grace
ALL      everything below us has SIGTERM, and the rest of the grace
KILL     everything below us has SIGKILL, again and again; what does not end is named, and given up

Every rung has a deadline, at which `tick` climbs; every request to stop after the first one climbs, too, and a
Ctrl-C to KILL. Once the last leader has ended, whatever the leaders have left behind is on rung ALL, with a short
grace. `is_over` tells that nothing of the generation lives any more. What comes of that is decided by `ProgramLoop`
for any program, and by `TorchNode` for torch workers.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum

from trainer_launch.host.process_tree import ProcessEntry
from trainer_launch.model import Death, Plan, Process
from trainer_launch.model.errors import InternalError, NotRunnableError
from trainer_launch.model.signal_policy import SignalAction, signal_name
from trainer_launch.model.units import counted
from trainer_launch.supervisor.run_observer import RunObserver, RunPhase
from trainer_launch.supervisor.system import System

LEAVE_S = 10.0  # for leaders that are not to be stopped to leave what they wait for
CLEAR_S = 2.0  # between SIGTERM and SIGKILL for what an ended leader has left behind
KILL_AGAIN_S = 0.1  # first interval between two rounds of SIGKILL, then doubled
KILL_S = 10.0  # after the first SIGKILL, until what still lives is given up: a process may free much memory
LAST_KILL_S = 3.0  # the same once this pod was asked to stop: PID 1 must end before kubelet's own SIGKILL
ASK_EVERY_S = 0.25  # whether daemons are alone by now
log = logging.getLogger(__name__)


class Rung(IntEnum):
    """How far stopping has come."""

    NONE = 0
    RANKS = 1
    LEADERS = 2
    ALL = 3
    KILL = 4


# The share of the grace after which the next rung begins; daemons are not asked before that of the leaders.
_SHARES = {Rung.RANKS: 0.7, Rung.LEADERS: 0.8, Rung.ALL: 1.0}


class Processes:
    """The processes of the present generation, and how they are stopped."""

    def __init__(self, plan: Plan, system: System, observer: RunObserver) -> None:
        self.plan, self.system, self.observer = plan, system, observer
        self.asked = 0  # requests to stop, in all generations
        self.is_draining = False  # nothing is started again
        self._stuck: dict[tuple[int, int], ProcessEntry] = {}  # what SIGKILL has not ended, of all generations
        self.is_over = True
        self.kept: dict[int, Process] = {}  # that outlive their generation, by pid: no signal to all reaches them
        self._forget()

    def _forget(self) -> None:
        self.rung = Rung.NONE
        self._stop_signal = self.plan.stop_signal
        self.relayed: set[int] = set()  # signals that the leaders were given unchanged
        self._have_stop_signal = False  # the leaders, which were told to drain by it
        self._alive: dict[int, Process] = {}
        self._ended: dict[int, float] = {}  # ended leaders, and when what they left behind gets SIGKILL
        self._untold: list[int] = []  # those of them whose leftovers have not had SIGTERM yet
        self._spared: frozenset[str] = frozenset()  # leaders that were asked in another way
        self._is_clearing = False  # the last leader has ended
        self._grace_s = self.plan.grace_s
        self._kill_at_s: float | None = None  # the end of the grace
        self._climb_at_s: float | None = None  # the deadline of this rung
        self._again_at_s: float | None = None  # when this rung's signal is sent again
        self._again_every_s = KILL_AGAIN_S

    def begin(self) -> None:
        """Begin a generation; whatever still lives belongs to an earlier one."""
        if not self.is_over:
            raise InternalError("a generation was begun while another one lives")
        self._forget()
        self.system.begin_start()
        self.is_over = False

    def add(self, process: Process, pid: int) -> None:
        """Take a process that was started into this generation."""
        self._alive[pid] = process
        self.observer.tell("spawned", process=process.name, pid=pid)

    def kill(self, name: str) -> None:
        """End one leader that lives."""
        for pid in [pid for pid, process in self._alive.items() if process.name == name]:
            self.system.signal_leader(pid, signal.SIGKILL)

    def keep(self, name: str) -> None:
        """A process of this generation waits for the next one."""
        pid = self.pids()[name]
        self.kept[pid] = self._alive.pop(pid)
        self.system.keep(pid)

    def take(self, pid: int, process: Process) -> None:
        """A process that was kept is one of this generation."""
        del self.kept[pid]
        self.system.forget(pid)
        self._alive[pid] = process

    def take_back(self) -> bool:
        """No generation follows: those that were kept are to be stopped as others are; whether there were any."""
        kept, self.kept = self.kept, {}
        for pid in kept:
            self.system.forget(pid)
        if kept:
            alive = self._alive | kept
            self._forget()
            self._alive, self.is_over = alive, False
        return bool(kept)

    def start(self, specs: Sequence[Process]) -> list[Death]:
        """Begin a generation of these; the deaths of those that could not be started."""
        self.begin()
        deaths = self.spawn(specs)
        for name, pid in self.pids().items():
            log.info("started %s as pid %d", name, pid)
        return deaths

    def spawn(self, specs: Sequence[Process], prepare: Callable[[], None] | None = None) -> list[Death]:
        """Start these, each with `prepare` before its program; the deaths of those that could not be started."""
        deaths = []
        for process in specs:
            try:
                self.add(process, self.system.spawn(process, prepare))
            except NotRunnableError as error:  # noqa: PERF203  the others are started, and ended again
                code, why = error.exit_code, str(error)
                log.error("%s", why)
                self.observer.tell("spawn_failed", process=process.name, exit_code=code, text=why)
                at_s = self.system.now()
                deaths.append(Death(process=process.name, code=code, at_s=at_s, message=why, reason="NotRunnable"))
        return deaths

    def pids(self) -> dict[str, int]:
        """The leaders that live, by the names of their processes."""
        return {process.name: pid for pid, process in self._alive.items()}

    @property
    def is_running(self) -> bool:
        """Whether leaders live that nobody has asked to end."""
        return bool(self._alive) and self.rung is Rung.NONE

    @property
    def phase(self) -> RunPhase:
        """Where this generation is."""
        if self.rung is Rung.KILL:
            return RunPhase.KILLING
        if self._is_clearing or not self._alive:
            return RunPhase.CLEARING
        return RunPhase.RUNNING if self.rung is Rung.NONE else RunPhase.STOPPING

    def stuck(self) -> tuple[str, ...]:
        """The processes of all generations that SIGKILL has not ended, as far as they still live."""
        return tuple(str(entry) for entry in self.system.left() if entry.key in self._stuck) if self._stuck else ()

    def reaped(self, pid: int, status: int, now_s: float) -> Death | None:
        """A child has ended; None for an orphan, or for a process of an earlier generation."""
        process = self._alive.pop(pid, None) or self.kept.pop(pid, None)
        if process is None:
            return None
        code, number = (None, -status) if status < 0 else (status, None)
        death = Death(process=process.name, code=code, signal=number, at_s=now_s)
        if not (self.is_over or self.rung is Rung.KILL):  # whatever it has left behind had SIGKILL as well
            self._ended[pid] = now_s + self._clear_s(death, now_s)
            self._untold.append(pid)
        self.observer.tell("exited", process=process.name, exit_code=death.exit_code, signal=number)
        return death

    def _clear_s(self, death: Death, now_s: float) -> float:
        """How long what this leader has left behind has, from SIGTERM to SIGKILL."""
        rest_s = self.plan.grace_s if self._kill_at_s is None else max(0.0, self._kill_at_s - now_s)
        # A shell dies of a request to stop at once: what it ran hears of it only now, and may have to save.
        is_shell = self.plan.workers is None
        was_asked = bool(self.asked) or self.is_draining or (is_shell and self.rung is not Rung.NONE)
        died_of_it = death.signal is not None and was_asked
        return rest_s if self.plan.daemons or died_of_it else min(CLEAR_S, rest_s)

    def on_signal(self, number: int, action: SignalAction, now_s: float, *, spares_leaders: bool) -> None:
        """Do with a signal what it is for, whatever this generation does now.

        The first request to stop asks the leaders, unless they are being ended already; each further one climbs.
        Ctrl-C is theirs as from a terminal, and the second one ends all at once.
        `spares_leaders`: their ranks on other hosts have had the signal.
        """
        if action is SignalAction.TERMINATE:
            self.note_request(number)
            if self.rung is Rung.KILL and self._climb_at_s is not None:
                self._climb_at_s = min(self._climb_at_s, now_s + LAST_KILL_S)
            first = Rung.RANKS if spares_leaders else Rung.LEADERS
            again = Rung.KILL if number == signal.SIGINT else Rung(min(self.rung + 1, Rung.KILL))
            if number == signal.SIGINT and self.rung < Rung.LEADERS:
                self._stop_signal = number
            self.stop(now_s, first if self.asked == 1 else max(first, again))
            return
        self.observer.tell("signal", signal=number, asks_to_stop=False)
        self.relayed.add(number)
        for pid in () if spares_leaders else self._alive:
            self.system.signal_leader(pid, number, wakes=action is SignalAction.DRAIN)
        if action is SignalAction.DRAIN:
            self.is_draining = True
            self._have_stop_signal |= number == self._stop_signal and not spares_leaders
            self.observer.asked_to_stop(number)
            log.warning("%s: no more restarts; the launcher exits when the workers do", signal_name(number))
        elif action is SignalAction.CHECKPOINT and self._alive:
            log.warning("%s: the workers were told to save and continue", signal_name(number))

    def note_request(self, number: int) -> None:
        """Count a request to stop this pod: nothing is started again."""
        self.asked += 1
        self.observer.tell("signal", signal=number, asks_to_stop=True)
        self.observer.asked_to_stop(number)
        how = f"grace {self.plan.grace_s:g} s"
        if number == signal.SIGINT:
            how = f"{how}; the next Ctrl-C kills at once" if self.asked == 1 else "all are killed at once"
        log.info("asked to stop by %s (request %d), %s", signal_name(number), self.asked, how)

    @property
    def deadline_s(self) -> float | None:
        """When `tick` is due; None: never."""
        if self.is_over:
            return None
        if self._untold or not (self._alive or self._is_clearing):
            return 0.0
        times = (self._climb_at_s, self._again_at_s, *self._ended.values())
        return min((at_s for at_s in times if at_s is not None), default=None)

    def stop(
        self,
        now_s: float,
        rung: Rung = Rung.LEADERS,
        grace_s: float | None = None,
        sparing: Collection[str] = (),
    ) -> None:
        """Climb to this rung; it is nothing new where that is reached, or where nothing lives.

        `grace_s`: until SIGKILL, where that differs from the plan's and the first rung is climbed. `sparing`: these
        leaders were asked in another way, and have `LEAVE_S` before the next rung.
        """
        # There is nothing any more that they could be spared for.
        self._ask_leaders(self._spared.difference(sparing))
        self._spared = frozenset(sparing)
        if self.is_over or rung <= self.rung:
            return
        self.rung = rung
        if self._kill_at_s is None:
            self._grace_s = self._grace_s if grace_s is None else grace_s
            self._kill_at_s = now_s + self._grace_s
        self.observer.tell("stopping", rung="everyone" if rung is Rung.ALL else rung.name.lower())
        if rung is Rung.KILL:
            self._ended, self._untold = {}, []
            self._climb_at_s = now_s + (LAST_KILL_S if self.asked else KILL_S)
            self._again_at_s = now_s + KILL_AGAIN_S
            self._signal_all(signal.SIGKILL, again=True)
            return
        self._climb_at_s = self._kill_at_s - (1 - _SHARES[rung]) * self._grace_s
        if rung is Rung.ALL:
            self._again_at_s = None
            # Leaders hear it again: to an agent the second request means "now everyone".
            self._signal_all(signal.SIGTERM, again=True)
        elif rung is Rung.LEADERS:
            if sparing:
                self._climb_at_s = min(self._climb_at_s, now_s + LEAVE_S)
            self._ask_leaders(self.pids().keys() - sparing)

    def _ask_leaders(self, names: Collection[str]) -> None:
        """Send the stop signal, not a second time to those that were told to drain by it: it may mean "abort"."""
        if self._have_stop_signal and not self.asked:
            return
        for pid in [pid for pid, process in self._alive.items() if process.name in names]:
            self.system.signal_leader(pid, self._stop_signal, wakes=True)

    def tick(self, now_s: float) -> None:
        """Do what is due: end what ended leaders have left behind, climb, see whether anything lives."""
        if self.is_over:
            return
        if self._alive:
            self._end_leftovers(now_s)
        elif not self._is_clearing:
            self._clear(now_s)
        if self.rung is Rung.KILL:
            self._kill_again(now_s)
        elif self._climb_at_s is not None and now_s >= self._climb_at_s:
            if self.rung is Rung.ALL:
                log.warning("the grace period is over; sending SIGKILL to the remaining processes")
            self.stop(now_s, Rung(self.rung + 1))
        elif self._again_at_s is not None and now_s >= self._again_at_s:
            self._ask_all(now_s)
        if not self._alive and not self.is_over:
            self.is_over = self.system.is_alone(self._stuck)

    def _end_leftovers(self, now_s: float) -> None:
        """End what leaders that have ended have left behind, while other leaders run on."""
        if self._untold:
            self._say(self.system.signal_groups(self._untold, signal.SIGTERM), signal.SIGTERM)
            self._untold = []
        if over := [pid for pid, kill_at_s in self._ended.items() if now_s >= kill_at_s]:
            self._say(self.system.signal_groups(over, signal.SIGKILL), signal.SIGKILL)
            self._ended = {pid: kill_at_s for pid, kill_at_s in self._ended.items() if pid not in over}

    def _clear(self, now_s: float) -> None:
        """The last leader has ended: all that is left is asked to, by daemons only when they serve nobody."""
        self._is_clearing = True
        bound_s = max(self._ended.values(), default=now_s + min(CLEAR_S, self.plan.grace_s))
        self._ended, self._untold = {}, []
        if self.rung is not Rung.KILL:
            self.rung, self._kill_at_s, self._climb_at_s = Rung.ALL, bound_s, bound_s
            self._ask_all(now_s)

    def _ask_all(self, now_s: float) -> None:
        """SIGTERM to all who have not had it, to daemons only once they are alone or most of the grace is over."""
        daemons, end_s = self.plan.daemons, self._kill_at_s or now_s
        is_patient = now_s < end_s - (1 - _SHARES[Rung.LEADERS]) * self.plan.grace_s
        self._signal_all(signal.SIGTERM, again=False, sparing=daemons if is_patient else frozenset())
        self._again_at_s = now_s + ASK_EVERY_S if daemons else None

    def _kill_again(self, now_s: float) -> None:
        """SIGKILL again, for who was forked meanwhile; name who is stuck in the kernel, and give up in the end."""
        if self._again_at_s is None or self._climb_at_s is None or now_s < min(self._again_at_s, self._climb_at_s):
            return
        if now_s >= self._climb_at_s:
            self._stuck |= {entry.key: entry for entry in self.system.left()}
            self._alive, self.is_over = {}, True
            return
        self._again_every_s *= 2
        self._again_at_s = min(now_s + self._again_every_s, self._climb_at_s)
        self._signal_all(signal.SIGKILL, again=True)
        if self._again_every_s == 4 * KILL_AGAIN_S:
            for entry in self.system.left():
                log.warning("still running after SIGKILL: %s", entry)

    def _signal_all(self, number: int, *, again: bool, sparing: frozenset[str] = frozenset()) -> None:
        reached = self.system.signal_all(number, again=again, sparing=sparing, besides=self._stuck)
        self._say(reached, number)

    def _say(self, reached: int, number: int) -> None:
        if reached:
            log.info("sent %s to %s", signal_name(number), counted(reached, "process"))
