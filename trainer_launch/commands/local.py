"""`local`, the rehearsal: every pod of a job as its own launcher process on this machine, with gloo."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from trainer_launch import exits, log, outcome, programs
from trainer_launch.command import parse_command
from trainer_launch.commands.options import Parsed
from trainer_launch.commands.run import use_color
from trainer_launch.errors import UsageError
from trainer_launch.grammar import parse_nproc
from trainer_launch.horovodrun_options import is_horovodrun
from trainer_launch.host import net
from trainer_launch.model import Outcome, Plan, Process
from trainer_launch.mpi.typed import is_mpirun
from trainer_launch.rehearsal.flags import RUN, MpiFiles, RehearsedPod, mpi_hostfile, mpi_pods, pods
from trainer_launch.settings import Settings
from trainer_launch.signals import StopOrder
from trainer_launch.ssh import client, keys
from trainer_launch.supervisor.loop import supervise
from trainer_launch.supervisor.system import System

HELP = "rehearse a job on this machine: each pod is a launcher of its own"
USAGE = "[options] (-f JOB.yaml | -- COMMAND [ARG ...])"
EXAMPLES = """examples:
  trainer-launch local --nodes 2 --nproc-per-node 2 -- train.py
  trainer-launch local --nodes 3 -- torchrun --max-restarts=3 train.py
  trainer-launch local --engine mpi --nodes 2 -- mpirun python train_mpi.py
  trainer-launch local -f job.yaml -f runtime.yaml --render pods/
"""
_POD_GRACE = 0.75  # of ours: a pod has ended its workers before we end the pod


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What only `local` knows."""
    parser.add_argument(
        "-f",
        "--file",
        action="append",
        metavar="FILE",
        help="take the job from this manifest; repeat for its runtime",
    )
    parser.add_argument(
        "--command",
        dest="command_line",
        metavar="TEXT",
        help="run this in place of what the containers of -f that count would run",
    )
    parser.add_argument(
        "--render", metavar="DIR", help="write the pods of -f as snapshots for explain --pod, and run nothing"
    )


def main(parsed: Parsed) -> int:
    """The command: start the pods, show their output, print a table, return the first failure's exit code.

    Raises:
        LaunchError: the flags or the command do not fit.
    """
    if parsed.flags["file"]:
        return _from_manifests(parsed)
    for flag in ("render", "command_line"):
        if parsed.flags[flag]:
            raise UsageError(f"--{flag.partition('_')[0]} is about the pods of a manifest; name it with -f")
    settings = parsed.settings
    programs.check(parse_command(parsed.argv), os.environ.get("PATH"))
    scratch = Path(tempfile.mkdtemp(prefix="trainer-launch-local-"))
    try:
        rehearsed = _pods(parsed, scratch)
        plan = Plan(
            engine="local",
            processes=tuple(_process(pod, parsed, scratch) for pod in rehearsed),
            grace_s=settings.grace,
            stop_order=StopOrder.LEADER,
            main=rehearsed[-1].name if rehearsed[0].command[0] == "sshd" else None,
        )
        started = time.monotonic()
        system = System(color=False)  # the pods colour their own prefixes
        log.send_through(system.say)
        with contextlib.closing(system):
            ended = supervise(plan, system)
        sys.stdout.flush()
        sys.stderr.write(_table(ended, started, scratch))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return outcome.exit_code(ended)


def _from_manifests(parsed: Parsed) -> int:
    from trainer_launch.commands import manifests  # only who has a manifest pays for it

    if parsed.argv:
        raise UsageError("with -f the manifest has the command; --command 'PROGRAM ARG ...' runs another one")
    workload = manifests.load(parsed.flags["file"])
    manifests.tell_ignored(workload)
    if not parsed.flags["render"]:
        from trainer_launch.commands.rehearse import rehearse

        return rehearse(workload, parsed)
    sys.stdout.write(manifests.render(workload, parsed.flags["render"]))
    return 0


def _is_mpi(engine: str, argv: Sequence[str]) -> bool:
    """Whether a launcher starts the ranks, by ssh."""
    return engine in ("mpi", "horovodrun") or (engine == "auto" and (is_mpirun(argv[0]) or is_horovodrun(argv)))


def _pods(parsed: Parsed, scratch: Path) -> Sequence[RehearsedPod]:
    """The job's pods; those of MPI have files mounted, which are made here."""
    settings, nodes, nproc = parsed.settings, _nodes(parsed.settings), _nproc(parsed.settings)
    if not _is_mpi(settings.engine, parsed.argv):
        return pods(nodes, nproc, net.free_port(), os.environ)
    if not nproc.isdigit():
        raise UsageError(f"--nproc-per-node is {nproc!r}; a rehearsal of MPI takes one whole number")
    files = MpiFiles(hostfile=str(scratch / "hostfile"), ssh_dir=str(scratch / "keys"), tmp=str(scratch))
    rehearsed = mpi_pods(nodes, int(nproc), net.free_port(), files, os.environ)
    for pod in rehearsed:
        (scratch / pod.name).mkdir()
    (scratch / "hostfile").write_text(mpi_hostfile(nodes, int(nproc)), encoding="ascii")
    keys.make(files.ssh_dir, client.find("ssh-keygen", os.environ.get("PATH")))
    return rehearsed


def _process(pod: RehearsedPod, parsed: Parsed, scratch: Path) -> Process:
    settings = parsed.settings
    is_mpi = "PET_NODE_RANK" not in pod.env  # mpirun has a --tag-output of its own
    prefix = settings.prefix if is_mpi or "prefix" in settings.model_fields_set else True
    flags = {
        "PREFIX": str(int(prefix)),
        "COLOR": "always" if prefix and use_color(settings) else "never",
        "GRACE": f"{settings.grace * _POD_GRACE:g}",
        "STOP_ORDER": settings.stop_order,
        "ENGINE": "auto" if settings.engine == "mpi" else settings.engine,
        "RENDEZVOUS": settings.rendezvous,
        "SHM_SIZE": "keep",  # this machine's, which all pods of the rehearsal share
        "START_METHOD": settings.start_method,
        "LOG_LEVEL": settings.log_level if "log_level" in settings.model_fields_set else "warning",
        "TERMINATION_LOG": str(_last_words(scratch, pod.name)),
        "NODE_LABEL": pod.label,
    }
    if settings.signals is not None:
        flags["SIGNALS"] = settings.signals
    # Of events: all pods add to one file, each line with its node.
    for name in ("max_restarts", "hang_timeout", "events", "preload"):
        value = getattr(settings, name)
        if value is not None:
            flags[name.upper()] = value
    return Process(
        name=pod.name,
        argv=(sys.executable, "-c", RUN, *pod.command, *(parsed.argv if pod.command[0] == "run" else ())),
        env={**pod.env, **{f"TRAINER_LAUNCH_{name}": value for name, value in flags.items()}},
        label="",  # whole lines of one pod at a time; the pod itself knows which worker wrote them
    )


def _nodes(settings: Settings) -> int:
    text = settings.nodes or "1"
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"--nodes is {text!r}; a rehearsal takes one whole number")
    return int(text)


def _nproc(settings: Settings) -> str:
    text = settings.nproc_per_node or "1"
    if parse_nproc(text) is None:
        raise UsageError(f"--nproc-per-node is {text!r}; expected a number, or auto, gpu, cpu")
    return text


def _last_words(scratch: Path, pod: str) -> Path:
    return scratch / f"{pod}.termination-log"


def _table(ended: Outcome, started_s: float, scratch: Path) -> str:
    """Pod, exit code, time, first line of its last words."""
    rows = [("POD", "EXIT", "SECONDS", "LAST WORDS")]
    for death in ended.exits:
        code = death.exit_code
        words = _first_line(_last_words(scratch, death.process)) or exits.describe(code)
        rows.append((death.process, str(code), f"{death.at_s - started_s:.1f}", words))
    rows[1:] = sorted(rows[1:], key=lambda row: (len(row[0]), row[0]))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "".join(
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}\n" for row in rows
    )


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return ""
