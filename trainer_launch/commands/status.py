"""`status`: how the run in this container stands, and by the coordinator's word the whole job. Changes nothing."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from trainer_launch.commands import tables
from trainer_launch.commands.options import Parsed
from trainer_launch.errors import NodeError, UsageError
from trainer_launch.host.secret import read_secret
from trainer_launch.model import Endpoint, Json
from trainer_launch.status import news, node, progress
from trainer_launch.status.story import strict

HELP = "show the state of this pod's run and of its job"
ABOUT = "Use it with kubectl exec while the run is active."
USAGE = "[options]"
EXAMPLES = """examples:
  kubectl exec POD -- trainer-launch status
  kubectl exec POD -- trainer-launch status --json
  trainer-launch status --pid 4242      # one of several runs
"""
_NOWHERE = "these nodes do not meet at a coordinator of ours, so only they themselves are known"
_ANSWER_S = 3.0  # of each place


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What only `status` knows."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--pid", type=int, metavar="PID", help="show only the launcher with this process ID")


def main(parsed: Parsed) -> int:
    """The command.

    Raises:
        UsageError: no launcher runs here, or not the one that was named.
    """
    if parsed.argv:
        raise UsageError(f"status takes no command, found {parsed.argv[0]!r}; see trainer-launch status --help")
    views = _chosen(node.find(), parsed.flags["pid"])
    known = [_known(view) for view in views]
    job, problem = _ask(views)
    if parsed.flags["json"]:
        told: dict[str, Json] = {"launchers": tuple(known), "job": job, "job_problem": problem}
        sys.stdout.write(json.dumps(told, indent=2, allow_nan=False) + "\n")
    else:
        sys.stdout.write(tables.launchers(known, time.time()) + tables.job(job, problem))
    return 0


def _chosen(views: Sequence[node.View], pid: int | None) -> Sequence[node.View]:
    if not views:
        raise UsageError(
            "no trainer-launch run was found in this container; ask as the user that it runs as, "
            "with the same TMPDIR, and while it runs"
        )
    chosen = [view for view in views if pid in (None, view.pid)]
    if not chosen:
        found = ", ".join(str(view.pid) for view in views)
        raise UsageError(f"--pid is {pid}, but the launchers that run here have the pids {found}")
    return chosen


def _known(view: node.View) -> dict[str, Json]:
    """A launcher's own view, and what its workers say, by names that JSON keeps."""
    now_s = time.monotonic()
    reports: list[Json] = []
    for one in progress.read(view.run_dir):
        values = asdict(one)
        values["age_s"] = round(max(0.0, now_s - values.pop("at_s")), 1)
        values["metrics"] = {name: strict(number) for name, number in one.metrics.items()}
        reports.append(values)
    standing = asdict(news.standing(view.run_dir))
    return {**asdict(view), "standing": standing, "reports": reports}


def _ask(views: Sequence[node.View]) -> tuple[dict[str, Json] | None, str | None]:
    """The job's table by the first coordinator that answers, or why there is none."""
    problems = []
    from trainer_launch.coordinator.asking import ask

    for job, place, secret_file, known in dict.fromkeys(q for view in views for q in _questions(view)):
        try:
            secret = None if secret_file is None else read_secret(secret_file)
            status = ask(Endpoint(*place), job, secret, _ANSWER_S)
        except (NodeError, UsageError) as failed:
            problems.append(str(failed))
            continue
        if status.generation >= known:
            return asdict(status), None
        problems.append(
            f"the coordinator at {Endpoint(*place)} does not know generation {known}, where this node was"
        )
    return None, problems[0] if problems else _NOWHERE


def _questions(view: node.View) -> Iterator[tuple[str, tuple[str, int], str | None, int]]:
    """Job, place, file of the secret, and the generation that who is asked has to know: a standby knows none."""
    if view.job is not None and view.coordinator is not None:
        known = news.standing(view.run_dir).generation or 0
        for place in (view.coordinator, *view.seats):
            yield view.job, place, view.secret_file, known
