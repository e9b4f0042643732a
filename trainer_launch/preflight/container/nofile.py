"""A process may open as many files and sockets as a worker of a job this large does."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.model.units import counted
from trainer_launch.preflight.check_context import Subject

NAME = "nofile"
OF_A_CONTAINER = True
BASE = 256  # libraries, data files, loaders' pipes
EACH_RANK = 2  # gloo connects each rank with each, NCCL its root with all and the others with some


def check(subject: Subject) -> Iterator[Finding]:
    """Compare the soft limit, which a program starts with."""
    soft, hard = subject.limits.nofile_soft, subject.limits.nofile_hard
    need = BASE + EACH_RANK * subject.ranks
    if soft is None or soft >= need:
        text = (
            "open files are not limited" if soft is None else f"{soft} open files are allowed, {need} may be needed"
        )
        yield Finding(check=NAME, status=Status.PASS, text=text, measured=soft, unit="files")
        return
    can_raise = hard is None or hard >= need
    is_gloo = subject.is_torch and not subject.may_use_gpus  # it connects each rank with each, surely
    is_certain = soft < BASE // 2 or (is_gloo and soft < subject.ranks)
    yield Finding(
        check=NAME,
        status=Status.FAIL if is_certain else Status.WARN,
        fault=Fault.JOB if is_certain else None,
        text=f"a process may open {soft} files; a worker of {counted(subject.ranks, 'rank')} may need {need}",
        measured=soft,
        expected=need,
        unit="files",
        action=f"ulimit -n {need} before the command"
        if can_raise
        else f"raise LimitNOFILE of the container runtime on the nodes (hard limit {hard})",
    )
