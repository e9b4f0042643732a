"""The command and the variables with which mpirun is started on these hosts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer_launch.host import runtime_directory
from trainer_launch.model import Member, hostfile
from trainer_launch.model.value_parsers import MAX_COUNT, parse_number
from trainer_launch.mpi import forwarded_variables, hydra, openmpi
from trainer_launch.mpi.mpi_version import Dialect
from trainer_launch.planning.mpi_launch_spec import SSH, Spec
from trainer_launch.planning.typed_mpirun import Typed


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What is started."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    hostfile: str | None  # its text
    is_hydra: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a start stands on."""

    hosts: tuple[Member, ...]  # that it uses
    everyone: tuple[Member, ...]  # that belong to the job
    hostfile: str  # where the list will be written
    ssh_config: str | None
    is_root: bool


def command(
    spec: Spec,
    typed: Typed,
    dialect: Dialect,
    env: Mapping[str, str],
    ground: Ground,
) -> Command:
    """mpirun on the hosts that are there."""
    hosts = ground.hosts
    number = ranks(typed.number, hosts, ground.everyone)
    where = ground.hostfile if hosts else None
    config = ground.ssh_config if spec.agent == SSH else None
    if dialect.is_hydra:
        names = forwarded_variables.but_secrets(env, (*spec.forward, runtime_directory.MPI_RUN))
        argv = hydra.argv(typed, where, number, names)
        told = hydra.env(env, dialect.name, config)
        text = hostfile.render_hydra(hosts)
    else:
        names = forwarded_variables.allowed(env, (*spec.forward, runtime_directory.MPI_RUN)) if hosts else ()
        argv = openmpi.argv(typed, where, number, names, is_root=ground.is_root)
        told = openmpi.env(env, dialect.major, config)
        text = hostfile.render_open_mpi(hosts)
    return Command(argv=argv, env=told, hostfile=text if hosts else None, is_hydra=dialect.is_hydra)


def ranks(asked: int | None, hosts: Sequence[Member], everyone: Sequence[Member]) -> int | None:
    """How many ranks: as typed, unless hosts are missing that it was meant for. None: mpirun counts the slots."""
    if asked is None:
        return None
    all_slots, slots = total(everyone), total(hosts)
    if all_slots is None or slots is None or asked > all_slots or not hosts:
        return asked
    return min(asked, slots)


def total(hosts: Sequence[Member]) -> int | None:
    """The room for ranks on all hosts, None where not every host tells."""
    slots = [host.slots for host in hosts]
    return None if None in slots else sum(slot for slot in slots if slot is not None)


def filtered(hosts: Sequence[Member], chosen: str) -> str:
    """The value of a typed -H as a list of hosts: names with the slots of the list, repeats counted."""
    known = {host.host: host.slots for host in hosts}
    words: dict[str, int | None] = {}
    for item in chosen.split(","):
        name, colon, count = item.strip().rpartition(":")
        slots = parse_number(count, 0, MAX_COUNT) if colon else None
        if slots is None:
            name = item.strip()
        if slots is not None:
            words[name] = slots
        elif name in words:
            words[name] = (words[name] or 0) + 1
        else:
            words[name] = known.get(name, 1)
    return hostfile.render_horovod(Member(name, slots) for name, slots in words.items())
