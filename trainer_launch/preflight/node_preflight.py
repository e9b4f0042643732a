"""The preflight of a node: alone, with the hosts of an MPI job, or with all nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host import logs
from trainer_launch.host.deadline_subprocess import begin_thread
from trainer_launch.host.slow_files import in_time
from trainer_launch.model import exit_codes
from trainer_launch.model.errors import UsageError
from trainer_launch.model.findings import QUIET, Finding, Measure, Report, Status
from trainer_launch.model.settings import Settings
from trainer_launch.model.signal_policy import STOP_SIGNALS, signal_name
from trainer_launch.model.units import counted
from trainer_launch.observability import live
from trainer_launch.preflight import (
    external_check,
    gpu_checks,
    mpi_hosts,
    policy,
    registry,
    report_formats,
    stamp,
    thresholds,
)
from trainer_launch.preflight.check import Check, Subject, Where, run, with_gpus
from trainer_launch.preflight.check import states as check_states
from trainer_launch.preflight.cluster import node_facts, node_side, present_nodes
from trainer_launch.preflight.cluster.cluster_preflight import ClusterPreflight
from trainer_launch.preflight.policy import Policy
from trainer_launch.preflight.report_formats import ReportPlace
from trainer_launch.preflight.rules import with_remedy
from trainer_launch.supervisor.inherited import hear

LOUD = (Status.FAIL, Status.WARN)
UNDER_LOAD = frozenset(check.id for check in registry.CHECKS if check.needs_load)
_UNDO_S = 5.0
_NOWHERE = ReportPlace(host=os.uname().nodename, node_rank=None, nodes=None, contract="")


class Selection(Struct, frozen=True):
    """The checks that --only names, and what --policy makes of each."""

    chosen: tuple[str, ...] = ()
    policy: Policy = Policy()

    @classmethod
    def of(cls, settings: Settings) -> Selection:
        """Raises UsageError where --policy makes no sense, or where nothing is left of --only."""
        chosen = registry.named(settings.only, "--only")
        selection = cls(chosen, policy.parse_flag(settings.policy))
        if settings.only is not None and settings.only.strip(", ") and not selection.chosen:
            raise UsageError(f"--only {settings.only[:60]} leaves no check to run; name others (preflight --list)")
        return selection

    def at(self, *places: Where) -> list[Check[Any]]:
        """The selected checks of these places."""
        chosen = self.chosen or registry.ids(*places)
        return [
            check for check in registry.at(*places) if check.id in chosen and not self.policy.leaves_out(check.id)
        ]

    def run(self, subject: Subject, checks: Sequence[Check[Subject]]) -> tuple[Finding, ...]:
        """In this container."""
        return self.kept(run(subject, checks).findings)

    def kept(self, findings: Sequence[Finding]) -> tuple[Finding, ...]:
        """The findings of checks that are not off, with their remedies and as severe as the policy has them."""
        heard = (finding for finding in findings if not self.policy.leaves_out(finding.check))
        return tuple(self.policy.graded(with_remedy(finding)) for finding in heard)

    def level(self, settings: Settings) -> str:
        """How far to look at GPUs: no load for checks that do not need it, or where gpu-load is not to be run."""
        is_idle = self.policy.leaves_out(gpu_checks.gpu_load.id) or (
            self.chosen and not UNDER_LOAD.intersection(self.chosen)
        )
        return "quick" if is_idle else settings.level


class NodeResult(Struct, frozen=True):
    """Everything that a preflight came to on this node."""

    report: Report
    measured: Sequence[Measure] = ()  # by all nodes, on node 0
    cluster: ClusterPreflight | None = None  # on node 0
    all_nodes: Sequence[Finding] = ()  # what was decided there, with every name
    is_cluster: bool = True  # there was a cluster preflight


def preflight(subject: Subject, settings: Settings, selection: Selection, doing: PreflightProgress) -> NodeResult:
    """All that is to be done on this node."""
    began_s = time.monotonic()
    level, doing.place = selection.level(settings), place_of(subject)
    machine, spared = _stamped(subject, settings, selection, level)
    subject = with_gpus(subject, "quick" if spared else level)
    doing.undo = external_check.kill
    before = () if spared else selection.run(subject, selection.at(Where.EXTERNAL))
    doing.undo = lambda: None
    obstacle = node_side.obstacle(subject, settings, selection.chosen, selection.policy.off)
    if obstacle is None:
        result = _together(subject, settings, selection, doing, before)
    else:
        result = _without_others(subject, settings, selection, doing, before, obstacle)
    doing.settle()
    findings = result.report.findings
    if machine is not None:
        under_load = {*UNDER_LOAD, external_check.external.id}
        name, folder = doing.place.name, stamp.FOLDER
        stamp.settle(machine, findings, under_load, name, folder=folder, is_spared=bool(spared))
    if spared:
        done = {finding.check for finding in findings}
        left_out = [check for check in selection.at(Where.EXTERNAL, Where.GPU) if check.id not in done]
        findings += tuple(check.skipped(spared) for check in left_out if _is_stamped(check, subject))
    report = Report(findings=findings, silenced=selection.policy.off, took_s=time.monotonic() - began_s)
    return replace(result, report=report)


def _is_stamped(check: Check[Any], subject: Subject) -> bool:
    """Whether a stamp spares this check, and it would do something."""
    if check.where is Where.EXTERNAL:
        return subject.external_check is not None
    return check.needs_load and subject.host.gpus.is_nvidia and subject.host.gpus.count > 0


def _stamped(
    subject: Subject, settings: Settings, selection: Selection, level: str
) -> tuple[stamp.Stamp | None, str]:
    """The stamp that this machine may get; and why its load tests are spared, "" where they are not."""
    limit_s = settings.skip_if_passed_within
    wanted = any(_is_stamped(check, subject) for check in selection.at(Where.EXTERNAL, Where.GPU))
    now = stamp.of_this_node(settings, selection.policy, level, subject.env) if limit_s and wanted else None
    if now is None or limit_s is None:
        return None, ""
    why_not = stamp.why_not(now, limit_s, stamp.FOLDER)
    if not why_not:
        return now, f"this machine passed within {limit_s / 3600:g} h (--skip-if-passed-within)"
    logs.say(f"nothing is skipped: {why_not}")
    return now, ""


def _without_others(
    subject: Subject,
    settings: Settings,
    selection: Selection,
    doing: PreflightProgress,
    before: Sequence[Finding],
    obstacle: str,
) -> NodeResult:
    """Check this container with its GPUs, and an MPI launcher's hosts; `before` are earlier findings."""
    began_s = time.monotonic()
    findings = [*before, *selection.run(subject, selection.at(Where.CONTAINER, Where.GPU))]
    figures = node_facts.measured(subject.cards)
    if figures:
        slow = gpu_checks.slow_gpus([subject.host.hostname], [figures], thresholds.load_table(settings.reference))
        findings += selection.kept(slow)
    if mpi_hosts.concerns(subject):
        doing.waiting = lambda: f"waiting for the hosts {mpi_hosts.named(subject)}"
        left_s = settings.wait_timeout - (time.monotonic() - began_s)
        wanted = selection.at(Where.MPI)
        findings += selection.kept(mpi_hosts.findings(subject, settings, wanted, left_s))
    elif not selection.chosen:
        # It limits what all others mean.
        findings[:0] = selection.kept(node_side.alone(subject, settings, obstacle))
    return NodeResult(Report(findings=tuple(findings)), figures, is_cluster=False)


def _together(
    subject: Subject, settings: Settings, selection: Selection, doing: PreflightProgress, before: Sequence[Finding]
) -> NodeResult:
    """Check this container while other nodes are awaited; node 0's name is looked up when that is over."""
    checks = selection.at(Where.CONTAINER, Where.GPU)
    at_once = [check for check in checks if not check.is_late]
    later = [check for check in checks if check.is_late]
    home = subject.topology.coordinator
    name = present_nodes.label(0, None if home is None else home.host)
    doing.waiting = lambda: f"waiting for {name}: it has just started"
    try:
        part = node_side.Gathering(subject, settings, selection.policy.off)
    except node_side.PortTakenError as problem:
        doing.waiting = str
        taken = selection.kept([present_nodes.port_taken(str(problem))])
        findings = (*taken, *before, *selection.run(replace(subject, deadline_s=0.0), checks))
        return NodeResult(Report(findings=findings))
    with part.undo:
        doing.waiting = part.waiting
        early = (*before, *selection.run(subject, at_once))
        subject = replace(subject, port_errors=subject.count_errors())
        decided = selection.kept(part.finish(early))
        own = (*early, *explained(selection.run(replace(subject, deadline_s=0.0), later), decided))
        report = Report(findings=merged(own, decided, part.own, registry.ids(Where.CLUSTER)))
        if part.server is None:
            return NodeResult(report)
        cluster = part.server.preflight
        return NodeResult(report, cluster.measured(), cluster, selection.kept(cluster.findings))


def place_of(subject: Subject) -> ReportPlace:
    """Where the report is made."""
    nodes = subject.topology.nodes
    return ReportPlace(
        host=subject.host.hostname,
        node_rank=subject.topology.node_rank,
        nodes=None if nodes is None else str(nodes),
        contract=subject.job.contract,
        machine=node_side.machine_of(subject),
    )


def merged(
    own: Sequence[Finding], decided: Sequence[Finding], name: str, checks: Collection[str]
) -> tuple[Finding, ...]:
    """All findings, each once: of findings of this node and others that are alike, this node's text stays.

    `checks` are those of all nodes together.
    """
    alike = {present_nodes.kind_of(finding): finding for finding in decided if finding.check not in checks}
    ours = []
    for finding in own:
        if finding.status in (*LOUD, Status.UNKNOWN):
            for shared in (present_nodes.of_few(finding), present_nodes.of_most(finding)):
                if present_nodes.kind_of(shared) in alike and present_nodes.kind_of(finding) not in alike:
                    finding = shared  # noqa: PLW2901  so was decided
            group = alike.pop(present_nodes.kind_of(finding), None)
            whom = name if group is None else group.subject
            ours.append(replace(finding, subject=whom if name in whom else f"{name}, {whom}"))
        else:
            ours.append(finding)
    rest = [finding for finding in decided if finding.check in checks or finding in alike.values()]
    return (*rest, *ours)


def explained(names: Sequence[Finding], decided: Sequence[Finding]) -> Iterator[Finding]:
    """The findings of `dns`: no fault of this node when all nodes have met, or when the job is at work already.

    All have found node 0 by its name then; a cache that still denies it on one node is right again in 30 s.
    """
    have_met = any(
        finding.check == present_nodes.all_present.id and finding.status is Status.PASS for finding in decided
    )
    for finding in names:
        is_explained = have_met and finding.status is Status.FAIL
        yield replace(finding, status=Status.WARN, fault=None) if is_explained else finding


class PreflightProgress:
    """The current work of the preflight, for a terminal and for the message of a stop."""

    def __init__(self, write_message: Callable[[str], None]) -> None:
        self.place = _NOWHERE
        self.waiting: Callable[[], str] = str  # for whom, in words
        self.undo: Callable[[], None] = lambda: None
        self.view = contextlib.ExitStack()  # what a terminal shows meanwhile
        self._last_word = threading.Lock()  # its owner writes the termination message: the verdict, or a stop
        self._write_message = write_message
        self._began_s = time.monotonic()
        heard, told = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(told, False)
        if begin_thread("signals", self._hear, heard):  # else the handlers that there are end this process
            signal.set_wakeup_fd(told, warn_on_full_buffer=False)
            hear(STOP_SIGNALS)

    def steps(self) -> list[tuple[str, str, str]]:
        """For a terminal: checks that found something or still run, how many others have ended, and the wait."""
        states = check_states()
        n_quiet = sum(status in QUIET for status in states.values())
        rows = [(counted(n_quiet, "check"), Status.PASS.name, "")] if n_quiet else []
        rows += [(name, status.name, "") for name, status in states.items() if status in (*LOUD, Status.UNKNOWN)]
        rows += [(name, live.RUNNING, "") for name, status in states.items() if status is None]
        waiting = self.waiting()
        return rows + ([("other nodes", live.RUNNING, waiting)] if waiting else [])

    def settle(self) -> None:
        """From here on the verdict stands; where a stop came first, this never returns."""
        self._last_word.acquire()

    def _hear(self, fd: int) -> None:
        """Never in a handler: the main thread, which would have to run it, may wait for a check."""
        was_asked = False
        for number in chain.from_iterable(iter(lambda: os.read(fd, 64), b"")):
            if was_asked and number == signal.SIGINT:  # whatever is under way
                os._exit(exit_codes.of_signal(number))
            was_asked = True
            if self._last_word.acquire(blocking=False) and begin_thread("stop", self._stop, number) is None:
                self._stop(number)

    def _stop(self, number: int) -> None:
        code = exit_codes.of_signal(number) if number == signal.SIGINT else exit_codes.STOPPED
        try:
            self._say_why(number, code)
        finally:
            os._exit(code)

    def _say_why(self, number: int, code: int) -> None:
        _in_time(self.view.close)
        parts = [self.waiting()] if self.waiting() else []
        running = [name for name, status in check_states().items() if status is None]
        parts += [f"running checks: {', '.join(running)}"] if running else []
        after_s, what = time.monotonic() - self._began_s, "; ".join(parts) or "starting"
        text = f"stopped by {signal_name(number)} after {after_s:.0f} s, while {what}"
        logs.warn(f"Preflight {text} (exit code {code})")
        self._write_message(report_formats.stopped(self.place, code, text))
        _in_time(self.undo)


def _in_time(act: Callable[[], None]) -> None:
    """The preflight ends also where it hangs or fails, as at a terminal that is gone."""
    with contextlib.suppress(Exception):
        in_time(repr(act), None, act, wait_s=_UNDO_S)
