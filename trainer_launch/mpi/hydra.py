"""Hydra, the mpirun of MPICH and of Intel MPI: its command line and its variables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer_launch.mpi.mpi_version import INTEL
from trainer_launch.planning.typed_mpirun import Typed

_LAUNCHERS = ("launcher", "bootstrap", "rmk")
_ENVIRONMENTS = ("genvall", "genvnone", "genvlist", "envall", "envnone", "envlist")


def argv(typed: Typed, hostfile: str | None, number: int | None, forward: Sequence[str]) -> tuple[str, ...]:
    """The command: ours first, then what was typed."""
    words: list[str] = [typed.mpirun]
    if hostfile is not None:
        words += ["-f", hostfile]
        if typed.names.isdisjoint(_LAUNCHERS):
            words += ["-launcher", "ssh"]
    if number is not None:
        words += ["-n", str(number)]
    if typed.names.isdisjoint(_ENVIRONMENTS):
        words += ["-genvlist", ",".join(forward)]
    return (*words, *typed.kept, *typed.program)


def env(given: Mapping[str, str], implementation: str, ssh_config: str | None) -> dict[str, str]:
    """The launcher's variables with ours; the host file is on the command line."""
    told = {
        name: value for name, value in given.items() if name not in ("HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE")
    }
    if ssh_config is not None:
        if implementation == INTEL:
            args = before = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"
        else:  # mpi-operator sets it by a name that MPICH's Hydra does not read
            args, before = "HYDRA_LAUNCHER_EXTRA_ARGS", "HYDRA_LAUNCH_EXTRA_ARGS"
        told[args] = f"-F {ssh_config} {told.get(args) or told.get(before, '')}".strip()
    return told
