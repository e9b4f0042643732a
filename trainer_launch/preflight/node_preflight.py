"""One node's preflight, to all that it finds: alone, with the hosts of an MPI job, or with all nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host import logs
from trainer_launch.model import exit_codes
from trainer_launch.model.errors import NodeError, UsageError
from trainer_launch.model.findings import Finding, Measure, Report, Status, raised
from trainer_launch.model.settings import Settings
from trainer_launch.model.signal_policy import STOP_SIGNALS, signal_name
from trainer_launch.model.units import counted
from trainer_launch.observability import live
from trainer_launch.preflight import (
    gpu_checks,
    gpu_judgement,
    mpi_hosts,
    network_checks,
    registry,
    report_formats,
    thresholds,
)
from trainer_launch.preflight.check import Check, Subject, Where, run, with_gpus
from trainer_launch.preflight.check import states as check_states
from trainer_launch.preflight.cluster import node_facts, participation, present_nodes
from trainer_launch.preflight.cluster.nodes import PairTests
from trainer_launch.preflight.report_formats import ReportPlace
from trainer_launch.supervisor.inherited import stays_ignored

LOUD = (Status.FAIL, Status.WARN)
_UNDO_S = 5.0
_NOWHERE = ReportPlace(host=os.uname().nodename, node_rank=None, nodes=None, contract="")


class Selection(Struct, frozen=True):
    """The checks that --only, --skip and --fatal name."""

    chosen: tuple[str, ...]
    skipped: tuple[str, ...]
    fatal: tuple[str, ...]

    @classmethod
    def of(cls, settings: Settings) -> Selection:
        """Raises UsageError where one of them does not exist, or where nothing is left of --only."""
        named = (settings.only, "--only"), (settings.skip, "--skip"), (settings.fatal, "--fatal")
        selection = cls(*(registry.named(text, flag) for text, flag in named))
        if settings.only is not None and settings.only.strip(", ") and not selection.chosen:
            raise UsageError(f"--only {settings.only[:60]} leaves no check to run; name others (preflight --list)")
        return selection

    def at(self, *places: Where) -> list[Check[Any]]:
        """Those that are to run there."""
        chosen = self.chosen or registry.ids(*places)
        return [check for check in registry.at(*places) if check.id in chosen and check.id not in self.skipped]

    def run(self, subject: Subject, checks: Sequence[Check[Subject]]) -> tuple[Finding, ...]:
        """In this container."""
        return self.kept(run(subject, checks).findings)

    def kept(self, findings: Sequence[Finding]) -> tuple[Finding, ...]:
        """What checks found that are not skipped."""
        return tuple(raised(finding, self.fatal) for finding in findings if finding.check not in self.skipped)

    def level(self, settings: Settings) -> str:
        """How far to look at GPUs: no load for checks that do not need it, or where gpu-load is not to be run."""
        needing = {check.id for check in registry.CHECKS if check.needs_load}
        is_idle = gpu_checks.gpu_load.id in self.skipped or (self.chosen and not needing & set(self.chosen))
        return "quick" if is_idle else settings.level


class NodeResult(Struct, frozen=True):
    """What was found, and by whom."""

    report: Report
    measured: Sequence[Measure] = ()  # by all nodes, on node 0
    pair_tests: PairTests | None = None  # on node 0
    names: Sequence[str] = ()  # of all nodes that came, on node 0
    all_nodes: Sequence[Finding] = ()  # what was decided there, with every name
    elsewhere: str = ""  # the node whose log has the whole report, if that is another one
    is_cluster: bool = True  # there was a cluster preflight


def preflight(subject: Subject, settings: Settings, selection: Selection, doing: PreflightProgress) -> NodeResult:
    """All that is to be done on this node."""
    began_s = time.monotonic()
    subject = with_gpus(subject, selection.level(settings))
    doing.place = place_of(subject)
    obstacle = participation.obstacle(subject, settings, selection.chosen, selection.skipped)
    if obstacle is None:
        result = _together(subject, settings, selection, doing)
    else:
        result = _without_others(subject, settings, selection, doing, obstacle)
    doing.is_over = True
    took_s = time.monotonic() - began_s
    return replace(result, report=replace(result.report, silenced=selection.skipped, took_s=took_s))


def _without_others(
    subject: Subject, settings: Settings, selection: Selection, doing: PreflightProgress, obstacle: str
) -> NodeResult:
    """This container with its GPUs, and an MPI launcher's hosts."""
    began_s = time.monotonic()
    findings = [*selection.run(subject, selection.at(Where.CONTAINER, Where.GPU))]
    figures, sums = node_facts.measured(subject.cards)
    if figures or sums:
        table, (_, kinds) = thresholds.load_table(settings.reference), thresholds.parse_flag(settings.threshold)
        slow = gpu_judgement.findings([subject.host.hostname], [figures], table, kinds)
        findings += selection.kept([*gpu_judgement.differing({"": sums}), *slow])
    if mpi_hosts.concerns(subject):
        doing.waiting = lambda: f"waiting for the hosts {mpi_hosts.named(subject)}"
        left_s = settings.wait_timeout - (time.monotonic() - began_s)
        wanted = selection.at(Where.MPI)
        findings += selection.kept(mpi_hosts.findings(subject, settings, wanted, left_s))
    elif not selection.chosen:
        findings += participation.alone(subject, settings, obstacle)
    return NodeResult(Report(findings=tuple(findings)), figures, is_cluster=False)


def _together(subject: Subject, settings: Settings, selection: Selection, doing: PreflightProgress) -> NodeResult:
    """This container's checks while the others are waited for; node 0's name is looked up when that is over."""
    checks = selection.at(Where.CONTAINER, Where.GPU)
    at_once = [check for check in checks if check is not network_checks.dns]
    later = [check for check in checks if check is network_checks.dns]
    doing.hold()
    with participation.gathering(subject, settings, selection.skipped) as part:
        if isinstance(part, NodeError):  # the check of the port says so
            doing.release()
            return NodeResult(Report(findings=selection.run(replace(subject, deadline_s=0.0), checks)))
        doing.waiting, doing.undo = part.waiting, part.tokens.remove
        doing.release()
        if subject.topology.is_coordinator:
            subject = replace(subject, port_problem=lambda port: None)  # it is the cluster preflight that has it
        early = selection.run(subject, at_once)
        verdict = part.finish(early)
        decided = selection.kept(verdict.findings)
        own = (*early, *explained(selection.run(replace(subject, deadline_s=0.0), later), decided))
        report = Report(findings=merged(own, decided, part.own, registry.ids(Where.CLUSTER)))
        is_elsewhere = verdict.is_shared and not subject.topology.is_coordinator
        if part.server is None:
            return NodeResult(report, elsewhere=part.home if is_elsewhere else "")
        held = part.server.preflight
        return NodeResult(report, held.measured(), held.pair_tests, held.names, selection.kept(held.findings))


def place_of(subject: Subject) -> ReportPlace:
    """Where the report is made."""
    nodes = subject.topology.nodes
    return ReportPlace(
        host=subject.host.hostname,
        node_rank=subject.topology.node_rank,
        nodes=None if nodes is None else str(nodes),
        contract=subject.job.contract,
    )


def merged(
    own: Sequence[Finding], decided: Sequence[Finding], name: str, checks: Collection[str]
) -> tuple[Finding, ...]:
    """All findings, each once: what this node and others have found alike is told in this node's words.

    `checks` are those of all nodes together.
    """
    alike = {present_nodes.kind_of(finding): finding for finding in decided if finding.check not in checks}
    told = []
    for finding in own:
        if finding.status in (*LOUD, Status.UNKNOWN):
            group = alike.pop(present_nodes.kind_of(finding), None)
            whom = name if group is None else group.subject
            told.append(replace(finding, subject=whom if name in whom else f"{name}, {whom}"))
        else:
            told.append(finding)
    rest = [finding for finding in decided if finding.check in checks or finding in alike.values()]
    return (*rest, *told)


def explained(names: Sequence[Finding], decided: Sequence[Finding]) -> Iterator[Finding]:
    """What `dns` found: no fault of this node when all nodes have met, or when the job is at work already.

    All have found node 0 by its name then; a cache that still denies it on one node is right again in 30 s.
    """
    have_met = any(finding.check == present_nodes.NAME and finding.status is Status.PASS for finding in decided)
    for finding in names:
        is_explained = have_met and finding.status is Status.FAIL
        yield replace(finding, status=Status.WARN, fault=None) if is_explained else finding


class PreflightProgress:
    """What the preflight does at the moment; those who do it keep this up to date."""

    def __init__(self, write_message: Callable[[str], None]) -> None:
        self.place = _NOWHERE
        self.waiting: Callable[[], str] = str  # for whom, in words
        self.undo: Callable[[], None] = lambda: None
        self.is_over = False  # the report is being written: the verdict stands
        self.view = contextlib.ExitStack()  # what a terminal shows meanwhile
        self._is_held, self._held = False, 0
        self._write_message = write_message
        self._began_s = time.monotonic()
        for number in STOP_SIGNALS:
            if not stays_ignored(number):
                signal.signal(number, self._stop)

    def steps(self) -> list[tuple[str, str, str]]:
        """For a terminal: checks that found something or still run, how many others have ended, and the wait."""
        states = check_states()
        n_quiet = sum(status in (Status.PASS, Status.SKIPPED) for status in states.values())
        rows = [(counted(n_quiet, "check"), Status.PASS.name, "")] if n_quiet else []
        rows += [(name, status.name, "") for name, status in states.items() if status in (*LOUD, Status.UNKNOWN)]
        rows += [(name, live.RUNNING, "") for name, status in states.items() if status is None]
        waiting = self.waiting()
        return rows + ([("other nodes", live.RUNNING, waiting)] if waiting else [])

    def hold(self) -> None:
        """From here on a signal waits for `release`: what it is to undo is under way."""
        self._is_held = True

    def release(self) -> None:
        """Stop now, if a signal has come."""
        self._is_held = False
        if self._held:
            self._stop(self._held, None)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if self._is_held:
            self._held = number
            return
        if self.is_over:
            return
        self.is_over = True
        _in_time(self.view.close)
        code = exit_codes.of_signal(number) if number == signal.SIGINT else exit_codes.STOPPED
        parts = [self.waiting()] if self.waiting() else []
        running = [name for name, status in check_states().items() if status is None]
        parts += [f"running checks: {', '.join(running)}"] if running else []
        after_s, what = time.monotonic() - self._began_s, "; ".join(parts) or "starting"
        text = f"stopped by {signal_name(number)} after {after_s:.0f} s, while {what}"
        logs.warn(f"Preflight {text} (exit code {code})")
        self._write_message(report_formats.stopped(self.place, code, text))
        _in_time(self.undo)
        os._exit(code)


def _in_time(act: Callable[[], None]) -> None:
    """Do it in another thread: this one may hold a lock that it needs."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(_UNDO_S)
