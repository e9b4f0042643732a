"""A job on this machine, from its first pod to its condition, whether flags or a manifest describe it.

What happens is decided in `controllers/job_lifecycle.py`; here it is done: processes, signals, folders.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.diagnosis import incident_bundle
from trainer_launch.host import files, logs, process_attributes, process_tree, runtime_directory
from trainer_launch.model import exit_codes, signal_policy
from trainer_launch.model.errors import NodeError, NotRunnableError
from trainer_launch.model.settings import Settings
from trainer_launch.model.signal_policy import STOP_SIGNALS
from trainer_launch.model.units import counted
from trainer_launch.rehearsal import reporting
from trainer_launch.rehearsal.controllers import job_lifecycle
from trainer_launch.rehearsal.controllers.job_lifecycle import Event, Exited, PodDeleted, StopAsked
from trainer_launch.rehearsal.controllers.pod_lifecycle import Action, Start, Stop
from trainer_launch.rehearsal.controllers.pod_values import Pod, Workload
from trainer_launch.rehearsal.faults import Faults, InjectedFault
from trainer_launch.rehearsal.history import History, HistoryEntry, Recorder, What
from trainer_launch.rehearsal.kubelet import Kubelet, Setting
from trainer_launch.rehearsal.pod_watch import PodProcesses, PodWatch
from trainer_launch.supervisor.output import Output
from trainer_launch.supervisor.system import Happened, System

DRAIN_S = 1.0
_SWEEPS, _SWEEP_S = 20, 0.2  # looks for what a container left behind, and how long each waits for the end
_log = logging.getLogger(__name__)


class RehearsalJob(Struct, frozen=True, kw_only=True):
    """The job to rehearse."""

    workload: Workload
    faults: tuple[InjectedFault, ...]
    reports: tuple[str, ...]  # files
    check: Callable[[Kubelet], None]  # raises LaunchError for a command that each pod's launcher would refuse


def rehearse(job: RehearsalJob, settings: Settings, setting: Setting) -> int:
    """Run the job to its end; return the exit code. Raises LaunchError: it cannot be run here."""
    process_tree.require("a rehearsal")
    scratch, began_s = Path(tempfile.mkdtemp(prefix="trainer-launch-rehearsal-")), time.time()
    try:
        kubelet = Kubelet(job.workload, scratch, setting)
        kubelet.check()
        job.check(kubelet)
        watch = PodWatch()
        system = System(Output(listener=watch.scan))
        logs.send_through(system.say)
        with contextlib.closing(system):
            rehearsal = Rehearsal(job, kubelet, system, watch, settings.grace)
            with reporting.table(rehearsal.live_rows):
                rehearsal.to_the_end()
        sys.stdout.flush()
        sys.stderr.write(_incidents(setting.launchers.get("INCIDENT_DIR", ""), began_s))
        return reporting.conclude(rehearsal.history(), job.reports)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        containers = (each for draft in job.workload.drafts for each in draft.template.containers)
        own = (item.value for each in containers for item in each.items if item.name == "TMPDIR")
        for place in {tempfile.gettempdir(), *own}:
            runtime_directory.forget_killed(place)  # launchers that were killed with their pods left theirs


def _end_with_us() -> None:
    """In a pod's first process: if this rehearsal is killed, the pod is asked to stop."""
    process_attributes.die_with_parent(signal.SIGTERM)


def _incidents(place: str, began_s: float) -> str:
    """A line about the incidents since `began_s`, in seconds since the epoch, and where they are kept."""
    stored = incident_bundle.stored(place) if os.path.isdir(place) else []
    new = len(incident_bundle.moments([bundle for bundle in stored if bundle.incident.time_s >= began_s]))
    where = f"in {place}; see trainer-launch incidents show --incident-dir {shlex.quote(place)}"
    return f"{counted(new, 'incident')} {where}\n" if new else ""


class Rehearsal:
    """The state of the job; carries out the controller's actions on this machine."""

    def __init__(
        self, job: RehearsalJob, kubelet: Kubelet, system: System, watch: PodWatch, grace_s: float
    ) -> None:
        self._job, self.kubelet, self._system, self._watch, self._grace_s = job, kubelet, system, watch, grace_s
        self._failed: list[Exited] = []  # what could not be started
        self._stop_signal: int | None = None
        self._pids: dict[str, int] = {}  # the first process of each container, the last one of that name
        self._running: dict[int, str] = {}  # the same by pid, of those that run
        self.processes = PodProcesses(kubelet)
        self._recorder = Recorder()
        self._statuses: dict[str, str] = {}  # by pod: what the history has
        self._steps: dict[str, int] = {}  # by pod: the last one that it reached
        self._began_s = system.now()
        self.state, actions, sentences = job_lifecycle.begin(job.workload, kubelet.pods, self._began_s)
        self._record_event(None, actions)
        self._faults = Faults(job.faults, self)
        watch.wake, watch.patterns = system.poke, self._faults.patterns  # a pod's first line may be the one
        self._faults.precede()
        self._first = actions, sentences

    def to_the_end(self) -> None:
        """Start the job; wait, step, apply, until nothing of it runs."""
        self._do(*self._first)
        while not self.state.is_done:
            for event in self._events():
                self.take(event)
            self._observe()
            if self.state.condition is None and not self.state.asked:
                self._faults.pass_time()
        self._system.signal_all(signal.SIGKILL, again=True)  # what left its container's session
        self._system.drain(DRAIN_S)
        self._faults.finish()

    def history(self) -> History:
        """The history of the whole rehearsal."""
        messages = {}
        for pod in self.state.pods.values():
            container = reporting.deciding_container(self.state, pod.name)
            messages[pod.name] = files.text(self.kubelet.termination_message(pod, container))
        end = self.state.condition
        if end is None:  # it was asked to stop
            exit_code = exit_codes.of_signal(self._stop_signal or signal.SIGTERM)
        else:
            exit_code = exit_codes.SUCCEEDED if end.succeeded else end.exit_code or exit_codes.FAILED
        return History(
            kind=self._job.workload.kind,
            name=self._job.workload.name,
            entries=self._recorder.entries(),
            took_s=self.now_s(),
            exit_code=exit_code,
            pods=reporting.results(self.state, messages, self._last_line),
            remarks=reporting.remarks(self.state, messages),
        )

    def live_rows(self, most: int) -> tuple[str, Sequence[Sequence[str]]]:
        """The live table's title and rows; called in its thread, so each changing value is read once."""
        state, steps, count = self.state, dict(self._steps), self._faults.injected
        title = f"{self._job.workload.kind} {self._job.workload.name}"
        top = max(steps.values(), default=None)
        title = reporting.live_title(title, state, self.now_s(), top, count)
        return title, reporting.live_rows(state, steps, self._last_line, most)

    def _last_line(self, pod: Pod) -> str:
        """The last line of the main container; from any thread."""
        return self._system.last_line(f"{pod.name}/{pod.draft.main}")

    def now_s(self) -> float:
        """Seconds since the rehearsal began."""
        return self._system.now() - self._began_s

    def record(self, entry: HistoryEntry) -> None:
        """Take an entry into the history."""
        self._recorder.add(entry)

    def leader(self, pod: str) -> int | None:
        """The first process of the main container, while it runs."""
        pid = self._pids.get(f"{pod}/{self.state.pods[pod].draft.main}")
        return pid if pid in self._running else None

    def delete(self, pod: str, grace_s: float, back_s: float | None) -> None:
        """Delete a pod, which is created again after `back_s`; None: never."""
        self.take(PodDeleted(self._system.now(), pod, grace_s, back_s))

    def _observe(self) -> None:
        for observed in self._watch.observations(self.processes, self.kubelet, self.state.pods):
            if isinstance(observed, str):
                self._faults.printed(observed)
                continue
            self.record(replace(observed, at_s=max(0.0, observed.at_s - self._began_s)))
            if observed.step is not None and observed.pod is not None:
                self._steps[observed.pod] = observed.step
                self._faults.reached(observed.step)
        self._watch.patterns = self._faults.patterns

    def _events(self) -> list[Event]:
        failed, self._failed = self._failed, []
        if failed:
            return list(failed)
        due_s = min((at_s for at_s in self._times() if at_s is not None), default=None)
        events: list[Event] = list(self._of(self._system.wait(due_s)))
        if due_s is not None and self._system.now() >= due_s:
            events.append(job_lifecycle.Due(self._system.now()))
        return events

    def _times(self) -> Iterator[float | None]:
        yield self.state.due_s()
        yield self._watch.due_s
        if self.state.condition is None and (due_s := self._faults.due_s()) is not None:
            yield self._began_s + due_s

    def _of(self, happened: Happened) -> Iterator[Event]:
        now_s = self._system.now()
        for number in happened.signals:
            if number in STOP_SIGNALS:
                self._stop_signal = self._stop_signal or number
                yield StopAsked(now_s, self._grace_s)
            else:
                for pid in self._running:  # such as USR1, whose meaning each pod's launcher knows
                    self._system.signal_leader(pid, number)
        for pid, status in happened.ended:
            if pid in self._running:
                pod, _, container = self._running.pop(pid).partition("/")
                self._clear(pid, pod, container)
                yield Exited(now_s, pod, container, exit_codes.of_signal(-status) if status < 0 else status)

    def _clear(self, pid: int, pod: str, container: str) -> None:
        """A container ends with its first process: the processes that it left behind are killed."""
        self._system.signal_groups({pid}, signal.SIGKILL)
        for _ in range(_SWEEPS):
            left = self.kubelet.processes_of(self.state.pods[pod], container)
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if not left:
                return
            psutil.wait_procs(left, timeout=_SWEEP_S)

    def take(self, event: Event) -> None:
        """Let the controllers decide about an event, and carry that out."""
        before = self.state
        self.state, actions, sentences = job_lifecycle.step(before, event)
        if isinstance(event, Exited):
            path = self.kubelet.termination_message(self.state.pods[event.pod], event.container)
            sentence = reporting.ending(before, self.state, event, files.text(path).partition("\n")[0])
            sentences = [sentence, *sentences] if sentence else sentences
        self._record_event(event, actions, was_over=before.condition is not None)
        self._do(actions, sentences)

    def _record_event(self, event: Event | None, actions: Sequence[Action], *, was_over: bool = False) -> None:
        """Take the consequences of an event into the history; None: of the beginning."""
        state = self.state
        at_s = 0.0 if event is None else event.at_s - self._began_s
        if isinstance(event, Exited) and event.container == state.pods[event.pod].draft.main:
            self.record(HistoryEntry(at_s=at_s, what=What.ENDED, pod=event.pod, code=event.code))
        for name in state.states:
            status = reporting.status(state, name)
            if self._statuses.get(name) != status:
                self._statuses[name] = status
                self.record(HistoryEntry(at_s=at_s, what=What.STATUS, pod=name, text=status))
        for action in actions:
            if action.container != state.pods[action.pod].draft.main:
                continue
            if isinstance(action, Start):
                self.record(HistoryEntry(at_s=at_s, what=What.STARTED, pod=action.pod))
            elif isinstance(event, PodDeleted) and not action.kill:
                text = self._stop_signal_of(action)
                self.record(HistoryEntry(at_s=at_s, what=What.STOP_ASKED, pod=action.pod, text=text))
        if state.condition is not None and not was_over:
            code = exit_codes.SUCCEEDED if state.condition.succeeded else exit_codes.FAILED
            self.record(HistoryEntry(at_s=at_s, what=What.CONDITION, code=code, text=state.condition.text))

    def _do(self, actions: Sequence[Action], sentences: Sequence[str]) -> None:
        for sentence in sentences:
            _log.warning("%s", sentence)
        for action in actions:
            if isinstance(action, Stop):
                self._stop(action)
            else:
                self._start(action)

    def _stop(self, action: Stop) -> None:
        pid = self._pids.get(f"{action.pod}/{action.container}")
        if pid is not None and action.kill:
            self._system.signal_groups({pid}, signal.SIGKILL)
        elif pid is not None:  # the kubelet asks a container's first process only
            self._system.signal_leader(pid, signal_policy.number_of(self._stop_signal_of(action)) or signal.SIGTERM)

    def _stop_signal_of(self, action: Stop) -> str:
        return self.state.pods[action.pod].container(action.container).stop_signal or "SIGTERM"

    def _start(self, action: Start) -> None:
        pod, life = self.state.pods[action.pod], self.state.states[action.pod].starts
        try:
            self.kubelet.prepare(pod, action.container, life)
            process = self.kubelet.process(pod, action.container, life)
            pid = self._system.spawn(self.kubelet.placed(pod, process), _end_with_us)
            self._pids[process.name], self._running[pid] = pid, process.name
        except (NotRunnableError, NodeError, OSError) as problem:
            _log.error("%s", problem)
            code = problem.exit_code if isinstance(problem, NotRunnableError) else exit_codes.NOT_FOUND
            self._failed.append(Exited(time.monotonic(), action.pod, action.container, code))
