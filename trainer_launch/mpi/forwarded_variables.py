"""Which of the launcher's variables the ranks on other hosts get. Pure.

By ssh nothing of the pod's environment comes along. An allow-list, because a launcher has much that is only its own
(its addresses, its tokens); what looks like a secret only goes where the user names it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from trainer_launch.model import redaction

# Libraries' own settings, by which a rank behaves the same on all hosts.
_PREFIXES = (
    *("NCCL_", "UCX_", "UCC_", "FI_", "GLOO_", "RDMAV_", "IBV_", "MLX5_", "PSM2_", "PSM3_", "HCOLL_", "SHARP_"),
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_"),
    *(
        "CUDA_",
        "CUDNN_",
        "CUBLAS_",
        "TORCH_",
        "PYTORCH_",
        "TRITON_",
        "XLA_",
        "JAX_",
        "TF_",
        "HIP_",
        "HSA_",
        "RCCL_",
    ),
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
