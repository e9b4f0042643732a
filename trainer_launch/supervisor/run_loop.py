"""The loop of every run: wait, act, settle the next step, until it is done; and the run of any program by it."""

from __future__ import annotations

import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

from msgspec.structs import replace

from trainer_launch.model import Death, Failure, Outcome, Verdict
from trainer_launch.model.signal_policy import STOP_SIGNALS, SignalAction, action_of
from trainer_launch.supervisor import error_lines, failure
from trainer_launch.supervisor.failure import Evidence, how
from trainer_launch.supervisor.processes import Processes, Rung
from trainer_launch.supervisor.run_observer import RunPhase, TimeKind

# Nobody ends so because another has ended, unless it was stopped for that.
_BY_ITSELF = (0, -signal.SIGKILL, -signal.SIGTERM)
DRAIN_S = 1.0  # for the last output, once nothing of ours runs any more
LAST_DRAIN_S = 0.2  # the same when the grace period is over
Due: TypeAlias = tuple[float | None, Callable[[float], None]]  # when, None: never; and what to do then
log = logging.getLogger(__name__)


class AnyWatch(Protocol):
    """A watch for hangs, which looks at a pace of its own; `hang_watch.Watch` is it."""

    due_s: float

    def look(self, now_s: float) -> Death | None:
        """The hang that has to be ended, if there is one, and when to look again in `due_s`."""


class RunLoop(ABC):
    """A run. Its subclass decides on ends, hangs and requests, and on what follows when nothing lives."""

    def __init__(self, processes: Processes, watch: AnyWatch | None) -> None:
        self._plan, self._system, self._observer = processes.plan, processes.system, processes.observer
        self._processes, self._watch = processes, watch
        self._evidence = Evidence()  # of the first failure
        self.is_done = False
        self._note = ""  # what it waited for when it was stopped
        self._stop_signal: int | None = None  # the first that asked to stop, or to start nothing again
        self._started_at_s = self._system.now()

    def run(self) -> Outcome:
        """Run to the end, and say how it ended."""
        try:
            self._to_the_end()
        finally:
            self.close()
        return self.outcome()

    def _to_the_end(self) -> None:
        """Wait and act until it is done; what has happened before is settled before anything else happens."""
        self.begin(self._started_at_s)
        while True:
            now_s = self._system.now()
            self.on_time(now_s)
            self._observe()
            self._processes.tick(now_s)
            self.settle(now_s)
            if self.is_done:
                break
            self._observe()
            times = (self._processes.deadline_s, *(at_s for at_s, _ in self.due()))
            happened = self._system.wait(min((at_s for at_s in times if at_s is not None), default=None))
            now_s = self._system.now()
            for number in happened.signals:  # first: a worker that had the same SIGTERM as we has not failed
                self.on_signal(number, now_s)
            if happened.signals:  # or news that came at the same time could start what was asked to stop
                self.settle(now_s)
                if self.is_done:
                    break
            self._system.woken()
            self.on_news(now_s)
            # Nobody knows which of these ended first, and nobody was stopped for it yet.
            for pid, status in sorted(happened.ended, key=lambda end: end[1] not in _BY_ITSELF):
                self.on_child(pid, status, now_s)
        self._observe()
        is_late = self._processes.asked and self._processes.rung is Rung.KILL
        self._system.drain(LAST_DRAIN_S if is_late else DRAIN_S)

    def due(self) -> Iterator[Due]:
        """What is due, but for what `Processes` does; each is asked for when what was due before it is done."""
        if self._watch is not None and self._processes.is_running:
            yield self._watch.due_s, self._look

    def on_time(self, now_s: float) -> None:
        """Do what is due."""
        for at_s, act in self.due():
            if at_s is not None and now_s >= at_s:
                act(now_s)

    def _look(self, now_s: float) -> None:
        hang = None if self._watch is None else self._watch.look(now_s)
        if hang is not None:
            self.on_hang(hang, now_s)

    def on_signal(self, number: int, now_s: float) -> None:
        """Note a request to stop or a drain, in every phase alike, and pass it on to the processes that live.

        Where nothing lives there is nobody to hand a stop signal to: it is a request, whatever it is mapped to.
        How the run has ended already stays so.
        """
        action, lives = action_of(number, self._plan.signals), not self._processes.is_over
        asks = action is SignalAction.TERMINATE or (number in STOP_SIGNALS and not lives)
        if (asks or action is SignalAction.DRAIN) and self._stop_signal is None and not self.is_decided:
            self._stop_signal = number
        if lives:
            self._processes.on_signal(number, action, now_s, spares_leaders=self.tell_ranks(number, action))
        elif asks or action is SignalAction.DRAIN:
            self._processes.note_request(number)

    def tell_ranks(self, number: int, action: SignalAction) -> bool:
        """Let ranks on other hosts have a signal; whether they had it in place of what runs here."""
        return False

    def _failure_of(self, death: Death, **more: bool | frozenset[int]) -> Failure:
        """A death as the termination message tells it, by the evidence of the first failure, and `more` of it."""
        lines = death.lines or self._system.last_lines(death.process)
        errors = death.lines or self._system.last_errors(death.process)
        return failure.classify(death, replace(self._evidence, last_lines=lines, last_errors=errors, **more))

    def ended(self, cause: Failure | None, starts: int, *, well: bool) -> Outcome:
        """How it ended, after so many starts: `well`, unless it was asked to stop."""
        verdict = Verdict.SUCCEEDED if well else Verdict.FAILED
        return Outcome(
            verdict=verdict if self._stop_signal is None else Verdict.STOPPED,
            failure=cause,
            stop_signal=self._stop_signal,
            took_s=self._system.now() - self._started_at_s,
            attempt=max(1, starts),
            note=self._note,
            survivors=self._processes.stuck(),
        )

    def classified(self, death: Death) -> Failure:
        """The cause of a death, by its own last lines or the program's."""
        return self._failure_of(
            death, stopped=self._stop_signal is not None, handed_on=frozenset(self._processes.relayed)
        )

    @property
    @abstractmethod
    def is_decided(self) -> bool:
        """Whether the run's end is decided, whatever it is asked from now on."""

    @abstractmethod
    def begin(self, now_s: float) -> None:
        """Begin."""

    @abstractmethod
    def on_child(self, pid: int, status: int, now_s: float) -> None:
        """Act on the end of a child, or of an orphan that became ours."""

    @abstractmethod
    def on_hang(self, hang: Death, now_s: float) -> None:
        """Act on a hang of what runs."""

    def on_news(self, now_s: float) -> None:  # noqa: B027  most runs hear of nobody else
        """Act on what others than the kernel tell; nobody tells a program anything."""

    @abstractmethod
    def settle(self, now_s: float) -> None:
        """Decide what comes next, if nothing lives any more."""

    def close(self) -> None:  # noqa: B027
        """Give back what the run has beside its processes."""

    @abstractmethod
    def outcome(self) -> Outcome:
        """How it ended, and why."""

    @abstractmethod
    def _observe(self) -> None: ...


class ProgramLoop(RunLoop):
    """The run of a plan's one program.

    `failed` is told of a failure as it is known then, and whose it is, before what was left behind is ended.
    """

    def __init__(
        self,
        processes: Processes,
        watch: AnyWatch | None = None,
        failed: Callable[[Failure, str], None] = lambda failure, process: None,
    ) -> None:
        super().__init__(processes, watch)
        self._failed = failed
        (self._process,) = processes.plan.processes
        self._death: Death | None = None
        self._cause: Death | None = None  # the same where it failed by itself, or a hang

    def begin(self, now_s: float) -> None:
        """Start it."""
        for unstarted in self._processes.start((self._process,)):
            self._death = self._cause = unstarted

    def on_child(self, pid: int, status: int, now_s: float) -> None:
        """The program has ended; orphans concern nobody."""
        death = self._processes.reaped(pid, status, now_s)
        if death is None:
            return
        log.info("%s ended with %s", death.process, how(death))
        self._death = death
        if death.exit_code == 0 or self._stop_signal is not None or self._cause is not None:
            return
        self._cause, self._evidence = death, self._system.look()
        self._observe()  # what follows is no training
        if (cause := self._failure()) is not None:
            self._failed(cause, death.process)

    def on_hang(self, hang: Death, now_s: float) -> None:
        """Stop a program that hangs, politely at first: a part of it may still be able to save."""
        self._cause, self._evidence = hang, self._system.look()
        self._observer.tell("hung", text=hang.message)
        self._processes.stop(now_s)

    @property
    def is_decided(self) -> bool:
        """Whether the program has failed or succeeded: a later request to stop does not change that."""
        has_ended = not (self._processes.is_over or self._processes.pids())
        return self._cause is not None or has_ended

    def settle(self, now_s: float) -> None:
        """Nothing lives any more: the end."""
        self.is_done = self._processes.is_over

    def _observe(self) -> None:
        since_s = self._cause.at_s if self._cause is not None and is_hang(self._cause) else None
        self._observer.enter(RunPhase.DONE if self.is_done else self._processes.phase, self._time_kind(), since_s)

    def _time_kind(self) -> TimeKind:
        """The use of the seconds from now on."""
        has_failed = self._cause is not None
        if self._processes.is_running and not has_failed:
            return TimeKind.TRAINING
        is_end = self.is_done or self._stop_signal is not None or self._processes.is_draining
        return TimeKind.STOPPING if has_failed and not is_end else TimeKind.ENDING

    def outcome(self) -> Outcome:
        """How it ended, and why."""
        return self.ended(self._failure(), starts=1, well=self._cause is None)

    def _failure(self) -> Failure | None:
        cause, is_stopped = self._cause, self._stop_signal is not None
        if cause is not None and is_hang(cause):  # however what hung then ended, if it did
            return self._failure_of(cause)
        if is_stopped:  # how it took the request is worth a word when it did not leave with 0
            cause = self._death
        if cause is None or cause.exit_code == 0:
            return None
        lines = () if self._plan.failure_file is None else self._system.last_lines(cause.process)
        content = error_lines.read_error_file(self._plan.failure_file)
        return self.classified(failure.with_torchruns_file(cause, content, lines))


def is_hang(death: Death) -> bool:
    """Whether it is a hang, which is no end of a process, nor of a store."""
    return not death.process and death.reason is not None
