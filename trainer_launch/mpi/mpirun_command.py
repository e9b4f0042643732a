"""The MPI that an mpirun belongs to, and the command and variables with which it starts on these hosts. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from trainer_launch.host import runtime_directory
from trainer_launch.model import Member, hostfile
from trainer_launch.mpi.rank_environment import allowed, but_secrets
from trainer_launch.planning.mpi_options import Typed

OPEN_MPI, MPICH, INTEL = "Open MPI", "MPICH", "Intel MPI"

_OPEN = re.compile(r"(?:mpirun|mpiexec|orterun|prterun)\S* \((Open MPI|OpenRTE|PRRTE)\) v?(\d+)")
# A host that vanished is noticed after some 3 s, by mpirun and by its daemons alike (Open MPI: 8 minutes).
_ALIVE = {"keepalive_time": "1", "keepalive_intvl": "1", "keepalive_probes": "2"}
_LAUNCHERS = ("launcher", "bootstrap", "rmk")
_MANAGERS = "^slurm,tm,pbs,lsf,gridengine,loadleveler,alps,pals,flux"  # none of Open MPI's for resource managers
_ENVIRONMENTS = ("genvall", "genvnone", "genvlist", "envall", "envnone", "envlist")
_HOST_FILES = ("HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE")


# By these variables MPI looks for its own files: those of another installation break it.
_INSTALLATION = re.compile(
    r"(?:OPAL|OMPI|PMIX|PRTE|OPENMPI|MPI|MPICH|HYDRA|I_MPI)_(?:\w+_)?(?:PREFIX|HOME|ROOT|\w*DIR)"
)


class Dialect(Struct, frozen=True):
    """An implementation, and of Open MPI the first number of its version."""

    name: str
    major: int = 0

    @property
    def is_hydra(self) -> bool:
        """Whether its mpirun is a Hydra."""
        return self.name != OPEN_MPI


class MpirunCommand(Struct, frozen=True, kw_only=True):
    """mpirun's command, variables and list of hosts."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    hostfile: str  # its text


class JobHosts(Struct, frozen=True, kw_only=True):
    """The hosts of a start, and what mpirun needs to reach them."""

    hosts: tuple[Member, ...]  # that it uses; none: mpirun runs here alone
    everyone: tuple[Member, ...]  # that belong to the job
    hostfile: str  # where the list will be written
    ssh_config: str | None  # None: hosts are reached in a way of the user's or the platform's own
    is_root: bool
    stray: str = ""  # variables of a resource manager that is not here, but for which mpirun would ask it


def recognised(text: str) -> Dialect | None:
    """The dialect of an mpirun that prints this as its version; None when it is none that we know."""
    match = _OPEN.search(text)
    if match:  # PRRTE counts for itself: its 3 is Open MPI's 5
        return Dialect(OPEN_MPI, 5 if match[1] == "PRRTE" else int(match[2]))
    if "Intel(R) MPI" in text:
        return Dialect(INTEL)
    return Dialect(MPICH) if "HYDRA" in text or "MPICH" in text else None


def installation(env: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that say where MPI is installed, with their values."""
    return tuple(f"{name}={env[name]}" for name in sorted(env) if _INSTALLATION.fullmatch(name) and env[name])


def command(
    typed: Typed, dialect: Dialect, env: Mapping[str, str], forward: Sequence[str], job_hosts: JobHosts
) -> MpirunCommand:
    """mpirun on the hosts that are there; `forward` are variables that ranks get whatever they are called."""
    hosts, forward = job_hosts.hosts, (*forward, runtime_directory.MPI_RUN)
    number = ranks(typed.number, hosts, job_hosts.everyone)
    if dialect.is_hydra:
        words = _hydra_options(typed, job_hosts, number, but_secrets(env, forward))
        env, text = _hydra_env(env, dialect.name, job_hosts.ssh_config), hostfile.render_hydra(hosts)
    else:
        words = _open_mpi_options(typed, job_hosts, number, allowed(env, forward))
        env, text = _open_mpi_env(env, dialect.major, job_hosts), hostfile.render_open_mpi(hosts)
    argv = (typed.mpirun, *words, *typed.kept, *typed.program)
    return MpirunCommand(argv=argv, env=env, hostfile=text)


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


def _open_mpi_options(
    typed: Typed, job_hosts: JobHosts, number: int | None, forward: Sequence[str]
) -> tuple[str, ...]:
    words = ["--allow-run-as-root"] if job_hosts.is_root and "allow-run-as-root" not in typed.names else []
    if number is not None:
        words += ["-np", str(number)]
    if job_hosts.hosts:
        words += ["--hostfile", job_hosts.hostfile]
        for name in forward:
            words += ["-x", name] if name not in typed.named else []
    return tuple(words)


def _open_mpi_env(given: Mapping[str, str], major: int, job_hosts: JobHosts) -> dict[str, str]:
    """The launcher's variables with ours; what is set already stands.

    Open MPI 5 reads those of its runtime by another name, and mostly under another word.
    """
    new = major >= 5
    prefix = "PRTE_MCA_" if new else "OMPI_MCA_"
    ssh = "plm_ssh" if new else "plm_rsh"
    env = dict(given)
    if new:
        for name, value in given.items():
            if name.startswith("OMPI_MCA_plm_rsh_"):
                env.setdefault(f"PRTE_MCA_plm_ssh_{name.removeprefix('OMPI_MCA_plm_rsh_')}", value)
        # Else its daemons fork ranks in 16 threads, and may miss the end of one in its first milliseconds: the job
        # then never ends (5.0.7, about 1 start in 150 on two busy cores).
        env.setdefault("PRTE_MCA_odls_base_max_threads", "0")
    for name, value in _ALIVE.items():
        env.setdefault(f"{prefix}oob_tcp_{name}", value)
    env.setdefault(f"{prefix}{'prte' if new else 'orte'}_keep_fqdn_hostnames", "true")
    if job_hosts.stray:
        env = {f"{prefix}ras": _MANAGERS, f"{prefix}plm": _MANAGERS, **env}
    if job_hosts.ssh_config is not None:
        # The configuration is on this host only, so this host starts the daemons of all others itself.
        args = f"{prefix}{ssh}_args"
        env[args] = f"-F {job_hosts.ssh_config} {env.get(args, '')}".strip()
        env.setdefault(f"{prefix}{ssh}_no_tree_spawn", "1")
        env.setdefault(f"{prefix}{ssh}_agent", "ssh")
    return env


def _hydra_options(
    typed: Typed, job_hosts: JobHosts, number: int | None, forward: Sequence[str]
) -> tuple[str, ...]:
    words: list[str] = []
    if job_hosts.hosts:
        words += ["-f", job_hosts.hostfile]
        words += ["-launcher", "ssh"] if typed.names.isdisjoint(_LAUNCHERS) else []
    elif job_hosts.stray and typed.names.isdisjoint(_LAUNCHERS):
        words += ["-rmk", "user", "-launcher", "fork"]
    if number is not None:
        words += ["-n", str(number)]
    if typed.names.isdisjoint(_ENVIRONMENTS):
        words += ["-genvlist", ",".join(forward)]
    return tuple(words)


def _hydra_env(given: Mapping[str, str], implementation: str, ssh_config: str | None) -> dict[str, str]:
    """The launcher's variables with ours; the host file is on the command line."""
    env = {name: value for name, value in given.items() if name not in _HOST_FILES}
    if ssh_config is not None:
        if implementation == INTEL:
            args = before = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"
        else:  # mpi-operator sets it by a name that MPICH's Hydra does not read
            args, before = "HYDRA_LAUNCHER_EXTRA_ARGS", "HYDRA_LAUNCH_EXTRA_ARGS"
        env[args] = f"-F {ssh_config} {env.get(args) or env.get(before, '')}".strip()
    return env
