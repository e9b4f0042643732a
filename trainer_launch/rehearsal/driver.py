"""A job on this machine, from its first pod to its condition, whether flags or a manifest describe it.

What happens is decided in `controllers/job_lifecycle.py`; here it is done: processes, signals, folders.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil
from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host import deadline_subprocess, files, logs
from trainer_launch.model import exit_codes
from trainer_launch.model.errors import NodeError, NotRunnableError
from trainer_launch.model.settings import Settings
from trainer_launch.model.signal_policy import STOP_SIGNALS
from trainer_launch.observability.termination_message import use_color
from trainer_launch.rehearsal.controllers import job_lifecycle
from trainer_launch.rehearsal.controllers.job_lifecycle import Event, Exited, PodDeleted, StopAsked
from trainer_launch.rehearsal.controllers.pod_lifecycle import Action, Phase, PodState, Start, Stop, own_init
from trainer_launch.rehearsal.controllers.pod_values import Pod, Workload
from trainer_launch.rehearsal.controllers.restart_decisions import State
from trainer_launch.rehearsal.faults.grammar import Fault
from trainer_launch.rehearsal.faults.injection import Faults
from trainer_launch.rehearsal.faults.requests import workers_of
from trainer_launch.rehearsal.kubelet.pods import Kubelet, Setting
from trainer_launch.rehearsal.pod_watch import PodProcesses, PodWatch
from trainer_launch.rehearsal.report import summary
from trainer_launch.rehearsal.report.history import INIT, Entry, History, Recorder, What
from trainer_launch.rehearsal.report.reporting import Reporting
from trainer_launch.supervisor.system import Happened, System

DRAIN_S = 1.0
_SWEEPS, _SWEEP_S = 20, 0.2  # looks for what a container left behind, and how long each waits for the end
_log = logging.getLogger(__name__)


class Job(Struct, frozen=True, kw_only=True):
    """What is rehearsed, and how it is scaled: the same job with so many more nodes, or fewer, where it can."""

    workload: Workload
    grown: Callable[[int], Workload] | None
    faults: tuple[Fault, ...]
    reporting: Reporting


def rehearse(job: Job, settings: Settings, setting: Setting) -> int:
    """Run the job to its end; return the exit code. Raises LaunchError: it cannot be run here."""
    scratch, began_s = Path(tempfile.mkdtemp(prefix="trainer-launch-rehearsal-")), time.time()
    try:
        kubelet = Kubelet(job.workload, scratch, setting)
        with held(scratch):
            kubelet.check()
            watch = PodWatch() if job.faults or job.reporting.needs_steps else None
            system = System(color=use_color(), listener=watch.scan if watch else None)
            logs.send_through(system.say)
            with contextlib.closing(system):
                rehearsal = Rehearsal(job, kubelet, system, watch, settings.grace)
                with job.reporting.table(rehearsal.live_rows):
                    rehearsal.to_the_end()
        sys.stdout.flush()
        sys.stderr.write(summary.incidents(setting.launchers.get("INCIDENT_DIR", ""), began_s) + rehearsal.report())
        return job.reporting.conclude(rehearsal.history(), rehearsal.exit_code())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class Rehearsal:
    """The state of the job, and who carries out what it asks for."""

    def __init__(self, job: Job, kubelet: Kubelet, system: System, watch: PodWatch | None, grace_s: float) -> None:
        self._job, self.kubelet, self._system, self._watch, self._grace_s = job, kubelet, system, watch, grace_s
        self._failed: list[Exited] = []  # what could not be started
        self._stop_signal: int | None = None
        self._grown = 0
        self._pids: dict[str, int] = {}  # the first process of each container, the last one of that name
        self._running: dict[int, str] = {}  # the same by pid, of those that run
        self.processes = PodProcesses(kubelet)
        self._recorder = Recorder(job.workload.kind, job.workload.name, (pod.name for pod in kubelet.pods))
        self._steps: dict[str, int] = {}  # by pod: the last one that it reached
        self._began_s = system.now()
        self.state, actions, said = job_lifecycle.begin(job.workload, kubelet.pods, self._began_s)
        for entry in happened(None, self.state, None, actions):
            self.tell(entry)
        self._faults = Faults(job.faults, self)
        if watch is not None:  # a pod's first line may be the one
            watch.wake, watch.patterns = system.poke, self._faults.patterns
        self._faults.precede()
        self._first = actions, said

    def to_the_end(self) -> None:
        """Start the job; wait, step, apply, until nothing of it runs."""
        self._do(*self._first)
        while not self.state.is_done:
            for event in self._events():
                self.take(event)
            self._sense()
            if self.state.condition is None and not self.state.asked:
                self._faults.pass_time()
        self._system.signal_all(signal.SIGKILL, again=True)  # what left its container's session
        self._system.drain(DRAIN_S)
        self._faults.finish()
        self._seconds = self._system.now() - self._began_s
        condition = self.state.condition
        self._recorder.finish(self._seconds, succeeded=None if condition is None else condition.succeeded)

    def exit_code(self) -> int:
        """0 for success, else the code of the pod that failed, or of the signal that asked to stop."""
        condition = self.state.condition
        if condition is None:
            return exit_codes.of_signal(self._stop_signal or signal.SIGTERM)
        if not condition.succeeded:
            return condition.exit_code or exit_codes.FAILED
        return exit_codes.FAILED if self._faults.missed else exit_codes.SUCCEEDED

    def history(self) -> History:
        """All that has happened so far."""
        lines = {pod.name: self._last_line(pod) for pod in self.kubelet.pods}
        return self._recorder.history({name: line for name, line in lines.items() if line}, self._words())

    def report(self) -> str:
        """A row for each pod, and the job's condition."""
        shown = summary.table(self.state, self._words()) + summary.condition(self._title, self.state, self._seconds)
        shown += summary.cause(self.state, self._words()) + summary.advice(self.state, self._messages())
        return shown + summary.missed(self._faults.missed)

    @property
    def _title(self) -> str:
        return f"{self._job.workload.kind} {self._job.workload.name}"

    def _last_line(self, pod: Pod) -> str:
        """What the container that counts wrote last; from any thread."""
        return self._system.last_line(f"{pod.name}/{pod.draft.main}")

    def live_rows(self, most: int) -> tuple[str, Sequence[Sequence[str]]]:
        """The live table's title and rows; called in its thread, so all that changes is read once."""
        state, steps, faults = self.state, dict(self._steps), self._faults
        over = (*faults.came, *(fault for fault, _ in faults.missed))
        to_come = [fault.text for fault in self._job.faults if fault not in over]
        top = max(steps.values(), default=None)
        title = summary.live_title(self._title, state, self.now_s(), top, len(faults.came), to_come)
        return title, summary.live_rows(state, steps, self._last_line, most)

    def _messages(self) -> dict[str, str]:
        pods, states = self.state.pods.values(), self.state.states
        containers = {pod.name: summary.deciding_container(pod, states[pod.name]) for pod in pods}
        return {pod.name: files.text(self.kubelet.termination_message(pod, containers[pod.name])) for pod in pods}

    def _words(self) -> dict[str, str]:
        return {name: text.partition("\n")[0] for name, text in self._messages().items()}

    # -- faults -------------------------------------------------------------------------------

    def now_s(self) -> float:
        """Seconds since the rehearsal began."""
        return self._system.now() - self._began_s

    def tell(self, entry: Entry) -> None:
        """Take it into the history."""
        self._recorder.add(entry)

    def leader(self, pod: str) -> int | None:
        """The first process of the container that counts, while it runs."""
        pid = self._pids.get(f"{pod}/{self.state.pods[pod].draft.main}")
        return pid if pid in self._running else None

    def scale(self, workers: int | None) -> None:
        """The controller sees another number of Worker replicas; None: one more than now."""
        assert self._job.grown is not None, "asked for before anything was started"
        self._grown = self._grown + 1 if workers is None else workers - workers_of(self._job.workload.drafts)
        workload = self._job.grown(self._grown)
        self.take(job_lifecycle.Scaled(self._system.now(), self.kubelet.of(workload), workload.rules))

    def _sense(self) -> None:
        if self._watch is None:
            return
        for one in self._watch.observations(self.processes, self.kubelet, self.state.pods):
            if isinstance(one, str):
                self._faults.said(one)
                continue
            self.tell(replace(one, at_s=max(0.0, one.at_s - self._began_s)))
            if one.step is not None and one.pod is not None:
                self._steps[one.pod] = one.step
                self._faults.reached(one.step)
        self._watch.patterns = self._faults.patterns

    # -- events -------------------------------------------------------------------------------

    def _events(self) -> list[Event]:
        failed, self._failed = self._failed, []
        if failed:
            return list(failed)
        due_s = min((at_s for at_s in self._times() if at_s is not None), default=None)
        made: list[Event] = list(self._of(self._system.wait(due_s)))
        if due_s is not None and self._system.now() >= due_s:
            made.append(job_lifecycle.Due(self._system.now()))
        return made

    def _times(self) -> Iterator[float | None]:
        yield self.state.due_s()
        yield self._watch.due_s if self._watch is not None else None
        if self.state.condition is None and (due_s := self._faults.due_s()) is not None:
            yield self._began_s + due_s

    def _of(self, happened: Happened) -> Iterator[Event]:
        now_s = self._system.now()
        for number in happened.signals:
            if number in STOP_SIGNALS:
                self._stop_signal = self._stop_signal or number
                yield StopAsked(now_s, self._grace_s)
            else:
                for pid in self._running:  # such as USR1: what it is for, each pod's launcher knows
                    self._system.signal_leader(pid, number)
        for pid, status in happened.ended:
            if pid in self._running:
                pod, _, container = self._running.pop(pid).partition("/")
                self._clear(pid, pod, container)
                yield Exited(now_s, pod, container, exit_codes.of_signal(-status) if status < 0 else status)

    def _clear(self, pid: int, pod: str, container: str) -> None:
        """A container ends with its first process: whatever that left behind is killed."""
        self._system.signal_group(pid, signal.SIGKILL)
        for _ in range(_SWEEPS):
            left = self.kubelet.processes_of(self.state.pods[pod], container)
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if not left:
                return
            psutil.wait_procs(left, timeout=_SWEEP_S)

    def take(self, event: Event) -> None:
        """Let the machine decide what comes of it, and do that."""
        before = self.state
        self.state, actions, said = job_lifecycle.step(before, event)
        if isinstance(event, Exited):
            path = self.kubelet.termination_message(self.state.pods[event.pod], event.container)
            sentence = told(before, self.state, event, files.text(path).partition("\n")[0])
            said = [sentence, *said] if sentence else said
        for entry in happened(before, self.state, event, actions):
            self.tell(entry)
        self._do(actions, said)

    # -- actions ------------------------------------------------------------------------------

    def _do(self, actions: list[Action], said: list[str]) -> None:
        self.kubelet.follow(self.state.running)
        for sentence in said:
            _log.warning("%s", sentence)
        for action in actions:
            if isinstance(action, Stop):
                self._stop(action)
            else:
                self._start(action)

    def _stop(self, action: Stop) -> None:
        pid = self._pids.get(f"{action.pod}/{action.container}")
        if pid is not None and action.kill:
            self._system.signal_group(pid, signal.SIGKILL)
        elif pid is not None:
            self._system.signal_leader(pid, signal.SIGTERM)  # the kubelet asks a container's first process only

    def _start(self, action: Start) -> None:
        pod, life = self.state.pods[action.pod], self.state.states[action.pod].starts
        try:
            self.kubelet.prepare(pod, action.container, life)
            process = self.kubelet.process(pod, action.container, life)
            pid = self._system.spawn(self.kubelet.placed(pod, process))
            self._pids[process.name], self._running[pid] = pid, process.name
        except (NotRunnableError, NodeError, OSError) as problem:
            _log.error("%s", problem)
            code = problem.exit_code if isinstance(problem, NotRunnableError) else exit_codes.NOT_FOUND
            self._failed.append(Exited(time.monotonic(), action.pod, action.container, code))


# -- watchdog ----------------------------------------------------------------------------------


_WAITS = Path(__file__).with_name("kubelet") / "watchdog_process.py"
_START_S = 20.0


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """While it is held, a process watches this one; `folder` stands in the environment of each pod's processes."""
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        argv = (sys.executable, "-I", "-S", str(_WAITS), str(folder))
        null = subprocess.DEVNULL
        streams = deadline_subprocess.Streams(stdin=read, stdout=null, stderr=null)
        done = deadline_subprocess.run(argv, None, _START_S, streams)
        os.close(read)
        if done.code != 0:
            why = done.failure or f"exit code {done.code}"
            _log.warning("if this rehearsal is killed by SIGKILL, its pods keep running: %s", why)
        yield
        with contextlib.suppress(OSError):
            os.write(write, b".")
    finally:
        os.close(write)


# -- history -----------------------------------------------------------------------------------


_ASKERS: tuple[tuple[type, str], ...] = ((PodDeleted, "fault"), (StopAsked, "user"))


def happened(before: State | None, after: State, event: Event | None, actions: Iterable[Action]) -> list[Entry]:
    """All that came of one event, in its order; without an event, of the beginning."""
    at_s = (after.began_s if event is None else event.at_s) - after.began_s
    asker = next((word for kind, word in _ASKERS if isinstance(event, kind)), "controller")
    return [
        *_ends(before, after, event, at_s),
        *_begins(before, after, at_s),
        *_done(after, actions, at_s, asker),
        *_condition(before, after, at_s),
    ]


def _ends(before: State | None, after: State, event: Event | None, at_s: float) -> Iterator[Entry]:
    if isinstance(event, Exited):
        yield Entry(at_s=at_s, what=What.CONTAINER_ENDED, pod=event.pod, container=event.container, code=event.code)
    for name, old in ({} if before is None else before.states).items():
        new = after.states[name]
        if _lives(old) and not new.in_place and (new.starts > old.starts or not _lives(new)):
            phase = Phase.FAILED if new.starts > old.starts else new.phase  # made anew at once, for it has failed
            yield Entry(at_s=at_s, what=What.POD_ENDED, pod=name, attempt=old.starts, text=phase.value)


def _begins(before: State | None, after: State, at_s: float) -> Iterator[Entry]:
    for name, new in after.states.items():
        old = PodState() if before is None else before.states.get(name, PodState())
        if new.starts > old.starts:
            yield Entry(at_s=at_s, what=What.POD_STARTED, pod=name, attempt=new.starts)


def _done(after: State, actions: Iterable[Action], at_s: float, asker: str) -> Iterator[Entry]:
    for action in actions:
        pod, container = action.pod, action.container
        if isinstance(action, Start):
            first = any(one.name == container and not one.sidecar for one in own_init(after.pods[pod]))
            attempt = after.states[pod].restarts.get(container, 0) + 1
            what, text = What.CONTAINER_STARTED, INIT if first else ""
            yield Entry(at_s=at_s, what=what, pod=pod, container=container, attempt=attempt, text=text)
        elif isinstance(action, Stop) and not action.kill:
            yield Entry(at_s=at_s, what=What.STOP_ASKED, pod=pod, container=container, text=asker)


def _condition(before: State | None, after: State, at_s: float) -> Iterator[Entry]:
    end = after.condition
    if end is not None and (before is None or before.condition is None):
        yield Entry(at_s=at_s, what=What.CONDITION, code=end.exit_code, text=end.text)


def _lives(state: PodState) -> bool:
    return state.phase in (Phase.INIT, Phase.RUNNING)


# -- restarts ----------------------------------------------------------------------------------


def told(before: State, after: State, event: Exited, message: str) -> str:
    """One sentence, empty where there is nothing to explain; `message` is the first line it left at its end."""
    old, new = before.states[event.pod], after.states[event.pod]
    if before.condition is not None or before.asked:
        return ""  # everything ends
    followed = _followed(old, new, event) if after.condition is None else ""
    if event.code == exit_codes.SUCCEEDED and not followed:
        return ""
    is_main = event.container == after.pods[event.pod].draft.main
    who = event.pod if is_main else f"{event.pod}/{event.container}"
    why = message.partition(" | ")[2] or exit_codes.describe(event.code)
    return f"{who} ended with exit code {event.code} ({why})" + (f"; {followed}" if followed else "")


def _followed(old: PodState, new: PodState, event: Exited) -> str:
    if old.stopping:
        if new.running or not old.disrupted:
            return ""
        return "it is not created again" if new.phase is Phase.GONE else f"a new pod follows in {old.back_s:g} s"
    count = new.restarts.get(event.container, 0)
    if new.starts == old.starts and count > old.restarts.get(event.container, 0):
        at_s = event.at_s + new.back_s if new.in_place else new.due_s.get(event.container, event.at_s)
        of = " of all containers" if new.in_place else ""
        return f"restart {count}{of} " + (f"in {wait_s:g} s" if (wait_s := at_s - event.at_s) else "now")
    return ""
