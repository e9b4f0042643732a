"""Who belongs to the job: a typed -H, or the list and the discovery script, which are read again and again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from trainer_launch.contracts import mpi_operator
from trainer_launch.host.deadline_subprocess import Ended
from trainer_launch.host.files import LiveFiles
from trainer_launch.model import Member, hostfile
from trainer_launch.model.errors import ContractError, LaunchError, NodeError
from trainer_launch.model.value_parsers import named
from trainer_launch.planning.mpi import Spec
from trainer_launch.planning.mpi_options import DISCOVERY, SLOTS, Typed

_MAX_BYTES = 8 << 20
_SCRIPT_S = 10.0  # kubelet mounts a script of echo lines; the user's own may ask somebody

Run = Callable[[Sequence[str], float], Ended]  # a command, and its limit in seconds


class HostList:
    """The hosts by list, in the order of ranks, and those that are discovered beyond it.

    What was typed goes before what the platform says. A list that makes no sense any more changes nothing.
    """

    def __init__(self, spec: Spec, typed: Typed) -> None:
        """Read it. Raises LaunchError: it makes no sense, or cannot be read."""
        job, slots = spec.task.job, typed.number_of(SLOTS)
        self._contract = job.contract
        self._file = typed.hostfile or (None if job.mpi is None else job.mpi.hostfile_path)
        self._is_hydra = job.mpi is not None and job.mpi.mpi_implementation in ("Intel", "MPICH")
        self._slots, self._slots_are_given = slots or spec.slots, slots is not None or spec.slots_are_given
        is_elastic = spec.min_hosts is not None or typed.is_elastic
        self._script = typed.values.get(DISCOVERY, mpi_operator.DISCOVERY) if is_elastic else None
        self.members = self._listed()
        self.trouble = ""
        if typed.hosts is not None:  # chooses among the list
            slots_of = {member.host: member.slots for member in self.members}
            chosen = hostfile.parse_horovod(typed.hosts, "-H", self._contract)
            self.members = self._with_slots(
                [replace(m, slots=slots_of.get(m.host, 1)) if m.slots is None else m for m in chosen]
            )
            self._file = self._script = None
        self.is_fixed = self._file is None and self._script is None
        self.exists = not self.is_fixed or typed.hosts is not None  # without one mpirun runs here alone

    def look(self, run: Run) -> tuple[Member, ...]:
        """The hosts now; `trouble` says why they could not be read. Blocks while `run` runs a script."""
        try:
            members = merged(self._listed(), self._discovered(run), self.members)
            self.trouble = ""
        except LaunchError as problem:
            self.trouble = str(problem)
            return self.members
        return members

    def _listed(self) -> tuple[Member, ...]:
        if self._file is None:
            return ()
        data = LiveFiles(_MAX_BYTES + 1).read(self._file)
        if data is None:
            raise ContractError(f"the list of hosts {named(self._file)} cannot be read; is its volume mounted?")
        return self._with_slots(self._parsed(data[:_MAX_BYTES].decode(errors="replace"), self._file))

    def _parsed(self, text: str, where: str) -> tuple[Member, ...]:
        """In the form of the platform's MPI; a file that the user typed may be of the other one."""
        forms = (hostfile.parse_open_mpi, hostfile.parse_hydra)
        first, other = reversed(forms) if self._is_hydra else forms
        try:
            return first(text, where, self._contract)
        except ContractError:
            with contextlib.suppress(ContractError):
                return other(text, where, self._contract)
            raise

    def _discovered(self, run: Run) -> tuple[Member, ...]:
        """What the script prints. Raises LaunchError: it fails, takes too long, or prints what makes no sense."""
        script = self._script
        if script is None or not Path(script).exists():
            return ()
        ended = run((script,), _SCRIPT_S)
        if ended.code != 0:
            raise NodeError(f"{script} failed: {ended.failure or f'exit code {ended.code}'}")
        return self._with_slots(hostfile.parse_discovery(ended.out, script, self._contract))

    def _with_slots(self, members: Sequence[Member]) -> tuple[Member, ...]:
        """With the ranks that each takes: the user's number replaces the list's, the platform's fills gaps."""
        if self._slots is None:
            return tuple(members)
        given = self._slots_are_given
        return tuple(replace(m, slots=self._slots) if given or m.slots is None else m for m in members)


def merged(listed: Sequence[Member], discovered: Sequence[Member], before: Sequence[Member]) -> tuple[Member, ...]:
    """The list, and who was discovered beyond it; who was discovered `before` stays in its place."""
    members = {member.host: member for member in listed}
    slots = next((member.slots for member in listed if member.slots is not None), None)
    newest = {member.host: member for member in discovered}
    for host in (*(member.host for member in before), *newest):
        if host in newest:
            member = newest[host]
            members.setdefault(host, member if member.slots is not None else replace(member, slots=slots))
    return tuple(members.values())
