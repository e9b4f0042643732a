"""No shared memory of dead processes takes room: a pod's /dev/shm outlives its containers."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Finding, Status
from trainer_launch.model.units import counted, in_units
from trainer_launch.preflight.check_context import Subject

NAME = "shm-leftovers"
_SHARE = 0.05  # of /dev/shm; less than that is not worth a line
_SHOWN = 5


def check(subject: Subject) -> Iterator[Finding]:
    """Add up the segments of training programs that nobody has open any more."""
    found = subject.leftovers()
    taken = sum(segment.size_bytes for segment in found)
    if taken <= _SHARE * (subject.host.shm_bytes or 0):
        text = f"{in_units(taken)} of dead processes in /dev/shm" if taken else "nothing is left over in /dev/shm"
        yield Finding(check=NAME, status=Status.PASS, text=text, measured=taken, unit="bytes")
        return
    yield Finding(
        check=NAME,
        status=Status.WARN,
        text=f"dead processes left {counted(len(found), 'segment')} in /dev/shm, {in_units(taken)} in all",
        measured=taken,
        unit="bytes",
        evidence=tuple(f"{segment.name}: {in_units(segment.size_bytes)}" for segment in found[:_SHOWN]),
        action=f"remove them (rm /dev/shm/{found[0].name} ...), or let the pod be made anew",
    )
