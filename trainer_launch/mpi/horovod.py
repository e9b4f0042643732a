"""horovodrun as the job starts it; what mpirun needs (hosts, ssh, restarts) is the same.

horovodrun finds an `ssh` of ours, which checks host keys. In an elastic job Horovod itself adds and drops hosts
while it trains; it asks a script of ours each second, which prints the hosts that the launcher can reach.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from trainer_launch.host import files, logs, network, runtime_directory
from trainer_launch.model import Member, Process, exit_codes, hostfile
from trainer_launch.model.units import counted
from trainer_launch.mpi import mpirun_command
from trainer_launch.mpi.host_access import HostAccess
from trainer_launch.mpi.hosted_program import HostedProgram
from trainer_launch.mpi.mpirun_messages import heard_of_horovod, rank_and_text
from trainer_launch.mpi.rank_environment import but_secrets
from trainer_launch.planning.mpi_options import COOLDOWN, INTERFACES, MIN_NUMBER, Typed

# Without a cooldown Horovod never takes a host back that has failed once; it doubles from the first to the second.
_COOLDOWN_S = ("2", "30")


class Horovodrun(HostedProgram):
    """horovodrun. Its way to end a rank on another host is to end its ssh, of which the rank hears nothing."""

    hands_signals_on = False
    leaves_ranks = True

    def __init__(
        self,
        process: Process,
        typed: Typed,
        access: HostAccess,
        everyone: Sequence[Member],
        wake: Callable[[], object],
    ) -> None:
        """`everyone` belongs to the job at its start."""
        super().__init__(process, typed, access, streams=(1, 2), wake=wake)
        self.adds_hosts = typed.is_elastic
        if typed.is_elastic:  # --num-proc is for the start, --min-num-proc for later
            number = typed.number or 1
            slots = min((member.slots or 1 for member in everyone), default=1)
            self.first_hosts = -(-number // slots)
            self.least_hosts = -(-(typed.number_of(*MIN_NUMBER) or number) // slots)
        folder = Path(access.spec.task.trial.scratch, runtime_directory.HOROVOD)
        self._bin, self._stopping, self._ready = folder / "bin", folder / "stopping", folder / "ready"
        self._bin.mkdir(parents=True, mode=0o700)
        stopping, ready = shlex.quote(str(self._stopping)), shlex.quote(str(self._ready))
        begin = shlex.join(_ssh(access, process.env))
        ssh = f'[ ! -e {stopping} ] || exit {exit_codes.STOPPED}\nexec {begin} "$@" </dev/null'
        self._script = folder / "discover"
        for path, text in ((self._bin / "ssh", ssh), (self._script, f"exec cat {ready}")):
            path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
            path.chmod(0o700)

    def stopping(self) -> None:
        """From now on its ssh starts nothing."""
        self._stopping.touch()

    def offer(self, members: Sequence[Member]) -> None:
        """Let Horovod's next question find who is there now."""
        if self.adds_hosts:
            lines = (f"{member.host}:{member.slots}\n" for member in with_slots(members))
            files.replace(str(self._ready), "".join(lines).encode())

    def process(
        self, members: Sequence[Member], everyone: Sequence[Member], number: int, addresses: Mapping[str, str]
    ) -> Process:
        """horovodrun on these hosts; an elastic one asks for them."""
        members, asked = with_slots(members), self.typed.number
        count = mpirun_command.ranks(asked, members, with_slots(everyone)) or mpirun_command.total(members)
        count = count or asked or 1
        if self.adds_hosts:
            self.offer(members)
            words = elastic_options(self.typed, count, str(self._script), _interface(addresses.values()))
        else:
            words = static_options(count, members)
        size = f"{counted(count, 'process')} on {counted(len(members) or 1, 'host')}"
        logs.say(f"start {number}: horovodrun with {size}")
        self._begin()
        argv = (self.typed.mpirun, *self.typed.kept, *words, *self.typed.program)
        env = horovod_env(self._process.env, self._access.spec.forward, str(self._bin))
        return replace(self._process, argv=argv, env=env)

    def _hear(self, text: str, stream: int) -> None:
        if text:
            self._said = heard_of_horovod(self._said, text, is_elastic=self.adds_hosts)
            self._lines.append(text)

    def _last_lines(self) -> Iterable[str]:
        """Horovod's own traceback says nothing of the cause where a rank has failed."""
        return (text for rank, text in map(rank_and_text, self._lines) if rank == self._said.rank)


def _ssh(access: HostAccess, env: Mapping[str, str]) -> tuple[str, ...]:
    client, port = access.client, access.port
    if client is None:
        found = shutil.which("ssh", path=env.get("PATH")) or "/usr/bin/ssh"
        return (found, *(("-p", str(port)) if port else ()))
    checks = "yes" if client.checks_host_keys else "no"  # horovodrun says no, but the first word stands
    return (*client.ssh, "-F", client.files.client, "-o", f"StrictHostKeyChecking={checks}")


# What is written here stands behind what was typed: of an option that is given twice, the last one counts.


def static_options(number: int, members: Sequence[Member]) -> tuple[str, ...]:
    """Options for these hosts; without any it runs here."""
    hosts = (f"--hosts={hostfile.render_horovod(members)}",) if members else ()
    return (f"--num-proc={number}", *hosts, "--disable-cache")


def elastic_options(typed: Typed, number: int, script: str, interface: str | None) -> tuple[str, ...]:
    """Options to ask `script` for the hosts, each second.

    Horovod looks for a common interface by itself only where two hosts are there, so one is named.
    """
    words = [f"--num-proc={number}", f"--host-discovery-script={script}", "--disable-cache"]
    if typed.names.isdisjoint(MIN_NUMBER):
        words.append(f"--min-num-proc={number}")
    if COOLDOWN not in typed.names:
        words += [f"--{COOLDOWN}", *_COOLDOWN_S]
    if interface is not None and typed.names.isdisjoint(INTERFACES):
        words.append(f"--{INTERFACES[0]}={interface}")
    return tuple(words)


def with_slots(members: Iterable[Member]) -> tuple[Member, ...]:
    """Horovod fails without."""
    return tuple(replace(member, slots=member.slots or 1) for member in members)


def horovod_env(given: Mapping[str, str], forward: Sequence[str], bin_folder: str) -> dict[str, str]:
    """The variables of horovodrun, which hands all on in command lines: no secrets; and our ssh."""
    names = but_secrets(given, (*forward, runtime_directory.MPI_RUN))
    ours = {"PATH": f"{bin_folder}:{given.get('PATH') or '/usr/bin:/bin'}"}
    return {**{name: given[name] for name in names}, **ours, "PYTHONUNBUFFERED": "1"}  # it is heard at once


def _interface(addresses: Iterable[str]) -> str | None:
    """Of this host the one that leads to the others: pods of one job have the same."""
    here = network.interfaces()
    names = [name for address in addresses if (name := network.interface_to(address, here))]
    return next((name for name in names if name != "lo"), names[0] if names else None)
