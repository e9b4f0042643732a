"""Who belongs to the job now: the list that the platform mounts, the user's own, or a script that is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainer_launch.host import deadline_subprocess
from trainer_launch.host.files import LiveFiles
from trainer_launch.model import Member, hostfile
from trainer_launch.model.errors import ContractError, LaunchError, NodeError
from trainer_launch.model.value_parsers import named
from trainer_launch.planning.mpi_launch_spec import Spec

_MAX_BYTES = 8 << 20
_SCRIPT_S = 10.0  # kubelet mounts a script of echo lines; the user's own may ask somebody


def listed(spec: Spec) -> tuple[Member, ...]:
    """The hosts by list, in the order of ranks.

    Raises:
        LaunchError: a line makes no sense, or the file cannot be read.
    """
    if spec.hosts:
        members = hostfile.parse_horovod(spec.hosts, "--hosts", spec.contract)
    elif spec.hostfile is None:
        return ()
    else:
        data = LiveFiles(_MAX_BYTES + 1).read(spec.hostfile)
        if data is None:
            raise ContractError(f"the list of hosts {named(spec.hostfile)} cannot be read; is its volume mounted?")
        members = _parsed(data[:_MAX_BYTES].decode(errors="replace"), spec.hostfile, spec)
    return with_slots(members, spec)


def _parsed(text: str, where: str, spec: Spec) -> tuple[Member, ...]:
    """In the form of the platform's MPI; a file that the user typed may be of the other one."""
    forms = (hostfile.parse_open_mpi, hostfile.parse_hydra)
    first, other = reversed(forms) if spec.is_hydra_file else forms
    try:
        return first(text, where, spec.contract)
    except ContractError:
        with contextlib.suppress(ContractError):
            return other(text, where, spec.contract)
        raise


def with_slots(members: Sequence[Member], spec: Spec) -> tuple[Member, ...]:
    """The hosts with the number of ranks that each takes."""
    if spec.slots is None:
        return tuple(members)
    return tuple(replace(m, slots=spec.slots) if m.slots is None or spec.slots_are_given else m for m in members)


def discovered(spec: Spec) -> tuple[Member, ...] | None:
    """What the script prints; None where there is none. Blocks.

    Raises:
        LaunchError: it fails, takes too long, or prints what makes no sense.
    """
    if spec.discovery is None or not Path(spec.discovery).exists():
        return None
    done = deadline_subprocess.run((spec.discovery,), None, _SCRIPT_S)
    if done.timed_out:
        raise NodeError(f"{spec.discovery} did not end within {_SCRIPT_S:g} s")
    if done.code != 0:
        raise NodeError(f"{spec.discovery} failed: {done.failure or f'exit code {done.code}'}")
    return with_slots(hostfile.parse_discovery(done.out, spec.discovery, spec.contract), spec)


def merged(listed: Sequence[Member], now: Sequence[Member] | None, before: Sequence[Member]) -> tuple[Member, ...]:
    """The list, and who was discovered beyond it; who was discovered `before` stays in its place."""
    members = {member.host: member for member in listed}
    slots = next((member.slots for member in listed if member.slots is not None), None)
    found = {member.host: member for member in now or ()}
    order = [*(m for m in before if m.host in found), *found.values()]
    for member in order:
        newest = found[member.host]
        members.setdefault(member.host, newest if newest.slots is not None else replace(newest, slots=slots))
    return tuple(members.values())


class Watch:
    """Reads both again and again, and tells when the hosts have changed; what makes no sense changes nothing."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._elastic = spec.min_hosts is not None
        self.members = merged(listed(spec), None, ())
        self.trouble = ""

    def look(self) -> tuple[Member, ...]:
        """The hosts now. Blocks while a script runs."""
        try:
            found = discovered(self._spec) if self._elastic else None
            members = merged(listed(self._spec), found, self.members)
            self.trouble = ""
        except LaunchError as problem:
            self.trouble = str(problem)
            return self.members
        return members

    @property
    def has_list(self) -> bool:
        """Whether there is a list at all; without one mpirun runs here alone."""
        return bool(self._spec.hosts or self._spec.hostfile or (self._elastic and self._spec.discovery))

    @property
    def is_fixed(self) -> bool:
        """Whether the list cannot change."""
        return not self._spec.hostfile and not (self._elastic and self._spec.discovery)
