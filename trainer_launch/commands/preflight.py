"""`preflight`, the init container: check this container before the job starts, and say what to do."""

from __future__ import annotations

import json
import os
import sys
import time

from trainer_launch.commands.options import Parsed
from trainer_launch.host.files import at_start
from trainer_launch.membership.quarantine import FAILING_NODES
from trainer_launch.model import exit_codes
from trainer_launch.model.findings import exit_code
from trainer_launch.model.settings import Settings
from trainer_launch.observability import live
from trainer_launch.planning.reading import live_pod, read
from trainer_launch.planning.task import ports_of
from trainer_launch.preflight import (
    external_check,
    node_preflight,
    registry,
    report_formats,
    report_page,
    thresholds,
)
from trainer_launch.preflight.check import subject_of, with_network
from trainer_launch.preflight.cluster import node_side
from trainer_launch.preflight.node_preflight import NodeResult, PreflightProgress, Selection
from trainer_launch.preflight.policy import Policy
from trainer_launch.preflight.report_formats import ReportPlace
from trainer_launch.supervisor import inherited, outcome


def main(parsed: Parsed) -> int:
    """The command.

    Raises:
        LaunchError: what was read makes no sense.
    """
    settings = parsed.settings
    if parsed.flags["list"]:
        sys.stdout.write(registry.listed())
        return exit_codes.SUCCEEDED

    def write_message(text: str) -> None:
        outcome.write_termination_message(text, settings.termination_log)

    return _main(parsed, settings, PreflightProgress(write_message))


def _main(parsed: Parsed, settings: Settings, doing: PreflightProgress) -> int:
    selection = Selection.of(settings)
    if selection.policy.is_off:
        sys.stderr.write("preflight is off (--policy, TRAINER_LAUNCH_POLICY): nothing was checked\n")
        return exit_codes.SUCCEEDED
    external_check.command_of(settings.external_check)
    thresholds.load_table(settings.reference)
    ports_of(settings)
    report_formats.check_file(settings.report)
    reading = at_start("to read this pod", read, live_pod(parsed.argv), settings)
    subject = with_network(subject_of(reading, settings))
    with doing.view:
        if live.is_wanted():
            doing.view.enter_context(live.progress(doing.steps))
        result = node_preflight.preflight(subject, settings, selection, doing)
    code = exit_code(result.report.verdict)
    _hand_out(result, doing.place, code, parsed, selection.policy)
    if result.is_cluster and subject.topology.is_coordinator:
        machines = result.cluster.machines if result.cluster is not None else {}
        failing = node_side.failing_nodes(result.all_nodes or result.report.findings, machines)
        beside = None if settings.report is None else os.path.join(os.path.dirname(settings.report), FAILING_NODES)
        report_formats.write_file(beside, failing)
    return code


def _hand_out(result: NodeResult, here: ReportPlace, code: int, parsed: Parsed, policy: Policy) -> None:
    """To the pod's status, to the screen, to files."""
    settings, report = parsed.settings, result.report
    at_s = time.time()
    measured = thresholds.measured(result.measured, time.strftime("%Y-%m-%d", time.gmtime(at_s)))
    document = report_formats.document(report, here, policy=policy, exit_code=code, at_s=at_s, measured=measured)
    made = json.dumps(document, indent=2) + "\n"
    message = outcome.fitted(report_formats.termination_message(report, here, code))
    outcome.write_termination_message(message, settings.termination_log)
    inherited.leave()
    if parsed.flags["json"]:
        sys.stdout.write(made)
    else:
        sys.stdout.write(report_formats.screen(report, here, code))
    sys.stdout.flush()
    if (settings.report or "").lower().endswith(report_formats.PAGE):
        of_all = () if result.cluster is None else (result.cluster.names, result.cluster.pair_tests)
        made = report_page.page(report, here, code, at_s, *of_all)
    report_formats.write_file(settings.report, made)
