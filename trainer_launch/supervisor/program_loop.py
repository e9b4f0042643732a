"""Run any program to its end: wait, act, say how it ended. How it is stopped, `Processes` knows."""

from __future__ import annotations

import logging
from collections.abc import Callable

from trainer_launch.model import Death, Failure, Outcome, Plan
from trainer_launch.supervisor import error_lines, failure
from trainer_launch.supervisor.failure import how
from trainer_launch.supervisor.processes import Processes
from trainer_launch.supervisor.run_loop import AnyWatch, RunLoop
from trainer_launch.supervisor.run_observer import RunObserver, RunPhase, TimeKind
from trainer_launch.supervisor.system import System

log = logging.getLogger(__name__)


def supervise(
    plan: Plan,
    system: System,
    processes: Processes | None = None,
    watch: AnyWatch | None = None,
    observer: RunObserver | None = None,
    failed: Callable[[Failure, str], None] = lambda failure, process: None,
) -> Outcome:
    """Run `plan` until nothing of it is left, and say how it ended.

    `failed` is told of a failure as it is known then, and whose it is, before what was left behind is ended.
    """
    observer = observer or RunObserver()
    processes = processes or Processes(plan, system, observer)
    loop = ProgramLoop(plan, system, processes, watch, observer, failed)
    loop.to_the_end()
    return loop.outcome()


class ProgramLoop(RunLoop):
    """The run of a plan's one program."""

    def __init__(
        self,
        plan: Plan,
        system: System,
        processes: Processes,
        watch: AnyWatch | None,
        observer: RunObserver,
        failed: Callable[[Failure, str], None],
    ) -> None:
        super().__init__(plan, system, processes, watch, observer)
        self._failed = failed
        (self._process,) = plan.processes
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
        has_ended = not (self._processes.is_over or self._processes.has_leaders)
        return self._cause is not None or has_ended

    def settle(self, now_s: float) -> None:
        """Nothing lives any more: the end."""
        self.is_done = self._processes.is_over

    def _observe(self) -> None:
        since_s = self._cause.at_s if self._cause is not None and _is_hang(self._cause) else None
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
        exits = () if self._death is None else (self._death,)
        return self.ended(self._failure(), exits, attempt=1, well=self._cause is None)

    def _failure(self) -> Failure | None:
        cause, is_stopped = self._cause, self._stop_signal is not None
        if cause is not None and _is_hang(cause):  # however what hung then ended, if it did
            return self._failure_of(cause)
        if is_stopped:  # how it took the request is worth a word when it did not leave with 0
            cause = self._death
        if cause is None or cause.exit_code == 0:
            return None
        lines = () if self._plan.failure_file is None else self._system.last_lines(cause.process)
        content = error_lines.read_error_file(self._plan.failure_file)
        return self.classified(failure.with_torchruns_file(cause, content, lines))


def _is_hang(death: Death) -> bool:
    return not death.process  # it is no end of a process
