"""The help of each command, and the flags that only this command has. `--help` loads nothing else."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from trainer_launch.model import removed

INCIDENT_ACTIONS = ("list", "show", "collect")
WRAPPING = "[options] -- COMMAND [ARG ...]"  # the usage of a command that runs another one


def _action(word: str) -> str:
    removed.refuse(f"incidents {word}")
    return word


def _flag(*names: str, **about: Any) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """A flag or a word that only one command has, as argparse takes it."""
    return names, about


class CommandHelp(Struct, frozen=True, kw_only=True):
    """The help of a command, and its own flags."""

    help: str  # a line in the list of commands
    about: str
    examples: str
    usage: str = WRAPPING
    flags: tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...] = ()


CATALOG = {
    "run": CommandHelp(
        help="run a training command (the container's ENTRYPOINT)",
        about="COMMAND is a Python script, '-m MODULE', torchrun, accelerate launch, mpirun, horovodrun, or any "
        "program. The launcher starts the workers and restarts them after failures.",
        examples="""examples:
  trainer-launch run -- python train.py --lr 1e-3
  trainer-launch run -- torchrun --max-restarts=3 train.py
  trainer-launch run --nproc-per-node 4 -- -m my_package.train
  trainer-launch run --hang-timeout 600 -- train.py
  trainer-launch run -- accelerate launch --config_file fsdp.yaml train.py

exit codes:
  143    the pod was asked to stop (SIGTERM)
  138    the infrastructure failed: a node, a device, the network
  2      invalid options or variables (126, 127: the program cannot be started)
  other  the program's own
""",
    ),
    "preflight": CommandHelp(
        help="check this container and all nodes (an init container)",
        about="COMMAND is the one that 'run' will get. It is optional; preflight compares it across the nodes.",
        flags=(
            _flag("--json", action="store_true", help="print the report as one JSON object"),
            _flag("--list", action="store_true", help="print all checks, then exit"),
        ),
        examples="""exit codes:
  0   passed, or only warnings
  20  failed, retryable: a node or its environment is faulty
  30  failed, fatal: the job's configuration is wrong, a retry will not help
  2   invalid options or variables

examples:
  trainer-launch preflight -- train.py                 # compare the code, too
  trainer-launch preflight --storage /ckpt             # test the volume
  trainer-launch preflight --level container           # this container only
  trainer-launch preflight --policy dns=off,cpu=fatal  # set severities
  trainer-launch preflight --policy observe            # run all, fail none
  trainer-launch preflight --report report.html        # write a page
  trainer-launch preflight --json                      # print JSON
  trainer-launch preflight --report healthy.json       # save healthy speeds
  trainer-launch preflight --reference healthy.json    # compare with these
""",
    ),
    "sshd": CommandHelp(
        help="run sshd in an MPI worker pod",
        about="sshd accepts only the job's key. If it crashes, the pod ends.",
        usage="[options]",
        examples="""examples:
  trainer-launch sshd                           # the command of a worker pod
  trainer-launch sshd --ssh-dir /keys --ssh-port 2222
""",
    ),
    "explain": CommandHelp(
        help="show what was read from the pod and what would run",
        about="Nothing is changed or started.",
        flags=(
            _flag("--json", action="store_true", help="print one JSON object, with every detail"),
            _flag("--pod", metavar="FILE", help="read this pod snapshot instead of the container"),
            _flag("--save-pod", metavar="FILE", help="write a snapshot of this pod; secrets are redacted"),
        ),
        examples="""examples:
  trainer-launch explain -- train.py                 # in this container
  trainer-launch explain --json -- torchrun train.py # the whole plan, as JSON
  trainer-launch explain --save-pod pod.json         # for a bug report
  trainer-launch explain --pod pod.json -- train.py  # explain that snapshot
""",
    ),
    "status": CommandHelp(
        help="show the state of this pod's run and of its job",
        about="Use it with kubectl exec while the run is active.",
        usage="[options]",
        flags=(
            _flag("--json", action="store_true", help="print one JSON object"),
            _flag("--pid", type=int, metavar="PID", help="show only the launcher with this process ID"),
        ),
        examples="""examples:
  kubectl exec POD -- trainer-launch status
  kubectl exec POD -- trainer-launch status --json
  trainer-launch status --pid 4242      # one of several runs
""",
    ),
    "incidents": CommandHelp(
        help="show what was collected about failures and hangs",
        about="Use it with kubectl exec, or on a copied directory.",
        usage="[list | show [ID] | collect] [options]",
        flags=(
            _flag(
                "action",
                nargs="?",
                default="list",
                type=_action,
                choices=INCIDENT_ACTIONS,
                metavar="ACTION",
                help=argparse.SUPPRESS,
            ),
            _flag("id", nargs="?", metavar="ID", help=argparse.SUPPRESS),
            _flag("--json", action="store_true", help="print JSON"),
        ),
        examples="""examples:
  kubectl exec POD -- trainer-launch incidents
  kubectl exec POD -- trainer-launch incidents collect       # of all nodes, now
  kubectl exec POD -- trainer-launch incidents show          # the newest one
  kubectl cp POD:/tmp/trainer-launch-incidents ./copied    # copy them all
  trainer-launch incidents show --incident-dir ./copied
""",
    ),
    "rehearse": CommandHelp(
        help="rehearse a job on this machine",
        about="Each pod runs as local processes, with the environment variables that a real pod would get.",
        usage="[options] (-f JOB.yaml | -- COMMAND [ARG ...])",
        flags=(
            _flag(
                "-f",
                "--file",
                action="append",
                metavar="FILE",
                help="manifest of the job; repeat -f for its runtime, ConfigMaps and Secrets",
            ),
            _flag(
                "--command",
                dest="command_line",
                metavar="TEXT",
                help="run this instead of the command in the manifest",
            ),
            _flag("--skip-init", action="append", metavar="NAME", help="skip this init container; may be repeated"),
            _flag(
                "--render", metavar="DIR", help="write the pods of -f as snapshots for explain --pod; run nothing"
            ),
            _flag(
                "--fault",
                action="append",
                metavar="TEXT",
                help="inject this fault, such as 'kill worker node=1 at=step:40'; may be repeated; listed above",
            ),
            _flag(
                "--report",
                dest="reports",
                action="append",
                metavar="FILE.html|.json",
                help="write a report: a page for people or data for programs; may be repeated",
            ),
        ),
        examples="""examples:
  trainer-launch rehearse --nodes 2 --nproc-per-node 2 -- train.py
  trainer-launch rehearse --nodes 3 -- torchrun --max-restarts=3 train.py
  trainer-launch rehearse --engine mpi --nodes 2 -- mpirun python train_mpi.py
  trainer-launch rehearse --nodes 2 --spares 1 -- train.py
  trainer-launch rehearse -f job.yaml -f runtime.yaml --render pods/
  trainer-launch rehearse --nodes 3 --fault 'kill pod at=step:40' -- train.py

faults:
  kill worker [worker=LOCAL_RANK]    stop worker [worker=N] [for=20s]
  kill pod [back=3s|never]           term pod [grace=10s] [back=3s|never]
  partition [for=10s]                delay dns 20s
A fault hits the last node, unless node=N or pod=NAME names another one. It is
injected at step 1, or at=12s, at=1m, at=step:40, or at=line:REGEX (of output).
""",
    ),
    "install-shims": CommandHelp(
        help="install shims: torchrun, mpirun, … run under the launcher",
        about="Use them where an SDK writes the command and the image's ENTRYPOINT never runs.",
        usage="DIR",
        flags=(_flag("directory", nargs="?", metavar="DIR", help=argparse.SUPPRESS),),
        examples="""examples:
  trainer-launch install-shims /opt/shims     # put it first in PATH
  TRAINER_LAUNCH_SHIM=off torchrun train.py   # the real torchrun, unchanged
""",
    ),
}
