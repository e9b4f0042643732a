"""A job on this machine, from its first pod to its condition, whether flags or a manifest describe it.

What happens is decided in `manifest.machine`; here it is done: processes, signals, folders.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainer_launch import exits, log
from trainer_launch.commands.run import use_color
from trainer_launch.commands.staging import Setting, Stage
from trainer_launch.commands.troubles import NOTHING_ASKED, Asked, Moment, Troubles
from trainer_launch.errors import NodeError, NotRunnableError
from trainer_launch.manifest import machine
from trainer_launch.manifest.life import Action, Start, Stop
from trainer_launch.manifest.values import Workload
from trainer_launch.model import Exit
from trainer_launch.rehearsal import table
from trainer_launch.rehearsal.ability import OWN_NETWORK
from trainer_launch.rehearsal.flags import LAUNCHER
from trainer_launch.settings import Settings
from trainer_launch.signals import STOP_SIGNALS
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor.system import System

DRAIN_S = 1.0
_SWEEPS, _SWEEP_S = 20, 0.2  # looks for what a container left behind, and how long each waits for the end
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is rehearsed, and how it grows: the same job with that many more nodes, where it can."""

    workload: Workload
    asked: Asked = NOTHING_ASKED
    grown: Callable[[int], Workload] | None = None


def rehearse(job: Job, settings: Settings, setting: Setting) -> int:
    """Run the job to its end; return the exit code.

    Raises:
        LaunchError: it cannot be run here.
    """
    scratch = Path(tempfile.mkdtemp(prefix="trainer-launch-local-"))
    try:
        stage = Stage(job.workload, scratch, setting)
        stage.check()
        system = System(color=use_color(settings))
        log.send_through(system.say)
        with contextlib.closing(system):
            rehearsal = Rehearsal(job, stage, system, settings)
            rehearsal.to_the_end()
        sys.stdout.flush()
        sys.stderr.write(rehearsal.report())
        return rehearsal.exit_code()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class Rehearsal:
    """The state of the job, and who carries out what it asks for."""

    def __init__(self, job: Job, stage: Stage, system: System, settings: Settings) -> None:
        self._job, self._stage, self._system = job, stage, system
        self._grace_s = settings.grace
        self._failed: list[machine.Exited] = []  # what could not be started
        self._stop_signal: int | None = None
        self._began_s = system.now()
        nodes = [pod.name for pod in stage.pods if pod.draft.role != LAUNCHER]
        names = [pod.name for pod in stage.pods]
        self._troubles = Troubles(job.asked, nodes or names, names, self._began_s)
        self.state, actions, said = machine.begin(job.workload, stage.pods, self._began_s)
        self._do(actions, said)

    def to_the_end(self) -> None:
        """Wait, step, apply, until nothing of the job runs."""
        while not self.state.is_done:
            for event in self._events():
                self._take(event)
            for moment in self._troubles.passed(self._system.now()):
                self._disturb(moment)
        self._system.signal_all(signal.SIGKILL, again=True)  # what left its container's session
        self._system.drain(DRAIN_S)
        self._seconds = self._system.now() - self._began_s

    def exit_code(self) -> int:
        """0 for success, else the code of the pod that failed, or of the signal that asked to stop."""
        condition = self.state.condition
        if condition is None:
            return exits.of_signal(self._stop_signal or signal.SIGTERM)
        return exits.SUCCEEDED if condition.succeeded else condition.exit_code or exits.FAILED

    def report(self) -> str:
        """A row for each pod, and the job's condition."""
        pods = self.state.pods.values()
        words = {pod.name: _first_line(self._stage.last_words(pod, pod.draft.main)) for pod in pods}
        title = f"{self._job.workload.kind} {self._job.workload.name}"
        return table.table(self.state, words) + table.condition(title, self.state, self._seconds)

    # -- events -------------------------------------------------------------------------------

    def _events(self) -> list[machine.Event]:
        failed, self._failed = self._failed, []
        if failed:
            return list(failed)
        due_s = self.state.due_s()
        trouble_s = self._troubles.due_s()
        until_s = min((one for one in (due_s, trouble_s) if one is not None), default=None)
        made: list[machine.Event] = [one for event in self._system.wait(until_s) if (one := self._event(event))]
        if due_s is not None and self._system.now() >= due_s:
            made.append(machine.Due(self._system.now()))
        return made

    def _event(self, event: ev.Event) -> machine.Event | None:
        if isinstance(event, ev.Exited):
            made = _exited(event.at_s, event.exit)
            self._clear(made.pod, made.container)
            return made
        if isinstance(event, ev.Signalled):
            if event.number in STOP_SIGNALS:
                self._stop_signal = self._stop_signal or event.number
                return machine.StopAsked(event.at_s, self._grace_s)
            for name in self._system.pids():  # such as USR1: what it is for, each pod's launcher knows
                self._system.signal_leader(name, event.number)
        return None

    def _clear(self, pod: str, container: str) -> None:
        """A container ends with its first process: whatever that left behind is killed."""
        self._stage.ended(self.state.pods[pod], container)
        self._system.signal_group(f"{pod}/{container}", signal.SIGKILL)
        for _ in range(_SWEEPS):
            left = self._stage.processes_of(self.state.pods[pod], container)
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if not left:
                return
            psutil.wait_procs(left, timeout=_SWEEP_S)

    def _take(self, event: machine.Event) -> None:
        if isinstance(event, machine.Exited):
            _log.info("%s/%s ended with %d", event.pod, event.container, event.code)
        self.state, actions, said = machine.step(self.state, event)
        self._do(actions, said)

    # -- faults -------------------------------------------------------------------------------

    def _disturb(self, moment: Moment) -> None:
        """A fault begins, or is over."""
        _log.warning("fault%s: %s", " over" if moment.is_over else "", moment.fault.text)
        network = self._stage.network
        try:
            if network is not None and moment.fault.kind in OWN_NETWORK:
                (network.end if moment.is_over else network.begin)(moment.fault, moment.pod)
        except NodeError as problem:
            _log.error("%s", problem)

    # -- actions ------------------------------------------------------------------------------

    def _do(self, actions: list[Action], said: list[str]) -> None:
        self._stage.follow(self.state.running)
        for sentence in said:
            _log.warning("%s", sentence)
        for action in actions:
            if isinstance(action, Stop):
                self._stop(action)
            else:
                self._start(action)

    def _stop(self, action: Stop) -> None:
        name = f"{action.pod}/{action.container}"
        if action.kill:
            self._system.signal_group(name, signal.SIGKILL)
        else:
            self._system.signal_leader(name, signal.SIGTERM)  # the kubelet asks a container's first process only

    def _start(self, action: Start) -> None:
        pod, life = self.state.pods[action.pod], self.state.states[action.pod].starts
        try:
            self._stage.prepare(pod, action.container, life)
            self._system.spawn(self._stage.placed(pod, self._stage.process(pod, action.container, life)))
        except (NotRunnableError, NodeError, OSError) as problem:
            _log.error("%s", problem)
            code = problem.exit_code if isinstance(problem, NotRunnableError) else exits.NOT_FOUND
            self._failed.append(machine.Exited(time.monotonic(), action.pod, action.container, code))


def _exited(at_s: float, end: Exit) -> machine.Exited:
    pod, _, container = end.process.partition("/")
    return machine.Exited(at_s, pod, container, end.exit_code)


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return ""
