"""`local -f`: a job of a manifest on this machine, from its first pod to its condition.

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
from dataclasses import replace
from pathlib import Path

import psutil

from trainer_launch import exits, log
from trainer_launch.commands.options import Parsed
from trainer_launch.commands.run import use_color
from trainer_launch.commands.staging import Stage
from trainer_launch.errors import NodeError, NotRunnableError
from trainer_launch.manifest import machine
from trainer_launch.manifest.life import Action, Start, Stop
from trainer_launch.manifest.values import Workload
from trainer_launch.model import Exit
from trainer_launch.signals import STOP_SIGNALS
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor.system import System

DRAIN_S = 1.0
_SWEEPS, _SWEEP_S = 20, 0.2  # looks for what a container left behind, and how long each waits for the end
# Checks of what only a real pod has of its own: network interfaces, a name, a range of ports.
_NOT_HERE = "own-name,gloo-socket-ifname,ephemeral-ports"
_log = logging.getLogger(__name__)


def rehearse(workload: Workload, parsed: Parsed) -> int:
    """Run the job to its end; return the exit code.

    Raises:
        LaunchError: it cannot be run here.
    """
    scratch = Path(tempfile.mkdtemp(prefix="trainer-launch-local-"))
    try:
        stage = Stage(workload, scratch, _flags(parsed), parsed.flags["command_line"])
        stage.check()
        system = System(color=use_color(parsed.settings))
        log.send_through(system.say)
        with contextlib.closing(system):
            rehearsal = Rehearsal(workload, stage, system, parsed)
            rehearsal.to_the_end()
        sys.stdout.flush()
        sys.stderr.write(rehearsal.report())
        return rehearsal.exit_code()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _flags(parsed: Parsed) -> dict[str, str]:
    """What of our own options the launchers in the pods get as variables."""
    settings = parsed.settings
    flags = {"SHM_SIZE": "keep", "COLOR": "never", "SKIP": _NOT_HERE}  # this machine's, which all pods share
    for name in ("max_restarts", "hang_timeout", "events", "preload", "signals", "engine", "rendezvous", "grace"):
        if name in settings.model_fields_set and getattr(settings, name) is not None:
            flags[name.upper()] = str(getattr(settings, name))
    flags["LOG_LEVEL"] = settings.log_level if "log_level" in settings.model_fields_set else "warning"
    return flags


class Rehearsal:
    """The state of the job, and who carries out what it asks for."""

    def __init__(self, workload: Workload, stage: Stage, system: System, parsed: Parsed) -> None:
        self._workload, self._stage, self._system = workload, stage, system
        self._settings = parsed.settings
        self._labels = "prefix" not in parsed.settings.model_fields_set or parsed.settings.prefix
        self._failed: list[machine.Exited] = []  # what could not be started
        self._stop_signal: int | None = None
        self._began_s = system.now()
        self.state, actions, said = machine.begin(workload, stage.pods, self._began_s)
        self._do(actions, said)

    def to_the_end(self) -> None:
        """Wait, step, apply, until nothing of the job runs."""
        while not self.state.is_done:
            for event in self._events():
                self._take(event)
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
        rows = [("POD", "PHASE", "STARTS", "RESTARTS", "EXIT", "LAST WORDS")]
        for name, state in self.state.states.items():
            pod = self.state.pods[name]
            code = state.codes.get(pod.draft.main)
            words = _first_line(self._stage.last_words(pod, pod.draft.main))
            shown = "-" if code is None else str(code)
            told = words or ("" if code is None else exits.describe(code))
            rows.append((name, state.phase.value, str(state.starts), str(state.restart_count), shown, told))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row[:5], widths, strict=True)), row[5]]).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, self._condition()]) + "\n"

    def _condition(self) -> str:
        title = f"{self._workload.kind} {self._workload.name}"
        condition = self.state.condition
        if condition is None:
            return f"{title}: stopped after {self._seconds:.1f} s"
        verdict = "Succeeded" if condition.succeeded else "Failed"
        return f"{title}: {verdict} after {self._seconds:.1f} s ({condition.reason}): {condition.message}"

    # -- events -------------------------------------------------------------------------------

    def _events(self) -> list[machine.Event]:
        failed, self._failed = self._failed, []
        if failed:
            return list(failed)
        due_s = self.state.due_s()
        made: list[machine.Event] = [one for event in self._system.wait(due_s) if (one := self._event(event))]
        if due_s is not None and self._system.now() >= due_s:
            made.append(machine.Due(self._system.now()))
        return made

    def _event(self, event: ev.Event) -> machine.Event | None:
        if isinstance(event, ev.Exited):
            made = _exited(event.at_s, event.exit)
            self._clear(made.pod, made.container)
            return made
        if isinstance(event, ev.Signalled) and event.number in STOP_SIGNALS:
            self._stop_signal = self._stop_signal or event.number
            return machine.StopAsked(event.at_s, self._settings.grace)
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
        process = self._stage.process(pod, action.container, life)
        if not self._labels:
            process = replace(process, label="")  # whole lines of one container at a time
        try:
            self._stage.prepare(pod, action.container, life)
            self._system.spawn(process)
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
