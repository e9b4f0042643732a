"""Who failed first when mpirun ended, by what it has said, and what that means. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.membership.retry_policy import is_of_code
from trainer_launch.model import Death, Member, exit_codes
from trainer_launch.mpi.mpirun_messages import Said
from trainer_launch.supervisor.error_lines import error_name, headline

_TAG = re.compile(r"\s*(?:\[[^\]\s]{1,80}\](?:<std(?:err|out)>)?:? *)?")  # before a line, by mpirun or torch
_CUT_OFF = "a rank lost another one, which had ended or was cut off before; mpirun does not say which"
_CUT_OFF_CODE = 14  # MPI_ERR_UNKNOWN, with which Open MPI 5 ends a rank that lost another one


class MpirunEnd(Struct, frozen=True):
    """mpirun has ended; what it said, and the last lines of its stderr."""

    death: Death  # its own
    said: Said
    lines: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """The exit code of the first failed rank, where that is known; mpirun's own otherwise."""
        return self.death.exit_code if self.said.exit_code is None else self.said.exit_code

    @property
    def signal(self) -> int | None:
        """The signal that ended the first failed rank; mpirun itself, where no rank has failed."""
        is_own = self.said.rank is None and self.said.exit_code is None
        return self.death.signal if self.said.signal is None and is_own else self.said.signal

    @property
    def is_unreached(self) -> bool:
        """Whether no daemon could be started on a host."""
        return bool(self.said.words) and self.said.rank is None


def death_of(end: MpirunEnd, attempt: int) -> Death:
    """The death of the first failed rank, with its last error; of a lost peer where only that is known."""
    said, error = end.said, _error_of(end).strip()
    return replace(
        end.death,
        attempt=attempt,
        rank=said.rank,
        host=said.host,
        code=None if end.signal is not None else end.code,
        signal=end.signal,
        lines=end.lines,
        error=error_name(error),
        # "": it named no error, and mpirun's own last words are none.
        message=_CUT_OFF if said.cut_off else error if end.signal is None else None,
        reason="PeerLost" if said.cut_off else None,
    )


def first_failure(end: MpirunEnd) -> MpirunEnd:
    """Nobody is named where only the end of a rank was told that had lost the failed one."""
    said = end.said
    if not said.cut_off:
        return end
    if said.signal is not None or end.code != _CUT_OFF_CODE or _error_of(end):
        return replace(end, said=replace(said, cut_off=False))  # who failed by itself is known
    return replace(end, said=Said(exit_code=exit_codes.INFRASTRUCTURE, cut_off=True))


def located(end: MpirunEnd, hosts: Sequence[Member]) -> MpirunEnd:
    """With the host of the first failed rank, where mpirun does not tell it: ranks fill the slots in order."""
    rank = end.said.rank
    if rank is None or end.said.host is not None:
        return end
    for member in hosts:
        if member.slots is None:
            return end
        if rank < member.slots:
            return replace(end, said=replace(end.said, host=member.host))
        rank -= member.slots
    return end


def _error_of(end: MpirunEnd) -> str:
    """The last error of the ranks; one of the code counts before what it has done to other ranks. "": none."""
    lines = [_TAG.sub("", line, count=1) for line in end.lines]
    of_code = (line for line in reversed(lines) if is_of_code(error_name(line), line))
    return next(of_code, None) or headline(lines, only_named=True)
