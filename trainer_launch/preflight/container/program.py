"""The command's program is there and may be run."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.errors import NotRunnableError
from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.planning import programs
from trainer_launch.preflight.check_context import Subject

NAME = "program"


def check(subject: Subject) -> Iterator[Finding]:
    """Look for it as a shell would."""
    if subject.command is None:
        yield Finding(check=NAME, status=Status.SKIPPED, text="no command was given after --")
        return
    try:
        programs.check(subject.command, subject.env.get("PATH"))
    except NotRunnableError as problem:
        text, _, action = str(problem).partition("; ")
        yield Finding(
            check=NAME,
            status=Status.FAIL,
            fault=Fault.JOB,
            text=text,
            measured=problem.exit_code,
            unit="exit code",
            action=action or "check the image and the command",
        )
        return
    yield Finding(check=NAME, status=Status.PASS, text=f"{subject.command.argv[0]} can be run")
