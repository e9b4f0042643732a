"""The variables that ranks get: a container's by its sshd, the launcher's by mpirun or horovodrun. Pure.

sshd starts each session with an environment of its own: without this, LD_LIBRARY_PATH, CUDA's and NCCL's variables
of the image and of the pod would not reach a single rank. Secrets go along only by name, with `--forward-env`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from msgspec import Struct

from trainer_launch.model.redaction import redact
from trainer_launch.model.settings import PREFIX

MAX_BYTES = 128 * 1024  # sshd hands its configuration from process to process, 256 KiB of it at most
# sshd's own words for a session, and what belonged to the shell that started the container.
_NOT_OURS = frozenset(("USER", "LOGNAME", "SHELL", "MAIL", "PWD", "OLDPWD", "SHLVL", "_", "TERM"))
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
_OF_HOST = frozenset(
    ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
)
# A pod's own, for launchers that would hand on everything.
_OF_POD = (PREFIX, "KUBERNETES_", "NVIDIA_", "HOSTNAME", "K_MPI_JOB_ROLE", "OMPI_", "PMI_", "SSH_")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")


class Handed(Struct, frozen=True):
    """The variables of a session; and the names of those that it does not get, for people."""

    env: Mapping[str, str]
    secrets: tuple[str, ...]  # they look like secrets, and nobody named them
    unfit: tuple[str, ...]  # a line of a configuration cannot hold them


def handed_on(env: Mapping[str, str], named: Collection[str], limit_bytes: int = MAX_BYTES) -> Handed:
    """The part of a container's environment that sshd gives its sessions; `named` go along whatever they look like.

    A configuration has lines, so a value cannot have any; beyond the limit the largest values are left out.
    """
    wanted = {
        name: value
        for name, value in sorted(env.items())
        if name not in _NOT_OURS and not name.startswith((PREFIX, "SSH_"))
    }
    secrets = tuple(name for name, value in wanted.items() if name not in named and _looks_secret(name, value))
    kept = {name: value for name, value in wanted.items() if name not in secrets}
    fits = {name: value for name, value in kept.items() if _is_plain(name, value)}
    total = sum(map(_size, fits.items()))
    for entry in sorted(fits.items(), key=_size, reverse=True):
        if total <= limit_bytes:
            break
        total -= _size(entry)
        del fits[entry[0]]
    return Handed(fits, secrets, tuple(name for name in kept if name not in fits))


def allowed(env: Mapping[str, str], named: Collection[str] = ()) -> tuple[str, ...]:
    """The variables that mpirun has to hand on: libraries' settings, and those that the user names."""
    return tuple(sorted(name for name in env if name in named or _is_setting(name, env[name])))


def but_secrets(env: Mapping[str, str], named: Collection[str] = ()) -> tuple[str, ...]:
    """All variables but a pod's own and secrets, for launchers that would hand on everything."""
    return tuple(sorted(name for name in env if name in named or _is_everyones(name, env[name])))


def withheld(env: Mapping[str, str], named: Collection[str] = ()) -> tuple[str, ...]:
    """Libraries' settings that do not go along because they look like secrets."""
    names = (name for name in env if name.startswith(_PREFIXES) and name not in named)
    return tuple(sorted(name for name in names if _looks_secret(name, env[name])))


def _is_setting(name: str, value: str) -> bool:
    return (name in _NAMES or name.startswith(_PREFIXES)) and _is_everyones(name, value)


def _is_everyones(name: str, value: str) -> bool:
    is_own = name in _OF_HOST or name.startswith(_OF_POD)
    return not is_own and _is_plain(name, value) and not _looks_secret(name, value)


def _is_plain(name: str, value: str) -> bool:
    """mpirun cuts a value at its first line's end, and Bash's exported functions have no plain names."""
    return _NAME.fullmatch(name) is not None and not any(sign in value for sign in "\n\r\0")


def _looks_secret(name: str, value: str) -> bool:
    return redact(name, value) != value


def _size(entry: tuple[str, str]) -> int:
    return len("=".join(entry).encode(errors="surrogateescape")) + 4  # its quotes, and a blank
