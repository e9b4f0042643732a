"""sshd in an MPI worker: it stays while ranks come and go, and comes back when it crashes."""

from __future__ import annotations

from trainer_launch.host import runtime_directory
from trainer_launch.model import Job, Plan, Process
from trainer_launch.planning.command import Command
from trainer_launch.planning.engines.request import Request

NAME = "sshd"
_RESPAWNS = 100  # each costs milliseconds and ends no rank
# What has ranks below it and ends with them, by the kernel's names; asked to stop once their ranks have ended.
_DAEMONS = frozenset(
    ("sshd", "sshd-session", "sshd-auth", "orted", "prted", "hydra_pmi_proxy", "hydra_bstrap_pr", "pmi_proxy")
)


def serves(_job: Job, _command: Command) -> str | None:
    """Nothing by itself: `trainer-launch sshd` is a command of its own."""
    return None


def plan(request: Request, reason: str) -> Plan:
    """One process, sshd, as `request.command` has it; who is asked to stop first are the ranks."""
    env = {**request.env, runtime_directory.VARIABLE: request.scratch}
    return Plan(
        engine=NAME,
        processes=(Process(name="sshd", argv=request.command.argv, env=env, label=""),),
        grace_s=request.grace_s,
        signals=request.signals,
        respawns=_RESPAWNS,
        daemons=_DAEMONS,
        reasons=(reason,),
    )
