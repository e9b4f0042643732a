"""`preflight`, the init container: check this container before the job starts, and say what to do."""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

from trainer_launch import preflight
from trainer_launch.commands.options import Parsed
from trainer_launch.host import deadline_subprocess, logs
from trainer_launch.model import Json, exit_codes
from trainer_launch.model.errors import LaunchError, NodeError
from trainer_launch.model.findings import Fault, Finding, Report, Status, exit_code, raised
from trainer_launch.model.settings import Settings
from trainer_launch.model.signal_policy import STOP_SIGNALS, signal_name
from trainer_launch.observability import termination_message
from trainer_launch.planning import engines
from trainer_launch.planning.gather import Reading, live_pod, ports_of, read
from trainer_launch.planning.topology import place
from trainer_launch.preflight import reference_values, report_json, report_text, still_running
from trainer_launch.preflight.check_context import Subject, with_container, with_gpus, with_network
from trainer_launch.preflight.cluster import verdict
from trainer_launch.preflight.cluster.heatmap_data import Seen, drawing
from trainer_launch.preflight.cluster.node_stages import Stage
from trainer_launch.preflight.container import dns
from trainer_launch.preflight.measurements import Measure
from trainer_launch.preflight.report_json import Place
from trainer_launch.supervisor import outcome

if TYPE_CHECKING:
    from trainer_launch.preflight.cluster.heatmap_data import Seen

HELP = "check this container and all nodes (an init container)"
ABOUT = "COMMAND, if it is given, is the one that 'run' will get; preflight checks that it can start."
EXAMPLES = """exit codes:
  0   passed, or only warnings (10 with --exit-warning)
  20  failed, retryable: a node or its environment is faulty
  30  failed, fatal: the job's configuration is wrong, a retry will not help
  2   invalid options or variables

examples:
  trainer-launch preflight -- train.py                 # check the command, too
  trainer-launch preflight --storage shared:/ckpt      # test the volume
  trainer-launch preflight --level container           # this container only
  trainer-launch preflight --level deep                # test everything
  trainer-launch preflight --skip dns --fatal cpu,mtu
  trainer-launch preflight --plot pairs.png            # plot the bandwidth
  trainer-launch preflight --json                      # the report as JSON
"""
STATE_FILE = "preflight.json"
_SHARED = "shared:"  # before a folder of --storage


@dataclass(frozen=True)
class _Told:
    """What was found, and by whom."""

    report: Report
    measured: Sequence[Measure] = ()  # by all nodes, on node 0
    seen: Seen | None = None  # by pairs of nodes, on node 0
    all_nodes: Sequence[Finding] = ()  # what was decided there, with every name
    elsewhere: str = ""  # the node whose log has the whole report, if that is another one


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What only `preflight` knows."""
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def main(parsed: Parsed) -> int:
    """The command.

    Raises:
        LaunchError: what was read makes no sense.
    """
    settings = parsed.settings
    if settings.preflight == "off":
        sys.stderr.write("preflight is off (--mode, TRAINER_LAUNCH_PREFLIGHT): nothing was checked\n")
        return exit_codes.SUCCEEDED
    try:
        return _main(parsed, settings, Doing(settings.termination_log))
    except LaunchError as problem:
        if isinstance(problem, NodeError):
            problem.exit_code = exit_codes.PREFLIGHT_RETRYABLE
        termination_message.refuse(problem, settings.termination_log)
        raise


def _main(parsed: Parsed, settings: Settings, doing: Doing) -> int:
    # `run`, which needs a part of this file, has no use for these.
    from trainer_launch.preflight import node_measurements, report_files, thresholds
    from trainer_launch.preflight.cluster import participation
    from trainer_launch.preflight.cluster import verdict as ending
    from trainer_launch.preflight.mpi import launcher_checks

    others = (*participation.CHECKS, *launcher_checks.CHECKS)
    chosen = preflight.names_in(settings.only, "--only", others)
    skipped = preflight.names_in(settings.skip, "--skip", others)
    fatal = preflight.names_in(settings.fatal, "--fatal", others)
    thresholds.parse(settings.threshold)
    reference_values.load(settings.reference)
    ports_of(settings)
    report_files.check(_files(settings))
    reading = read(live_pod(parsed.argv), settings)
    subject = with_network(with_container(subject_of(reading, settings)))
    subject = with_gpus(subject, node_measurements.level(settings, chosen, skipped))
    doing.place = place_of(subject)
    checks = [check for check in preflight.CHECKS if not chosen or check.NAME in chosen]
    alone = participation.obstacle(subject, settings, chosen, skipped)
    if alone is None:
        told = _together(subject, checks, settings, skipped, fatal, doing)
    else:
        told = _without_others(subject, checks, settings, (chosen, skipped, fatal), doing)
        if subject.has_peers and not chosen and not launcher_checks.concerns(subject):
            findings = (*told.report.findings, ending.not_held(alone))
            told = replace(told, report=replace(told.report, findings=findings))
    told = replace(told, report=replace(told.report, silenced=skipped))
    report = told.report
    code = exit_code(report.verdict, enforce=settings.preflight == "enforce", exit_warning=settings.exit_warning)
    doing.is_over = True
    _hand_out(told, doing.place, code, parsed)
    if settings.write_reference is not None and subject.topology.node_rank in (0, None):
        _write_reference(settings.write_reference, told.measured)
    if settings.plot is not None and subject.topology.node_rank in (0, None):
        plot(settings.plot, told.seen)
    if settings.report is not None and alone is None and subject.topology.is_coordinator:
        failing = participation.failing_nodes(told.all_nodes or report.findings)
        report_files.write("--report", participation.beside(settings.report), failing)
    return code


def _without_others(
    subject: Subject,
    checks: Sequence[ModuleType],
    settings: Settings,
    names: tuple[Sequence[str], Sequence[str], Sequence[str]],
    doing: Doing,
) -> _Told:
    """This container, and an MPI launcher's hosts; `names` are the chosen, skipped and fatal checks."""
    from trainer_launch.preflight import thresholds
    from trainer_launch.preflight.mpi import launcher_checks

    chosen, skipped, fatal = names
    told = _alone(subject, checks, settings, skipped, fatal)
    if not launcher_checks.concerns(subject):
        return told
    wanted = [name for name in launcher_checks.CHECKS if name not in skipped and name in (chosen or (name,))]
    doing.waiting = lambda: f"waiting for the hosts {launcher_checks.named(subject)}"
    of_pairs, _ = thresholds.parse(settings.threshold)
    left_s = settings.deadline - told.report.took_s
    found = launcher_checks.findings(subject, settings, of_pairs, wanted, left_s)
    findings = (*told.report.findings, *(raised(one, fatal) for one in found))
    return replace(told, report=replace(told.report, findings=findings))


def _alone(
    subject: Subject, checks: Sequence[ModuleType], settings: Settings, skipped: Sequence[str], fatal: Sequence[str]
) -> _Told:
    """This container's checks, and the judgement of its own GPUs."""
    from trainer_launch.preflight import node_measurements

    report = preflight.run(subject, checks, silenced=skipped, fatal=fatal)
    judged, measured = node_measurements.alone(subject.cards, settings, subject.host.hostname)
    loud = [raised(one, fatal) for one in judged if one.check not in skipped]
    return _Told(replace(report, findings=(*report.findings, *loud)), measured)


def _together(
    subject: Subject,
    checks: Sequence[ModuleType],
    settings: Settings,
    skipped: Sequence[str],
    fatal: Sequence[str],
    doing: Doing,
) -> _Told:
    """This container's checks while the others are waited for; the names are looked up when they are there."""
    from trainer_launch.preflight.cluster import participation

    began_s = time.monotonic()
    at_once = [check for check in checks if check is not dns]
    later = [check for check in checks if check is dns]
    doing.hold()
    with participation.gathering(subject, settings, skipped) as part:
        if isinstance(part, NodeError):  # the check of the port says so
            doing.release()
            return _Told(preflight.run(replace(subject, deadline_s=0.0), checks, silenced=skipped, fatal=fatal))
        doing.waiting, doing.undo = part.waiting, part.tokens.remove
        doing.release()
        if subject.topology.is_coordinator:
            subject = replace(subject, port_trouble=lambda port: None)  # it is the cluster preflight that has it
        found = preflight.run(subject, at_once, silenced=skipped, fatal=fatal).findings

        @functools.cache
        def here() -> tuple[Finding, ...]:
            last = preflight.run(replace(subject, deadline_s=0.0), later, silenced=skipped, fatal=fatal).findings
            order = [check.NAME for check in preflight.CHECKS]
            return tuple(sorted((*found, *last), key=lambda finding: order.index(finding.check)))

        verdict = part.finish(found, here)
        decided = [raised(finding, fatal) for finding in verdict.findings if finding.check not in skipped]
        own = tuple(explained(here(), decided, is_shared=verdict.is_shared))
        findings = merged(own, decided, part.own, participation.CHECKS)
        report = Report(findings=findings, took_s=time.monotonic() - began_s)
        is_elsewhere = verdict.is_shared and not subject.topology.is_coordinator
        told = [finding for finding in part.decided() if finding.check not in skipped]
        return _Told(report, part.measured(), part.seen(), told, part.home if is_elsewhere else "")


def subject_of(reading: Reading, settings: Settings) -> Subject:
    """What there is to check, without what has to be asked of the container itself.

    Raises:
        LaunchError: this node has no place in the job.
    """
    job, command = reading.job, reading.command
    folders = [path for path in (settings.storage or "").split(",") if path.removeprefix(_SHARED)]
    is_torch = job.engine in (None, "torchrun")
    if command is not None:
        is_torch = engines.pick(job, command, settings.engine)[0].NAME in ("torch", "torchrun")
    return Subject(
        job=job,
        host=reading.host,
        topology=place(job, reading.host),
        command=command,
        env=reading.pod.env,
        is_torch=is_torch,
        deadline_s=settings.deadline,
        ends_at_s=time.monotonic() + settings.deadline,
        shm_size=settings.shm_size,
        storage=tuple(path.removeprefix(_SHARED) for path in folders),
        shared=frozenset(path.removeprefix(_SHARED) for path in folders if path.startswith(_SHARED)),
    )


def place_of(subject: Subject) -> Place:
    """Where the report is made."""
    nodes = subject.topology.nodes
    return Place(
        host=subject.host.hostname,
        node_rank=subject.topology.node_rank,
        nodes=None if nodes is None else str(nodes),
        contract=subject.job.contract,
    )


def _hand_out(told: _Told, here: Place, code: int, parsed: Parsed) -> None:
    """To the pod's status, to the screen, to files. A node that is well only says where the whole report is."""
    from trainer_launch.preflight import report_files

    settings, report, elsewhere = parsed.settings, told.report, told.elsewhere
    at_s = time.time()
    made = _dumped(report_json.document(report, here, mode=settings.preflight, exit_code=code, at_s=at_s))
    message = outcome.fitted(report_text.last_words(report, here, code))
    is_again = _is_again(message, settings.termination_log)
    termination_message.write_last_words(message, settings.termination_log)
    if parsed.flags["json"]:
        sys.stdout.write(made)
    elif is_again:
        sys.stdout.write(report_text.again(report, here, code))
    elif elsewhere and not report_text.is_involved(report, here):
        sys.stdout.write(report_text.line(report, here, code, elsewhere))
    else:
        sys.stdout.write(report_text.screen(report, here, code, elsewhere))
    sys.stdout.flush()
    if settings.state_dir is not None:
        report_files.write("--state-dir", os.path.join(settings.state_dir, STATE_FILE), made, 0o600)
    if settings.report is not None:
        report_files.write("--report", settings.report, made)
    if settings.prometheus_file is not None:
        report_files.write(
            "--prometheus-file", settings.prometheus_file, report_text.prometheus(report, code, at_s)
        )


def _is_again(message: str, path: str) -> bool:
    """Whether this container, restarted with its files as in a rehearsal, found the same before."""
    try:
        before = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    found = message.partition("\n")[2]  # the first line has the time that it took
    return bool(found) and found == before.partition("\n")[2]


def _files(settings: Settings) -> dict[str, str | None]:
    """What is written in the end, by flag."""
    state = None if settings.state_dir is None else os.path.join(settings.state_dir, STATE_FILE)
    return {
        "--state-dir": state,
        "--report": settings.report,
        "--prometheus-file": settings.prometheus_file,
        "--write-reference": settings.write_reference,
    }


def _write_reference(path: str, measured: Sequence[Measure]) -> None:
    from trainer_launch.preflight import report_files

    rows = reference_values.measured(measured, time.strftime("%Y-%m-%d", time.gmtime()))
    if not rows:
        logs.warn(f"--write-reference: nothing was measured on a GPU, so {path} was not written")
        return
    report_files.write("--write-reference", path, reference_values.render(rows))


def _dumped(made: dict[str, Json]) -> str:
    return json.dumps(made, indent=2) + "\n"


# -- merged findings ---------------------------------------------------------------------------


LOUD = (Status.FAIL, Status.WARN)


def merged(
    own: Sequence[Finding], decided: Sequence[Finding], name: str, checks: Collection[str]
) -> tuple[Finding, ...]:
    """All findings, each once: what this node and others have found alike is told in this node's words.

    `checks` are those of all nodes together.
    """
    alike = {_kind(finding): finding for finding in decided if finding.check not in checks}
    told = []
    for finding in own:
        if finding.status in (*LOUD, Status.UNKNOWN):
            group = alike.pop(_kind(finding), None)
            others = [other for other in (group.subject.split(", ") if group else ()) if other != name]
            told.append(replace(finding, subject=", ".join((name, *others))))
        else:
            told.append(finding)
    rest = [finding for finding in decided if finding.check in checks or finding in alike.values()]
    return (*rest, *told)


def _kind(finding: Finding) -> tuple[str, Status, Fault | None]:
    """What `ending.grouped` puts together."""
    return finding.check, finding.status, finding.fault


def explained(own: Sequence[Finding], decided: Sequence[Finding], *, is_shared: bool) -> Iterator[Finding]:
    """This node's findings; that a name does not resolve is no fault of who looks when its node was never made.

    Nor does it matter to who rejoins a job that is at work, perhaps without that node.
    """
    reasons = (verdict.AT_WORK, Stage.NO_RECORD.value) if is_shared else (verdict.AT_WORK,)
    is_explained = any(one.check == verdict.NAME and one.measured in reasons for one in decided)
    for finding in own:
        if is_explained and finding.check == dns.NAME and finding.status is Status.FAIL:
            yield replace(finding, status=Status.WARN, fault=None)
        else:
            yield finding


# -- when stopped ------------------------------------------------------------------------------


_UNDO_S = 5.0
_NOWHERE = Place(host=os.uname().nodename, node_rank=None, nodes=None, contract="")


def _nothing() -> None:
    pass


class Doing:
    """What the preflight does at the moment; those who do it keep this up to date."""

    def __init__(self, termination_log: str) -> None:
        self.place = _NOWHERE
        self.waiting: Callable[[], str] = str  # for whom, in words
        self.undo: Callable[[], None] = _nothing
        self.is_over = False  # the report is being written: the verdict stands
        self._is_held, self._held = False, 0
        self._path = termination_log
        self._began_s = time.monotonic()
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)

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
        code = exit_codes.of_signal(number) if number == signal.SIGINT else exit_codes.STOPPED
        text = stopped(number, time.monotonic() - self._began_s, self.waiting(), still_running())
        logs.warn(f"Preflight {text} (exit code {code})")
        termination_message.write_last_words(report_text.stopped(self.place, code, text), self._path)
        undoing = threading.Thread(target=self.undo, daemon=True)  # this thread may hold a lock that it needs
        undoing.start()
        undoing.join(_UNDO_S)
        os._exit(code)


def stopped(number: int, after_s: float, waiting: str, checks: list[str]) -> str:
    """`stopped by SIGTERM after 12 s while …`."""
    doing = [waiting] if waiting else []
    doing += [f"running checks: {', '.join(checks)}"] if checks else []
    return f"stopped by {signal_name(number)} after {after_s:.0f} s, while {'; '.join(doing) or 'starting'}"


# -- plot --------------------------------------------------------------------------------------


_DRAWS = Path(__file__).parents[1] / "preflight" / "children" / "heatmap.py"
_LIMIT_S = 120.0  # the first time, matplotlib looks at all fonts
_WHYS = {3: "it needs matplotlib: pip install 'trainer-launch[report]'"}  # by the child's exit code


def plot(path: str, seen: Seen | None) -> None:
    """Draw it, or say why not: no job ends for want of a picture."""
    if seen is None or not seen.tests:
        logs.warn(f"--plot: {path} was not written: no pairs of nodes were tested")
        return
    argv = (sys.executable, str(_DRAWS), path)
    drawn = deadline_subprocess.run(
        argv, None, _LIMIT_S, deadline_subprocess.Streams(text=json.dumps(drawing(seen)))
    )
    if drawn.code != 0:
        last = (drawn.failure or drawn.out.strip() or drawn.err.strip()).splitlines()[-1:] or ["no word"]
        logs.warn(f"--plot: {path} was not written: {_WHYS.get(drawn.code or 1, last[0][:200])}")
