"""The command and the variables with which mpirun is started on these hosts. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from trainer_launch.host import runtime_directory
from trainer_launch.model import Member, hostfile, redaction
from trainer_launch.model.value_parsers import MAX_COUNT, parse_number
from trainer_launch.planning.mpi import SSH, Spec
from trainer_launch.planning.mpi_options import Typed


class Command(Struct, frozen=True, kw_only=True):
    """What is started."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    hostfile: str | None  # its text
    is_hydra: bool


class JobHosts(Struct, frozen=True, kw_only=True):
    """What a start stands on."""

    hosts: tuple[Member, ...]  # that it uses
    everyone: tuple[Member, ...]  # that belong to the job
    hostfile: str  # where the list will be written
    ssh_config: str | None
    is_root: bool


def command(spec: Spec, typed: Typed, dialect: Dialect, env: Mapping[str, str], job_hosts: JobHosts) -> Command:
    """mpirun on the hosts that are there."""
    hosts = job_hosts.hosts
    number = ranks(typed.number, hosts, job_hosts.everyone)
    where = job_hosts.hostfile if hosts else None
    config = job_hosts.ssh_config if spec.agent == SSH else None
    if dialect.is_hydra:
        names = but_secrets(env, (*spec.forward, runtime_directory.MPI_RUN))
        argv = hydra_argv(typed, where, number, names)
        told = hydra_env(env, dialect.name, config)
        text = hostfile.render_hydra(hosts)
    else:
        names = allowed(env, (*spec.forward, runtime_directory.MPI_RUN)) if hosts else ()
        argv = openmpi_argv(typed, where, number, names, is_root=job_hosts.is_root)
        told = openmpi_env(env, dialect.major, config)
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


# -- which MPI an mpirun is of -----------------------------------------------------------------


OPEN_MPI, MPICH, INTEL = "Open MPI", "MPICH", "Intel MPI"

_OPEN = re.compile(r"(?:mpirun|mpiexec|orterun|prterun)\S* \((?:Open MPI|OpenRTE|PRRTE)\) v?(\d+)(\.\S*)?")
_PRRTE = re.compile(r"prterun|PRRTE|PMIx Reference RunTime")
_VERSION = re.compile(r"[Vv]ersion:?\s+(\d+)(\.\S*)?")


class Dialect(Struct, frozen=True):
    """An implementation, and the first number of its version (0: unknown)."""

    name: str
    major: int = 0
    version: str = ""

    @property
    def is_hydra(self) -> bool:
        """Whether its mpirun is a Hydra."""
        return self.name != OPEN_MPI

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()


def recognised(said: str) -> Dialect | None:
    """The dialect of `mpirun --version`; None when it is none that we know."""
    found = _OPEN.search(said)
    if found:
        major = int(found[1])
        # PRRTE counts for itself: its 3 is Open MPI's 5.
        return Dialect(OPEN_MPI, 5 if _PRRTE.search(found[0]) else major, found[1] + (found[2] or ""))
    name = INTEL if "Intel(R) MPI" in said else MPICH if "HYDRA" in said or "MPICH" in said else None
    if name is None:
        return None
    version = _VERSION.search(said)
    return Dialect(name, int(version[1]), version[1] + (version[2] or "")) if version else Dialect(name)


# -- Open MPI ----------------------------------------------------------------------------------


# A host that vanished is noticed after some 3 s, by mpirun and by its daemons alike (Open MPI: 8 minutes).
_ALIVE = {"keepalive_time": "1", "keepalive_intvl": "1", "keepalive_probes": "2"}


def openmpi_argv(
    typed: Typed, hostfile: str | None, number: int | None, forward: Sequence[str], *, is_root: bool
) -> tuple[str, ...]:
    """The command: ours first, then what was typed."""
    words: list[str] = [typed.mpirun]
    if is_root and "allow-run-as-root" not in typed.names:
        words.append("--allow-run-as-root")
    if hostfile is not None:
        words += ["--hostfile", hostfile]
    if number is not None:
        words += ["-np", str(number)]
    for name in forward:
        if name not in typed.named:
            words += ["-x", name]
    return (*words, *typed.kept, *typed.program)


def openmpi_env(given: Mapping[str, str], major: int, ssh_config: str | None) -> dict[str, str]:
    """The launcher's variables with ours; what is set already stands.

    Open MPI 5 reads those of its runtime by another name, and mostly under another word.
    """
    new = major >= 5
    prefix = "PRTE_MCA_" if new else "OMPI_MCA_"
    ssh = "plm_ssh" if new else "plm_rsh"
    told = dict(given)
    if new:
        for name, value in given.items():
            if name.startswith("OMPI_MCA_plm_rsh_"):
                told.setdefault(f"PRTE_MCA_plm_ssh_{name.removeprefix('OMPI_MCA_plm_rsh_')}", value)
        # Else its daemons fork ranks in 16 threads, and may miss the end of one in its first milliseconds: the job
        # then never ends (5.0.7, about 1 start in 150 on two busy cores).
        told.setdefault("PRTE_MCA_odls_base_max_threads", "0")
    for name, value in _ALIVE.items():
        told.setdefault(f"{prefix}oob_tcp_{name}", value)
    told.setdefault(f"{prefix}{'prte' if new else 'orte'}_keep_fqdn_hostnames", "true")
    if ssh_config is not None:
        # The configuration is on this host only, so this host starts the daemons of all others itself.
        args = f"{prefix}{ssh}_args"
        told[args] = f"-F {ssh_config} {told.get(args, '')}".strip()
        told.setdefault(f"{prefix}{ssh}_no_tree_spawn", "1")
        told.setdefault(f"{prefix}{ssh}_agent", "ssh")
    return told


# -- Hydra: MPICH and Intel MPI ----------------------------------------------------------------


_LAUNCHERS = ("launcher", "bootstrap", "rmk")
_ENVIRONMENTS = ("genvall", "genvnone", "genvlist", "envall", "envnone", "envlist")


def hydra_argv(typed: Typed, hostfile: str | None, number: int | None, forward: Sequence[str]) -> tuple[str, ...]:
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


def hydra_env(given: Mapping[str, str], implementation: str, ssh_config: str | None) -> dict[str, str]:
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


# -- variables that ranks on other hosts get ---------------------------------------------------


# Libraries' own settings, by which a rank behaves the same on all hosts.
_PREFIXES = (
    *("NCCL_", "UCX_", "UCC_", "FI_", "GLOO_", "RDMAV_", "IBV_", "MLX5_", "PSM2_", "PSM3_", "HCOLL_", "SHARP_"),
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_"),
    *("CUDA_", "CUDNN_", "CUBLAS_", "TORCH_", "PYTORCH_", "TRITON_", "XLA_", "JAX_", "TF_"),
    *("HIP_", "HSA_", "RCCL_"),
    *("HF_", "TRANSFORMERS_", "TOKENIZERS_", "DATASETS_", "DIFFUSERS_", "ACCELERATE_"),
    *("HOROVOD_", "DEEPSPEED_", "DS_", "MLX_", "MPI4PY_", "WANDB_", "MLFLOW_"),
    *("PYTHON", "LC_"),
)
_NAMES = frozenset(
    ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "LANG", "TZ", "CONDA_PREFIX", "VIRTUAL_ENV", "XDG_CACHE_HOME")
)
# A host's own: which devices it has, and which of its interfaces leads to the others.
_OWN = frozenset(
    ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
)
# A pod's own, for launchers that would hand on everything.
_OF_POD = ("TRAINER_LAUNCH_", "KUBERNETES_", "NVIDIA_", "HOSTNAME", "OMPI_", "PMI_", "SSH_")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def allowed(env: Mapping[str, str], asked: Collection[str] = ()) -> tuple[str, ...]:
    """Names of the variables that ranks get: those on the list that are set, and those that the user asks for."""
    return tuple(sorted(name for name in env if _goes(name, env[name]) or name in asked))


def but_secrets(env: Mapping[str, str], asked: Collection[str] = ()) -> tuple[str, ...]:
    """All names but secrets', for launchers that would hand on everything."""
    return tuple(
        sorted(
            name
            for name, value in env.items()
            if name in asked or (_is_everyones(name) and _is_plain(name, value) and not _looks_secret(name, value))
        )
    )


def withheld(env: Mapping[str, str], asked: Collection[str] = ()) -> tuple[str, ...]:
    """Names that are on the list, or would be handed on, if they did not look like secrets."""
    return tuple(
        sorted(n for n, v in env.items() if n.startswith(_PREFIXES) and _looks_secret(n, v) and n not in asked)
    )


def _goes(name: str, value: str) -> bool:
    listed = name in _NAMES or (name.startswith(_PREFIXES) and name not in _OWN)
    return listed and _is_plain(name, value) and not _looks_secret(name, value)


def _is_everyones(name: str) -> bool:
    return name not in _OWN and not name.startswith(_OF_POD)


def _is_plain(name: str, value: str) -> bool:
    """mpirun cuts a value at its first line's end, and Bash's exported functions have no plain names."""
    return _PLAIN.fullmatch(name) is not None and "\n" not in value


def _looks_secret(name: str, value: str) -> bool:
    return redaction.redact(name, value) != value
